"""Attention softmax: scale, mask, causal, softmax and dropout in one read and one write.

Floor, in bytes a score: forward reads x once and writes y once (2 + 2 in half precision; under `causal` the upper
triangle is only written), and reads the mask once however many heads share it; backward reads y and dy and writes dx.
With dropout, forward also writes the probabilities before it, which backward needs.

Rows up to `WHOLE_ROW` keys are held in registers. Longer ones are read twice: an online maximum and sum (Milakov and
Gimelshein, 2018, "Online normalizer calculation for softmax"), then the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.launch import block_of, compute_type, needs_kernel_device, on_device_of, register, unit_stride

WHOLE_ROW = 32768  # keys; 1024 threads hold 32 each
LONG_ROW_BLOCK = 8192
CAUSAL = {False: 0, None: 0, True: 1, "top_left": 1, "bottom_right": 2}


@triton.jit
def _limits(query, valid, queries, keys, CAUSAL: tl.constexpr):
    """How many keys each row sees, and how many are loaded: rounded up, for a mask within 16 bytes would make each load
    2 bytes wide."""
    limit = tl.where(valid, keys, 0)
    loaded = limit
    if CAUSAL != 0:
        diagonal = query.to(tl.int32) + 1
        if CAUSAL == 2:
            diagonal += keys - queries
        limit = tl.maximum(tl.minimum(limit, diagonal), 0)
        loaded = tl.minimum((limit + 15) // 16 * 16, keys)
    return limit[:, None], loaded[:, None]


@triton.jit
def _load_scores(
    x_row, mask_row, mask_stride_k, cols, limit, loaded, scale,
    HAS_MASK: tl.constexpr, BOOL_MASK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """scale * x + mask of the columns below each row's `limit`; -inf elsewhere."""
    inside = cols < loaded
    seen = cols < limit
    scores = tl.load(x_row + cols, mask=inside, other=0.0).to(COMPUTE) * scale
    if HAS_MASK:
        if BOOL_MASK:
            seen = seen & (tl.load(mask_row + cols * mask_stride_k, mask=inside, other=0) != 0)
        else:
            scores += tl.load(mask_row + cols * mask_stride_k, mask=inside, other=0.0).to(COMPUTE)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _forward_kernel(
    x_ptr, mask_ptr, y_ptr, dropped_ptr, seed_ptr,
    scale, dropout_p, rows, heads, queries, keys,
    x_stride_b, x_stride_h, x_stride_q,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    HAS_MASK: tl.constexpr, BOOL_MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Heads run fastest, so that those which share a row of the mask find it in the cache.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    valid = row < rows
    head = row % heads
    query = (row // heads) % queries
    batch = row // (heads * queries)
    limit, loaded = _limits(query, valid, queries, keys, CAUSAL)
    x_row = (x_ptr + batch * x_stride_b + head * x_stride_h + query * x_stride_q)[:, None]
    mask_row = x_row
    if HAS_MASK:
        mask_row = (mask_ptr + batch * mask_stride_b + head * mask_stride_h + query * mask_stride_q)[:, None]
    out_row = (((batch * heads + head) * queries + query) * keys)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]

    if WHOLE:
        scores = _load_scores(x_row, mask_row, mask_stride_k, cols, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE)
        top = tl.max(scores, axis=1)[:, None]
        top = tl.where(top == -float("inf"), 0.0, top)  # nothing to attend to: every exponential is zero, and no NaN
        y = tl.exp(scores - top)
        total = tl.sum(y, axis=1)[:, None]
    else:
        top = tl.full((ROWS, 1), -float("inf"), COMPUTE)
        total = tl.zeros((ROWS, 1), COMPUTE)
        for start in range(0, keys, BLOCK):
            scores = _load_scores(
                x_row, mask_row, mask_stride_k, start + cols, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE
            )
            new_top = tl.maximum(top, tl.max(scores, axis=1)[:, None])
            finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - finite_top) + tl.sum(tl.exp(scores - finite_top), axis=1)[:, None]
            top = new_top
        top = tl.where(top == -float("inf"), 0.0, top)
    inverse = tl.where(total > 0, 1.0 / total, 0.0)

    for start in range(0, 1 if WHOLE else keys, BLOCK):
        at = start + cols
        if not WHOLE:
            scores = _load_scores(
                x_row, mask_row, mask_stride_k, at, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE
            )
            y = tl.exp(scores - top)
        p = y * inverse
        inside = valid[:, None] & (at < keys)
        tl.store(y_ptr + out_row + at, p.to(y_ptr.dtype.element_ty), mask=inside)
        if DROPOUT:
            kept = tl.rand(tl.load(seed_ptr), out_row + at) >= dropout_p
            p = tl.where(kept, p / (1.0 - dropout_p), 0.0)
            tl.store(dropped_ptr + out_row + at, p.to(dropped_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_product(
    y_ptr, dy_row, seed_ptr, out_row, cols, limit, loaded, dropout_p, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """y, and the gradient with respect to it, of the columns below each row's `limit`."""
    inside = cols < loaded
    y = tl.load(y_ptr + out_row + cols, mask=inside, other=0.0).to(COMPUTE)
    dy = tl.load(dy_row + cols, mask=inside, other=0.0).to(COMPUTE)
    # y is zero from the limit on; dy may be anything there, NaN too.
    dy = tl.where(cols < limit, dy, 0.0)
    if DROPOUT:
        kept = tl.rand(tl.load(seed_ptr), out_row + cols) >= dropout_p
        dy = tl.where(kept, dy / (1.0 - dropout_p), 0.0)
    return y, dy


@triton.jit
def _backward_kernel(
    y_ptr, dy_ptr, dx_ptr, seed_ptr,
    scale, dropout_p, rows, heads, queries, keys,
    dy_stride_b, dy_stride_h, dy_stride_q,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    valid = row < rows
    query = row % queries
    head = (row // queries) % heads
    batch = row // (heads * queries)
    limit, loaded = _limits(query, valid, queries, keys, CAUSAL)
    dy_row = (dy_ptr + batch * dy_stride_b + head * dy_stride_h + query * dy_stride_q)[:, None]
    out_row = (row * keys)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]

    if WHOLE:
        y, dy = _load_product(y_ptr, dy_row, seed_ptr, out_row, cols, limit, loaded, dropout_p, DROPOUT, COMPUTE)
        total = tl.sum(y * dy, axis=1)[:, None]
    else:
        total = tl.zeros((ROWS, 1), COMPUTE)
        for start in range(0, keys, BLOCK):
            y, dy = _load_product(
                y_ptr, dy_row, seed_ptr, out_row, start + cols, limit, loaded, dropout_p, DROPOUT, COMPUTE
            )
            total += tl.sum(y * dy, axis=1)[:, None]

    for start in range(0, 1 if WHOLE else keys, BLOCK):
        at = start + cols
        if not WHOLE:
            y, dy = _load_product(y_ptr, dy_row, seed_ptr, out_row, at, limit, loaded, dropout_p, DROPOUT, COMPUTE)
        dx = scale * y * (dy - total)
        tl.store(dx_ptr + out_row + at, dx.to(dx_ptr.dtype.element_ty), mask=valid[:, None] & (at < keys))


def scale_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    causal: bool | str = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """``dropout(softmax(scale * scores + mask))`` over the last dimension, differentiable in `scores`.

    Args:
        scores: ``[batch, heads, queries, keys]``, float32, float16 or bfloat16 (computed in float32), or float64.
        mask: broadcastable to the scores; boolean (True attends) or additive. No gradient.
        scale: applied before the mask.
        causal: False; True or "top_left": query i sees keys 0..i; "bottom_right": the last query sees all keys.
        dropout_p: in [0, 1). The mask of kept entries is drawn from torch's generator of the device.

    A query that may attend to nothing gets zeros, and gives a zero gradient.

    Raises:
        ValueError: wrong shapes, devices, `causal` or `dropout_p`, or a mask that needs a gradient.
        TypeError: wrong dtypes.
    """
    _check(scores, mask, causal, dropout_p)
    seed = torch.randint(2**31, (1,), device=scores.device) if dropout_p else None
    numbers = float(scale), CAUSAL[causal], float(dropout_p)
    y, dropped = _softmax(scores, mask, seed, *numbers)
    return dropped if dropout_p else y


def _check(scores: Tensor, mask: Tensor | None, causal: bool | str, dropout_p: float) -> None:
    if scores.ndim != 4:
        raise ValueError(f"scores must be [batch, heads, queries, keys], not of shape {tuple(scores.shape)}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating-point, not {scores.dtype}")
    if causal not in CAUSAL:
        raise ValueError(f"causal must be False, True, 'top_left' or 'bottom_right', not {causal!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), not {dropout_p}")
    needs_kernel_device(scores, "scale_mask_softmax")
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"the mask must be boolean or floating-point, not {mask.dtype}")
    if mask.device != scores.device:
        raise ValueError(f"the mask is on {mask.device}, the scores are on {scores.device}")
    if mask.requires_grad:
        raise ValueError("the mask needs a gradient, which this kernel does not compute")
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], scores.shape[::-1], strict=False)):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not broadcast to scores {tuple(scores.shape)}")


def _launch_shape(keys: int) -> dict:
    """Rows a program, columns a block and warps.

    32 scores a thread: with 8 or 16, causal rows of 8192 keys reach 58 and 89 % of copy bandwidth instead of 95 (H100).
    """
    whole = keys <= WHOLE_ROW
    block = block_of(keys, WHOLE_ROW) if whole else LONG_ROW_BLOCK
    rows = max(1, 1024 // block)
    warps = min(32, max(4, rows * block // 1024))
    return {"ROWS": rows, "BLOCK": block, "WHOLE": whole, "num_warps": warps}


def _forward(
    scores: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, causal: int, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """-> the probabilities, and the same after dropout (empty without)."""
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    dropped = torch.empty_like(y if seed is not None else y[:0])
    if y.numel() == 0:
        return y, dropped
    x = unit_stride(scores)
    batch, heads, queries, keys = x.shape
    broadcast = mask.expand(x.shape) if mask is not None else None
    mask_strides = broadcast.stride() if mask is not None else (0, 0, 0, 0)
    bool_mask = mask is not None and mask.dtype == torch.bool
    shape = _launch_shape(keys)
    rows = batch * heads * queries
    with on_device_of(x):
        _forward_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
            x, broadcast.view(torch.uint8) if bool_mask else broadcast, y, dropped, seed,
            scale, dropout_p, rows, heads, queries, keys, *x.stride()[:3], *mask_strides,
            HAS_MASK=mask is not None, BOOL_MASK=bool_mask, CAUSAL=causal, DROPOUT=seed is not None,
            COMPUTE=compute_type(x), **shape,
        )  # fmt: skip
    return y, dropped


def _fake_forward(scores, mask, seed, scale, causal, dropout_p):
    y = scores.new_empty(scores.shape)
    return y, scores.new_empty(scores.shape if seed is not None else (0, *scores.shape[1:]))


def _backward(y: Tensor, grad: Tensor, seed: Tensor | None, scale: float, causal: int, dropout_p: float) -> Tensor:
    dx = torch.empty_like(y)
    if dx.numel() == 0:
        return dx
    grad = unit_stride(grad)
    batch, heads, queries, keys = y.shape
    shape = _launch_shape(keys)
    rows = batch * heads * queries
    with on_device_of(y):
        _backward_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
            y, grad, dx, seed, scale, dropout_p, rows, heads, queries, keys, *grad.stride()[:3],
            CAUSAL=causal, DROPOUT=seed is not None, COMPUTE=compute_type(y), **shape,
        )  # fmt: skip
    return dx


def _fake_backward(y, grad, seed, scale, causal, dropout_p):
    return torch.empty_like(y)


_softmax_backward = register("scale_mask_softmax_backward", _backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    _, _, seed, *ctx.numbers = inputs
    ctx.save_for_backward(output[0], seed)


def _gradient(ctx, grad_y, grad_dropped):
    y, seed = ctx.saved_tensors
    grad = grad_y if seed is None else grad_dropped
    return _softmax_backward(y, grad, seed, *ctx.numbers), None, None, None, None, None


_softmax = register("scale_mask_softmax", _forward, _fake_forward, _save_for_backward, _gradient)
