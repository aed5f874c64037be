"""``act(x @ w.T + bias)``, its gated form, and their gradients.

Floor: the bare matmuls, 2 M N K FLOPs forward and twice that backward. Written beside the matmul's tiles, bias,
activation and (for training) the pre-activation cost its last tile's epilogue only. Backward, the activation's
derivative and the bias gradient take one pass over ``[M, N]`` of 3 values an entry, or none where they are fused into
the matmul that produces dy (`dgrad_act`).

Three ways to compute the forward, of which `choose` takes the fastest measured:

- "triton": this package's matmul with everything in its epilogue;
- "cublaslt": cuBLASLt's epilogue, for relu and gelu_tanh with a bias; it can't also write the pre-activation;
- "cublas": cuBLAS, the bias in its epilogue, then one elementwise kernel.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.autograd import records_gradient
from tpfused.kernels.act_backward import act_backward, add_sums, bias_grad
from tpfused.kernels.activations import ACTIVATIONS, activate
from tpfused.kernels.choices import choose
from tpfused.kernels.gated_act import gated_act_backward, gated_act_forward
from tpfused.kernels.launch import (
    autocast_to,
    cdiv,
    compute_type,
    is_floating,
    is_half,
    launch,
    needs_kernel_device,
    on_device_of,
    register,
    unit_stride,
    without_autocast,
)
from tpfused.kernels.matmul import matmul, product, row_tile

BACKENDS = ("triton", "cublaslt", "cublas")
AUTOMATIC = -1  # in place of an index of these: chosen inside the operator, where torch.compile need not follow


@triton.jit
def _act_kernel(x_ptr, y_ptr, count, ACT: tl.constexpr, HALF: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(COMPUTE)
    tl.store(y_ptr + at, activate(x, ACT, HALF).to(y_ptr.dtype.element_ty), mask=at < count)


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    gated: bool = False,
    recompute: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``act(x @ weight.T + bias)``, accumulated in float32 (float64 for float64). Differentiable.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of x's dtype and device.
        bias: ``[N]``.
        activation: None, "gelu" (erf), "gelu_tanh", "relu", "silu".
        gated: the rows of `weight` alternate between gate and up, and the result is ``act(gate) * up``, ``[..., N/2]``
            (SwiGLU, GEGLU; Shazeer, 2020).
        recompute: multiply again in backward instead of keeping the pre-activation.
        main_grad: float32 ``[N, K]`` to which backward adds the weight's gradient, instead of returning one.
        backend: one of `BACKENDS`; None takes the fastest measured.

    Returns:
        ``[..., N]``, or ``[..., N/2]`` if gated, of x's dtype (under autocast of its dtype, as `F.linear`).

    Raises:
        ValueError: shapes or devices that do not fit, an unknown activation or backend, a backend that can't do it.
        TypeError: dtypes that differ or are not floating.
    """
    x, weight, bias = autocast_to(x, weight, bias)
    _check(x, weight, bias, activation, gated, main_grad)
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be None or one of {BACKENDS}, not {backend!r}")
    act = ACTIVATIONS[activation]
    training = records_gradient(x, weight, bias)
    # relu's derivative can be told from its result.
    keeps_pre = training and not recompute and (gated or act not in (0, ACTIVATIONS["relu"]))
    if backend is not None and backend not in _possible(x, bias, act, gated, keeps_pre):
        why = f"activation {activation!r}, gated {gated}, bias {bias is not None}, on {x.device}"
        raise ValueError(f"backend {backend!r} can't do this: {why}, pre-activation kept {keeps_pre}")
    way = AUTOMATIC if backend is None else BACKENDS.index(backend)
    x2 = x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
    y, _ = _linear_act(x2, weight, bias, main_grad, act, gated, keeps_pre, way)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def dgrad_act(dy: Tensor, weight: Tensor, pre: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """The backward of ``act(pre) @ weight.T`` down to `pre`: ``(dy @ weight) * act'(pre)`` and its sum over the rows.

    In an MLP: the second linear's dgrad, the activation's derivative and the first bias's gradient in one matmul. Not
    differentiable.

    Args:
        dy: ``[M, K]``. weight: ``[K, N]``. pre: ``[M, N]``, all of one dtype and device.

    Returns:
        ``[M, N]`` and ``[N]``, of dy's dtype.

    Raises:
        ValueError, TypeError: as `linear_act`.
    """
    shapes = [tuple(t.shape) for t in (dy, weight, pre)]
    if dy.ndim != 2 or weight.ndim != 2 or shapes[2] != (shapes[0][0], shapes[1][1]) or shapes[0][1] != shapes[1][0]:
        raise ValueError(f"dy {shapes[0]}, weight {shapes[1]} and pre {shapes[2]} are not [M, K], [K, N] and [M, N]")
    _check(dy, weight.T, None, activation, False, None)
    if records_gradient(dy, weight, pre):
        raise ValueError("dgrad_act is a backward pass, which can't be differentiated: call it under torch.no_grad()")
    if pre.dtype != dy.dtype or pre.device != dy.device:
        raise ValueError(f"pre is {pre.dtype} on {pre.device}, dy {dy.dtype} on {dy.device}")
    return _dgrad_act(dy, weight, pre, ACTIVATIONS[activation])


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, gated: bool, main_grad: Tensor | None
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, not {activation!r}")
    if not is_floating(x):
        raise TypeError(f"x must be floating-point, not {x.dtype}")
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    if gated and (weight.shape[0] % 2 or activation is None):
        raise ValueError(f"gated needs an even number of rows and an activation, not {weight.shape[0]}, {activation!r}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)} does not fit a weight of shape {tuple(weight.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"x is {x.dtype}, {name} {other.dtype}")
    for name, other in (("weight", weight), ("bias", bias), ("main_grad", main_grad)):
        if other is not None and other.device != x.device:
            raise ValueError(f"x is on {x.device}, {name} on {other.device}")
    if main_grad is not None and (main_grad.dtype != torch.float32 or main_grad.shape != weight.shape):
        raise ValueError(
            f"main_grad must be float32 {tuple(weight.shape)}, not {main_grad.dtype} {tuple(main_grad.shape)}"
        )
    needs_kernel_device(x, "linear_act")


def _possible(x: Tensor, bias: Tensor | None, activation: int, gated: bool, keeps_pre: bool) -> tuple[str, ...]:
    possible = ["cublas"]
    # Triton multiplies float64 in the interpreter only.
    if x.dtype != torch.float64 or not x.is_cuda:
        possible.append("triton")
    fused_by_cublaslt = ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"]
    if x.is_cuda and bias is not None and activation in fused_by_cublaslt and not gated and not keeps_pre:
        possible.append("cublaslt")
    return tuple(possible)


def linear_act_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    activation: int,
    gated: bool,
    keeps_pre: bool,
    backend: int,
) -> tuple[Tensor, Tensor]:
    """-> y, and the pre-activation or an empty tensor."""
    (m, k), n = x.shape, weight.shape[0]
    bias = None if bias is None else bias.contiguous()
    name = BACKENDS[backend]
    if backend == AUTOMATIC:
        name = choose(_possible(x, bias, activation, gated, keeps_pre), x, n, activation, gated, keeps_pre)
    if name == "triton" and min(m, n, k) > 0:
        y = x.new_empty(m, n // (1 + gated))
        pre = x.new_empty((m, n) if keeps_pre else (0, n))
        matmul(
            unit_stride(x), weight.T, y, bias=bias, activation=activation, gated=gated, pre=pre if keeps_pre else None
        )
        return y, pre
    if name == "cublaslt" and min(m, n, k) > 0:
        use_gelu = activation == ACTIVATIONS["gelu_tanh"]
        return torch._addmm_activation(bias, x, weight.T, use_gelu=use_gelu), x.new_empty(0, n)
    with without_autocast(x):
        pre = torch.nn.functional.linear(x, weight, bias)
    y = gated_act_forward(pre, None, True, activation) if gated else apply_activation(pre, activation)
    return y, pre if keeps_pre else pre.new_empty(0, n)


def _fake_forward(x, weight, bias, main_grad, activation, gated, keeps_pre, backend):
    m, n = x.shape[0], weight.shape[0]
    return x.new_empty(m, n // (1 + gated)), x.new_empty(m if keeps_pre else 0, n)


def apply_activation(pre: Tensor, activation: int) -> Tensor:
    """``act(pre)`` of a contiguous tensor."""
    if activation == 0:
        return pre
    y = torch.empty_like(pre)
    if y.numel() == 0:
        return y
    with on_device_of(pre):
        launch(
            _act_kernel,
            (cdiv(pre.numel(), 2048),),
            pre,
            y,
            pre.numel(),
            ACT=activation,
            HALF=is_half(pre),
            COMPUTE=compute_type(pre),
            BLOCK=2048,
            num_warps=8,
        )
    return y


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pre: Tensor,
    activation: int,
    gated: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor]:
    """-> the gradients of the pre-activation and of the bias (or empty).

    `pre` of another shape is a placeholder: it is computed again.
    """
    if pre.shape != (dy.shape[0], weight.shape[0]):
        with without_autocast(x):
            pre = torch.nn.functional.linear(x, weight, bias)
    if gated:
        dpre, _ = gated_act_backward(pre, None, dy, True, activation)
        return dpre, bias_grad(dpre) if needs_bias else dy.new_empty(0)
    return act_backward(dy, pre, activation, needs_bias)


def _fake_backward(dy, x, weight, bias, pre, activation, gated, needs_bias):
    return dy.new_empty(x.shape[0], weight.shape[0]), dy.new_empty(weight.shape[0] if needs_bias else 0)


def accumulate_wgrad(main_grad: Tensor, dpre: Tensor, x: Tensor) -> None:
    """``main_grad += dpre.T @ x``, in float32."""
    with without_autocast(x):
        if x.is_cuda and is_half(x):
            torch.addmm(main_grad, dpre.T, x, out_dtype=torch.float32, out=main_grad)
        else:
            main_grad.addmm_(dpre.T.to(torch.float32), x.to(torch.float32))


_linear_act_backward = register("linear_act_backward", _backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    x, weight, bias, ctx.main_grad, ctx.activation, ctx.gated, keeps_pre, _ = inputs
    ctx.set_materialize_grads(False)  # pre has none, which would be a matrix of zeros
    y, pre = output
    relu = ctx.activation == ACTIVATIONS["relu"] and not ctx.gated
    ctx.save_for_backward(x, weight, bias, pre if keeps_pre else y if relu else x[:0])


def _gradient(ctx, dy, _):
    if dy is None:  # only the pre-activation was used, which is for this function alone
        return (None,) * 8
    x, weight, bias, pre = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if ctx.activation == 0 and not ctx.gated:
        dpre, dbias = dy, bias_grad(dy) if needs_bias else None
    else:
        dpre, dbias = _linear_act_backward(dy, x, weight, bias, pre, ctx.activation, ctx.gated, needs_bias)
    dx = product(dpre, weight) if needs_x else None
    dweight = None
    if needs_weight and ctx.main_grad is not None:
        accumulate_wgrad(ctx.main_grad, dpre, x)
    elif needs_weight:
        dweight = product(dpre.T, x)
    return dx, dweight, dbias if needs_bias else None, None, None, None, None, None


_linear_act = register("linear_act", linear_act_forward, _fake_forward, _save_for_backward, _gradient)


def _dgrad(dy: Tensor, weight: Tensor, pre: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    m, n = pre.shape
    if "triton" in _possible(dy, None, activation, False, True) and min(*dy.shape, n) > 0:
        dy, pre = unit_stride(dy), pre.contiguous()
        tile = row_tile(dy, weight, pre)
        if tile:
            dpre = torch.empty_like(pre)
            sums = dy.new_empty(cdiv(m, tile), n, dtype=torch.promote_types(dy.dtype, torch.float32))
            matmul(dy, weight, dpre, activation=activation, pre=pre, column_sums=sums)
            return dpre, add_sums(sums, dy.dtype)
    return act_backward(product(dy, weight), pre.contiguous(), activation, True)


def _fake_dgrad(dy, weight, pre, activation):
    return dy.new_empty(pre.shape), dy.new_empty(pre.shape[1])


_dgrad_act = register("dgrad_act", _dgrad, _fake_dgrad)
