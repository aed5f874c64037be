"""linear_act and dgrad_act against their twins: every activation, back end, layout and way to keep the gradient."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.compare import assert_matches, assert_within
from tpfused import reference
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.kernels.last_wave import sharing
from tpfused.kernels.linear_act import BACKENDS, dgrad_act, linear_act
from tpfused.kernels.matmul import Tiling, matmul

# On a Hopper GPU matmul_hopper multiplies the last two; the first of them has tiles that two programs share, the other
# several ragged ones a program. The others are multiplied by pointers, by TMA, with small tiles.
SHAPES = [(7, 1, 6), (5, 9, 7), (70, 40, 24)]
GPU_SHAPES = [(300, 264, 520), (130, 1024, 2312), (1700, 2056, 2832), (5064, 264, 2832)]


def twin(activation, gated=False):
    def reference_of(x, weight, bias=None):
        pre = torch.nn.functional.linear(x, weight, bias)
        return reference.gated_act(pre, activation) if gated else reference.activate(pre, activation)

    return reference_of


def shapes(device):
    return SHAPES + (GPU_SHAPES if device.type == "cuda" else [])


def operands(m, k, n, device, dtype):
    scale = k**-0.5
    return [
        torch.randn(m, k, device=device, dtype=dtype),
        torch.randn(n, k, device=device, dtype=dtype) * scale,
        torch.randn(n, device=device, dtype=dtype),
    ]


def can(backend, dtype, device, activation="gelu"):
    if backend == "cublaslt":
        return False  # it keeps no pre-activation; see the test without gradients
    return not (backend == "triton" and dtype == torch.float64 and device.type == "cuda")


@pytest.mark.parametrize("backend", ["triton", "cublas"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_equals_its_twin(device, dtypes, activation, backend):
    for dtype, (m, k, n) in product(dtypes, shapes(device)):
        if not can(backend, dtype, device) or ((m, k, n) in GPU_SHAPES[:-1] and dtype != torch.bfloat16):
            continue
        x, weight, bias = operands(m, k, n, device, dtype)
        if activation == "relu":
            # Sums without roundings, for the derivative jumps at zero.
            x, weight, bias = (x * 16).round() / 16, (weight * 256).round() / 256, (bias * 16).round() / 16
        here = lambda *a: linear_act(*a, activation=activation, backend=backend)  # noqa: E731
        assert_matches(here, twin(activation), [x, weight, bias], f"{m, k, n}")
        if activation is None:
            assert_matches(here, twin(None), [x, weight], f"no bias {m, k, n}")
        if activation in ("silu", "gelu") and n % 2 == 0:
            gated = lambda *a: linear_act(*a, activation=activation, gated=True, backend=backend)  # noqa: E731
            assert_matches(gated, twin(activation, True), [x, weight, bias], f"gated {m, k, n}")


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_dgrad_act_equals_its_twin(device, dtypes, activation):
    for dtype, (m, k, n) in product(dtypes, shapes(device)):
        if (m, k, n) in GPU_SHAPES[:-1] and dtype != torch.bfloat16:
            continue
        dy, weight, _ = operands(m, k, n, device, dtype)
        weight = weight.T.contiguous()
        pre = torch.randn(m, n, device=device, dtype=dtype)

        def exact(dtype, dy=dy, weight=weight, pre=pre):
            x = pre.to(dtype).requires_grad_()
            (grad,) = torch.autograd.grad(reference.activate(x, activation), x, dy.to(dtype) @ weight.to(dtype))
            return grad.detach(), grad.sum(0)

        for actual, expected, eager in zip(
            dgrad_act(dy, weight, pre, activation), exact(torch.float64), exact(dtype), strict=True
        ):
            assert actual.dtype == dtype
            assert_within(actual, expected, eager, str((m, k, n)))


def test_without_gradients_every_backend_agrees(device, dtypes):
    dtype = dtypes[-1]
    x, weight, bias = operands(72, 64, 48, device, dtype)
    for activation, backend in product(("relu", "gelu_tanh"), BACKENDS):
        if backend == "cublaslt" and device.type != "cuda":
            continue
        with torch.no_grad():
            y = linear_act(x, weight, bias, activation, backend=backend)
        expected = twin(activation)(*(t.double() for t in (x, weight, bias)))
        assert (y - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max(), (activation, backend)


def test_layouts_and_nothing_to_do(device, dtypes):
    dtype = dtypes[-1]
    x, weight, bias = operands(24, 16, 40, device, dtype)
    base = torch.randn(16, 3, 24, device=device, dtype=dtype)
    for name, strange in {
        "transposed": x.T.contiguous().T,
        "expanded": x[:1].expand(24, 16),
        "strided": torch.stack([x, x], 1)[:, 0],
        "unaligned": torch.nn.functional.pad(x, (1, 0))[:, 1:],
        "three dimensions": base.permute(1, 2, 0),
    }.items():
        assert_matches(lambda *a: linear_act(*a, activation="gelu"), twin("gelu"), [strange, weight, bias], name)
    assert_matches(lambda *a: linear_act(*a, activation="silu"), twin("silu"), [x, weight.T.contiguous().T, bias])
    assert_matches(lambda *a: linear_act(*a, activation="relu"), twin("relu"), [x, weight, bias.repeat(2)[::2]], "bias")
    for gated, recompute in ((True, True), (False, True), (True, False), (False, False)):
        nothing = x[:0].requires_grad_()
        y = linear_act(nothing, weight.requires_grad_(), bias, "gelu", gated=gated, recompute=recompute)
        grads = torch.autograd.grad(y.sum(), (nothing, weight))
        assert grads[0].shape == (0, 16) and not grads[1].any()
    weight = weight.detach()
    for empty in (x[:0], x[:, :0]):
        y = linear_act(empty, weight[:, : empty.shape[1]], bias, "relu")
        torch.testing.assert_close(y, bias.relu().expand(empty.shape[0], 40))
    assert linear_act(x, weight[:0], bias[:0], "gelu").shape == (24, 0)


def test_recomputed_and_accumulated_gradients_are_the_same(device, dtypes):
    dtype = dtypes[-1]
    inputs = [t.requires_grad_() for t in operands(24, 16, 40, device, dtype)]
    dy = torch.randn(24, 40, device=device, dtype=dtype)
    for activation in ACTIVATIONS:
        expected = torch.autograd.grad(linear_act(*inputs, activation), inputs, dy)
        again = torch.autograd.grad(linear_act(*inputs, activation, recompute=True), inputs, dy)
        for a, b in zip(again, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # one multiplied again, and rounded otherwise
        main_grad = torch.ones(40, 16, device=device)
        y = linear_act(*inputs, activation, main_grad=main_grad)
        dx, dweight, dbias = torch.autograd.grad(y, inputs, dy, allow_unused=True)
        assert dweight is None and torch.equal(dx, expected[0]) and torch.equal(dbias, expected[2])
        torch.testing.assert_close(main_grad - 1, expected[1].float(), rtol=1e-2, atol=1e-2)


def test_gradcheck_and_operators(device):
    x, weight, bias = (t.requires_grad_() for t in operands(5, 4, 6, device, torch.float64))
    for activation, gated in (("gelu", False), ("silu", True), (None, False)):
        function = lambda *a: linear_act(*a, activation, gated=gated)  # noqa: B023, E731
        assert torch.autograd.gradcheck(function, (x, weight, bias))
    x, weight, bias = (t.requires_grad_() for t in operands(5, 4, 6, device, torch.float32))
    for backend in (0, 2):
        torch.library.opcheck(torch.ops.tpfused.linear_act.default, (x, weight, bias, None, 1, False, True, backend))
    torch.library.opcheck(
        torch.ops.tpfused.dgrad_act.default,
        (x.detach(), weight.detach().T.contiguous(), bias.detach().expand(5, 6).contiguous(), 2),
    )


@triton.jit
def _note(hook_ptr, row, ROWS: tl.constexpr):
    tl.atomic_add(hook_ptr + row // ROWS, 1)


def test_the_hook_runs_before_each_tile(device):
    x, w = torch.randn(40, 16, device=device), torch.randn(16, 48, device=device)
    seen, y = torch.zeros(3, dtype=torch.int32, device=device), torch.empty(40, 48, device=device)
    matmul(x, w, y, before_tile=_note, hook=seen, tiling=Tiling(16, 16, 16, 2, 1, 2, 4))
    assert seen.tolist() == [3, 3, 3]
    torch.testing.assert_close(y, x @ w, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_hook_runs_before_each_tile_on_hopper():
    """Where two programs share a tile, once for each of them; never for a program that has nothing left to do."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    for m, n in ((2048, 2304), (1700, 2832)):  # 16 x 9 and 14 x 12 tiles
        x, w = torch.randn(m, 2048, device="cuda").half(), torch.randn(2048, n, device="cuda").half()
        seen, y = torch.zeros(-(-m // 128), dtype=torch.int32, device="cuda"), x.new_empty(m, n)
        matmul(x, w, y, before_tile=_note, hook=seen)
        tiles = seen.numel() * -(-n // 256)
        helped, _ = sharing(tiles, programs, 2048 // 64)
        assert (seen >= -(-n // 256)).all() and seen.sum() == tiles + (tiles % programs if helped else 0)
        torch.testing.assert_close(y, x @ w, rtol=2e-3, atol=2e-2)


def test_nan_and_infinity_stay(device, dtypes):
    dtype = dtypes[-1]
    x = torch.tensor([[float("nan")], [float("inf")], [float("-inf")], [100.0], [-100.0]], device=device, dtype=dtype)
    weight = torch.ones(1, 1, device=device, dtype=dtype)
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        y = linear_act(x, weight, None, activation, backend="triton").flatten()
        assert y[0].isnan() and y[1] == float("inf") and y[3] == 100 and abs(y[4]) < 1e-5, (activation, y)


def test_derivatives_at_infinity(device):
    x = torch.tensor([[float("inf")], [float("-inf")], [2.0]], device=device, requires_grad=True)
    weight = torch.ones(1, 1, device=device)
    for activation in ("relu", None):
        (grad,) = torch.autograd.grad(linear_act(x, weight, None, activation).sum(), x)
        assert grad.flatten().tolist() == ([1, 0, 1] if activation else [1, 1, 1])
        dpre, _ = dgrad_act(torch.ones(3, 1, device=device), weight, x.detach(), activation)
        assert dpre.flatten().tolist() == ([1, 0, 1] if activation else [1, 1, 1])


@pytest.mark.parametrize("backend", ["triton", "cublas"])
def test_autocast_is_that_of_a_linear_layer(device, backend):
    x, weight, bias = (t.requires_grad_() for t in operands(24, 16, 40, device, torch.float32))
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    with torch.autocast(device.type, dtype=dtype):
        y = linear_act(x, weight, bias, "gelu", backend=backend)
        expected = torch.nn.functional.linear(x, weight, bias)
        grads = torch.autograd.grad(y.float().sum(), (x, weight, bias))  # here, which users should not
    assert y.dtype == expected.dtype == dtype and all(g.dtype == torch.float32 for g in grads)
    torch.testing.assert_close(y, torch.nn.functional.gelu(expected), rtol=2e-2, atol=2e-2)


def test_a_second_derivative_is_refused(device):
    x, weight, bias = (t.requires_grad_() for t in operands(4, 6, 8, device, torch.float32))
    (grad,) = torch.autograd.grad(linear_act(x, weight, bias, "silu").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        (grad.square().sum() + linear_act(x, weight, bias, "silu").sum()).backward()


def test_autocast_leaves_what_is_not_floating(device):
    weight = torch.randn(6, 8, device=device)
    with torch.autocast(device.type, dtype=torch.float16):
        for x in (
            torch.ones(4, 8, device=device, dtype=torch.int64),
            torch.ones(4, 8, device=device).to(torch.complex64),
        ):
            with pytest.raises(TypeError, match="floating"):
                linear_act(x, weight)
    with pytest.raises(ValueError, match="meta"):
        linear_act(torch.ones(4, 8, device="meta"), weight.to("meta"))


def test_bad_input_is_refused(device):
    x, weight, bias = operands(4, 6, 8, device, torch.float32)
    good = {"x": x, "weight": weight, "bias": bias, "activation": "gelu"}
    for error, told, arguments in (
        (ValueError, "tanh", {"activation": "tanh"}),
        (ValueError, "fast", {"backend": "fast"}),
        (ValueError, "cublaslt", {"backend": "cublaslt"}),
        (ValueError, r"\(4, 5\)", {"x": x[:, :5]}),
        (ValueError, r"\(7,\)", {"bias": bias[:7]}),
        (ValueError, "7", {"weight": weight[:7], "bias": bias[:7], "gated": True}),
        (TypeError, "int64", {"x": x.long()}),
        (TypeError, "float64", {"bias": bias.double()}),
        (ValueError, "meta", {"weight": weight.to("meta")}),
        (ValueError, "float64", {"main_grad": weight.double()}),
    ):
        with pytest.raises(error, match=told):
            linear_act(**good | arguments)
    with pytest.raises(ValueError, match=r"\(4, 6\)"):
        dgrad_act(x, weight, x, "gelu")
