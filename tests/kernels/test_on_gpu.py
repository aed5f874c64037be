"""What only a GPU can show: compiled and captured programs, several devices, large tensors, the same bits each time."""

import pytest
import torch

from tpfused.kernels.cross_entropy import backward, loss, statistics
from tpfused.kernels.embedding import embedding
from tpfused.kernels.gated_act import gated_act
from tpfused.kernels.linear_act import linear_act
from tpfused.kernels.softmax import scale_mask_softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def cross_entropy(logits, target):
    """The dense loss, through the three steps of the vocabulary-parallel one, and its gradient."""
    losses, log_z = loss(statistics(logits, target, 0, False), target, logits.shape[-1], -100, 0.0, 0.0)
    ones = torch.ones_like(losses)
    return losses, backward(logits, target, log_z, ones, 0, logits.shape[-1], -100, 0.0, 0.0)


def operations(device="cuda", dtype=torch.bfloat16):
    """name -> (function of floating tensors, those tensors): one small call of each operation."""
    random = lambda *shape: torch.randn(shape, device=device, dtype=dtype)  # noqa: E731
    ids = torch.randint(40, (6, 50), device=device)  # some rows of the table are wanted often
    target = torch.randint(100, (30,), device=device)
    mask = torch.rand(2, 1, 33, 130, device=device) > 0.3
    return {
        "softmax": (lambda x: scale_mask_softmax(x, mask, 0.5, True), [random(2, 3, 33, 130)]),
        "dropout": (lambda x: scale_mask_softmax(x, mask, 0.5, dropout_p=0.3), [random(2, 3, 33, 130)]),
        "gated_act": (gated_act, [random(5, 66)]),
        "embedding": (lambda w: embedding(ids, w, 5, 60), [random(20, 72)]),
        "linear_act": (lambda x, w, b: linear_act(x, w, b, "gelu"), [random(70, 64), random(48, 64), random(48)]),
        "large linear_act": (
            lambda x, w, b: linear_act(x, w, b, "gelu", backend="triton"),
            [random(2200, 512), random(2056, 512), random(2056)],
        ),
        "gated linear": (
            lambda x, w: linear_act(x, w, None, "silu", gated=True, backend="triton"),
            [random(2200, 512), random(2064, 512)],
        ),
        "cross_entropy": (lambda x: cross_entropy(x, target)[0], [random(30, 100)]),
    }


NAMES = list(operations("meta"))
DIFFERENTIABLE = [name for name in NAMES if name != "cross_entropy"]  # its Function belongs to the layer


def results(function, inputs):
    """The output and the gradients, from the same random state each time."""
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    if not out.requires_grad:
        return [out]
    generator = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name):
    function, inputs = operations()[name]
    first = results(function, inputs)
    for _ in range(5):
        assert all(map(torch.equal, results(function, inputs), first))


@pytest.mark.parametrize("name", NAMES)
def test_compiles_into_one_graph(name):
    function, inputs = operations()[name]
    compiled = torch.compile(function, fullgraph=True)
    for actual, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
        if name == "dropout":  # compiled code draws its seed otherwise
            assert actual.shape == expected.shape and actual.isfinite().all()
        else:
            torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_captured_graph_follows_its_inputs(name):
    function, inputs = operations()[name]
    static = [x.detach().clone().requires_grad_() for x in inputs]
    grad = torch.randn_like(function(*static))

    def step():
        return torch.autograd.grad(function(*static), static, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*static)
        captured = torch.autograd.grad(out, static, grad)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in static:
                x.copy_(torch.randn_like(x))
        graph.replay()
        again = out.clone()
        if name == "dropout":
            graph.replay()
            assert not torch.equal(again, out)  # each replay draws anew, as torch's own dropout does
        else:
            assert torch.equal(again, function(*static))
            assert all(map(torch.equal, captured, step()))


def test_large_tensors():
    """More than 2**31 elements: the last rows are right, which 32-bit offsets would not reach."""
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip("needs 30 GiB")
    rows = 2**16 + 8
    x = torch.empty(1, 1, rows, 2**15, device="cuda", dtype=torch.float16).normal_()
    y = scale_mask_softmax(x)
    torch.testing.assert_close(y[..., -3:, :], x[..., -3:, :].softmax(-1), rtol=1e-3, atol=1e-5)
    logits = x.view(rows, 2**15)
    target = torch.randint(2**15, (rows,), device="cuda")
    losses, grad = cross_entropy(logits, target)
    last = torch.nn.functional.cross_entropy(logits[-3:].float(), target[-3:], reduction="none")
    torch.testing.assert_close(losses[-3:], last, rtol=1e-4, atol=1e-4)
    assert grad[-3:].float().sum(-1).abs().max() < 1e-2 and grad[-1, target[-1]] < -0.9
    del y, grad
    gated = gated_act(logits)
    gate, up = logits[-1].view(-1, 2).float().unbind(-1)
    torch.testing.assert_close(gated[-1].float(), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_device_of_its_tensors(name):
    torch.manual_seed(3)
    function, inputs = operations("cuda:0")[name]
    torch.manual_seed(3)
    elsewhere, there = operations("cuda:1")[name]
    there = [x.copy_(y) for x, y in zip(there, inputs, strict=True)]
    assert torch.cuda.current_device() == 0
    for actual, expected in zip(results(elsewhere, there), results(function, inputs), strict=True):
        assert actual.device.index == 1
        if name not in ("dropout", "softmax", "embedding", "cross_entropy"):  # whose masks and ids differ
            assert torch.equal(actual.cpu(), expected.cpu())
