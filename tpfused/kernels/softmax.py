"""Attention softmax: scale, mask, causal, softmax and dropout in one read and one write.

Floor, in bytes a score: forward reads x once and writes y once (2 + 2 in half precision; under `causal` the upper
triangle is only written), and reads the mask once however many heads share it; backward reads y and dy and writes dx.
With dropout, backward reads x and the mask in place of y, and computes y again: nothing more is written or saved.

Rows up to `WHOLE_ROW` keys are held in registers. Longer ones are read twice, the second time mostly from the L2 cache:
an online maximum and sum (Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"), then the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.dropout import draw_seed, kept
from tpfused.kernels.elementary import LOG2E, exp2
from tpfused.kernels.launch import (
    block_of,
    cdiv,
    compute_type,
    is_floating,
    launch,
    needs_kernel_device,
    on_device_of,
    register,
    unit_stride,
)

WHOLE_ROW = 32768  # keys; 1024 threads hold 32 each
LONG_ROW_BLOCK = 4096
SCORES, THREAD_SCORES = 2048, 32  # of a program at least; of a thread
CAUSAL = {False: 0, None: 0, True: 1, "top_left": 1, "bottom_right": 2}


@triton.jit
def _rows(rows, heads, queries, ROWS: tl.constexpr, GRID: tl.constexpr):
    """-> batch, head, query of this program's rows, int64 ``[ROWS]``, and which of them exist.

    Heads run fastest, so that those which share a row of the mask find it in the cache. Three dimensions of the grid
    (`GRID`) spare the divisions, which would stand in a chain before the first load.
    """
    if GRID:
        head = tl.program_id(0) + tl.zeros((ROWS,), tl.int32)
        query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        batch = tl.program_id(2) + tl.zeros((ROWS,), tl.int32)
        valid = query < queries
    else:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        valid = row < rows
        head = row % heads
        query = row // heads % queries
        batch = row // heads // queries
    return batch.to(tl.int64), head.to(tl.int64), query.to(tl.int64), valid


@triton.jit
def _limits(query, valid, queries, keys, CAUSAL: tl.constexpr):
    """-> how many keys each row sees; how many are loaded: rounded up, for a mask within 16 bytes would make each load
    2 bytes wide; and where all of the rows end."""
    limit = tl.where(valid, keys, 0)
    loaded = limit
    if CAUSAL != 0:
        diagonal = query.to(tl.int32) + 1
        if CAUSAL == 2:
            diagonal += keys - queries
        limit = tl.maximum(tl.minimum(limit, diagonal), 0)
        loaded = tl.minimum((limit + 15) // 16 * 16, keys)
    return limit[:, None], loaded[:, None], tl.max(limit, axis=0)


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
def _whole_row(scores):
    top = tl.max(scores, axis=1)[:, None]
    top = tl.where(top == -float("inf"), 0.0, top)  # nothing to attend to: every exponential is zero, and no NaN
    y = exp2((scores - top) * LOG2E)  # in this order: a mask's finfo.min times log2(e) would be infinite
    total = tl.sum(y, axis=1)[:, None]
    return y * tl.where(total == 0, 0.0, 1.0 / total)  # NaN stays


@triton.jit
def _long_row(
    x_row, mask_row, mask_stride_k, limit, loaded, scale, end,
    HAS_MASK: tl.constexpr, BOOL_MASK: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """-> maximum and 1 / sum of exponentials of rows longer than a block."""
    top = tl.full((ROWS, 1), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, 1), COMPUTE)
    for start in range(0, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        scores = _load_scores(x_row, mask_row, mask_stride_k, cols, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE)
        new_top = tl.maximum(top, tl.max(scores, axis=1)[:, None])
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        below = exp2((scores - finite_top) * LOG2E)
        total = total * exp2((top - finite_top) * LOG2E) + tl.sum(below, axis=1)[:, None]
        top = new_top
    return tl.where(top == -float("inf"), 0.0, top), tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def _zero(out_row, valid, end, keys, BLOCK: tl.constexpr):
    """The blocks beyond the diagonal."""
    for start in range((end + BLOCK - 1) // BLOCK * BLOCK, keys, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        zeros = (cols + valid[:, None].to(tl.int32)) * 0
        tl.store(out_row + cols, zeros.to(out_row.dtype.element_ty), mask=valid[:, None] & (cols < keys))


@triton.jit
def _forward_kernel(
    x_ptr, mask_ptr, y_ptr, seed_ptr,
    scale: tl.float64, dropout_p, growth: tl.float64, rows, heads, queries, keys,
    x_stride_b, x_stride_h, x_stride_q,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    HAS_MASK: tl.constexpr, BOOL_MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, GRID: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    scale = tl.full((), scale, COMPUTE)
    growth = tl.full((), growth, COMPUTE)
    batch, head, query, valid = _rows(rows, heads, queries, ROWS, GRID)
    limit, loaded, end = _limits(query, valid, queries, keys, CAUSAL)
    x_row = (x_ptr + batch * x_stride_b + head * x_stride_h + query * x_stride_q)[:, None]
    mask_row = x_row
    if HAS_MASK:
        mask_row = (mask_ptr + batch * mask_stride_b + head * mask_stride_h + query * mask_stride_q)[:, None]
    out_index = ((batch * heads + head) * queries + query)[:, None]
    out_row = out_index * keys
    if not WHOLE:
        top, inverse = _long_row(
            x_row, mask_row, mask_stride_k, limit, loaded, scale, end, HAS_MASK, BOOL_MASK, COMPUTE, ROWS, BLOCK
        )
    for start in range(0, 1 if WHOLE else end, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        scores = _load_scores(x_row, mask_row, mask_stride_k, cols, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE)
        if WHOLE:
            y = _whole_row(scores)
        else:
            y = exp2((scores - top) * LOG2E) * inverse
        if DROPOUT:
            survives = kept(seed_ptr, out_index, start, dropout_p, ROWS, BLOCK)
            y = tl.where(survives, y * growth, 0.0)
        tl.store(y_ptr + out_row + cols, y.to(y_ptr.dtype.element_ty), mask=valid[:, None] & (cols < keys))
    if not WHOLE:
        _zero(y_ptr + out_row, valid, end, keys, BLOCK)


@triton.jit
def _load_grad(
    dy_row, seed_ptr, out_index, start, limit, loaded, dropout_p, growth,
    DROPOUT: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to the probabilities below each row's `limit`; beyond, dy may be anything, NaN too."""
    cols = start + tl.arange(0, BLOCK)[None, :]
    dy = tl.where(cols < limit, tl.load(dy_row + cols, mask=cols < loaded, other=0.0).to(COMPUTE), 0.0)
    if DROPOUT:
        survives = kept(seed_ptr, out_index, start, dropout_p, ROWS, BLOCK)
        dy = tl.where(survives, dy * growth, 0.0)
    return dy


@triton.jit
def _backward_kernel(
    x_ptr, mask_ptr, dy_ptr, dx_ptr, seed_ptr,
    scale: tl.float64, dropout_p, growth: tl.float64, rows, heads, queries, keys,
    x_stride_b, x_stride_h, x_stride_q,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    dy_stride_b, dy_stride_h, dy_stride_q,
    HAS_MASK: tl.constexpr, BOOL_MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, GRID: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`x` is y; with dropout it is the scores."""
    scale = tl.full((), scale, COMPUTE)
    growth = tl.full((), growth, COMPUTE)
    batch, head, query, valid = _rows(rows, heads, queries, ROWS, GRID)
    limit, loaded, end = _limits(query, valid, queries, keys, CAUSAL)
    x_row = (x_ptr + batch * x_stride_b + head * x_stride_h + query * x_stride_q)[:, None]
    mask_row = x_row
    if HAS_MASK:
        mask_row = (mask_ptr + batch * mask_stride_b + head * mask_stride_h + query * mask_stride_q)[:, None]
    dy_row = (dy_ptr + batch * dy_stride_b + head * dy_stride_h + query * dy_stride_q)[:, None]
    out_index = ((batch * heads + head) * queries + query)[:, None]
    out_row = out_index * keys
    if DROPOUT and not WHOLE:
        top, inverse = _long_row(
            x_row, mask_row, mask_stride_k, limit, loaded, scale, end, HAS_MASK, BOOL_MASK, COMPUTE, ROWS, BLOCK
        )
    total = tl.zeros((ROWS, 1), COMPUTE)
    # Long rows are gone through twice: for the sum of y dy, then for dx.
    for twice in tl.static_range(1 if WHOLE else 2):
        for start in range(0, 1 if WHOLE else end, BLOCK):
            cols = start + tl.arange(0, BLOCK)[None, :]
            dy = _load_grad(
                dy_row, seed_ptr, out_index, start, limit, loaded, dropout_p, growth, DROPOUT, COMPUTE, ROWS, BLOCK
            )
            if DROPOUT:
                y = _load_scores(
                    x_row, mask_row, mask_stride_k, cols, limit, loaded, scale, HAS_MASK, BOOL_MASK, COMPUTE
                )
                if WHOLE:
                    y = _whole_row(y)
                else:
                    y = exp2((y - top) * LOG2E) * inverse
            else:
                y = tl.load(x_row + cols, mask=cols < loaded, other=0.0).to(COMPUTE)
            if WHOLE or twice == 0:
                total += tl.sum(y * dy, axis=1)[:, None]
            if WHOLE or twice == 1:
                dx = scale * y * (dy - total)
                tl.store(dx_ptr + out_row + cols, dx.to(dx_ptr.dtype.element_ty), mask=valid[:, None] & (cols < keys))
    if not WHOLE:
        _zero(dx_ptr + out_row, valid, end, keys, BLOCK)


def scale_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    causal: bool | str = False,
    dropout_p: float = 0.0,
    rank: int = 0,
) -> Tensor:
    """``dropout(softmax(scale * scores + mask))`` over the last dimension, differentiable in `scores`.

    Args:
        scores: ``[batch, heads, queries, keys]``, float32, float16 or bfloat16 (computed in float32), or float64.
        mask: broadcastable to the scores; boolean (True attends) or additive. No gradient.
        scale: applied before the mask.
        causal: False; True or "top_left": query i sees keys 0..i; "bottom_right": the last query sees all keys.
        dropout_p: in [0, 1). The mask of kept entries is drawn from torch's generator of the device.
        rank: whose mask: with generators in one state, each rank drops entries of its own, and all stay in step.

    A query that may attend to nothing gets zeros, and gives a zero gradient.

    Raises:
        ValueError: wrong shapes, devices, `causal` or `dropout_p`, or a mask that needs a gradient.
        TypeError: wrong dtypes.
    """
    _check(scores, mask, causal, dropout_p)
    seed = draw_seed(scores.device, rank) if dropout_p else None
    return _softmax(scores, mask, seed, float(scale), CAUSAL[causal], float(dropout_p))


def _check(scores: Tensor, mask: Tensor | None, causal: bool | str, dropout_p: float) -> None:
    if scores.ndim != 4:
        raise ValueError(f"scores must be [batch, heads, queries, keys], not of shape {tuple(scores.shape)}")
    if not is_floating(scores):
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


def _launch(kernel, x: Tensor, mask: Tensor | None, seed, scale, causal, dropout_p, tensors, strides) -> None:
    """Common to both kernels: `tensors` stand after x and the mask, `strides` after theirs.

    32 scores a thread: with 16, the backward of causal rows of 8192 keys reaches 92 % of copy bandwidth, not 97 (H100).
    """
    batch, heads, queries, keys = x.shape
    broadcast, mask_strides = mask, (0, 0, 0, 0)
    if mask is not None:
        if mask.stride(-1) * mask.shape[-1] >= 2**31:
            mask = mask.contiguous()  # offsets along a row are of 32 bits
        broadcast = mask.expand(x.shape)
        mask_strides = broadcast.stride()
    bool_mask = mask is not None and mask.dtype == torch.bool
    whole = keys <= WHOLE_ROW
    block = block_of(keys, WHOLE_ROW) if whole else LONG_ROW_BLOCK
    rows_each = min(max(1, SCORES // block), 1 << (queries - 1).bit_length())
    rows = batch * heads * queries
    three_dimensions = max(cdiv(queries, rows_each), batch) < 65536
    grid = (heads, cdiv(queries, rows_each), batch) if three_dimensions else (cdiv(rows, rows_each),)
    with on_device_of(x):
        launch(
            kernel, grid,
            x, broadcast.view(torch.uint8) if bool_mask else broadcast, *tensors, seed,
            scale, dropout_p, 1.0 / (1.0 - dropout_p), rows, heads, queries, keys,
            *x.stride()[:3], *mask_strides, *strides,
            HAS_MASK=mask is not None, BOOL_MASK=bool_mask, CAUSAL=causal, DROPOUT=seed is not None,
            COMPUTE=compute_type(x), ROWS=rows_each, GRID=three_dimensions, BLOCK=block, WHOLE=whole,
            num_warps=min(32, max(4, rows_each * block // (32 * THREAD_SCORES))),
        )  # fmt: skip


def _forward(
    scores: Tensor, mask: Tensor | None, seed: Tensor | None, scale: float, causal: int, dropout_p: float
) -> Tensor:
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    if y.numel():
        _launch(_forward_kernel, unit_stride(scores), mask, seed, scale, causal, dropout_p, (y,), ())
    return y


def _fake_forward(scores, mask, seed, scale, causal, dropout_p):
    return scores.new_empty(scores.shape)


def _backward(
    x: Tensor, mask: Tensor | None, dy: Tensor, seed: Tensor | None, scale: float, causal: int, dropout_p: float
) -> Tensor:
    """`x` is y, and the mask None; with dropout the scores and their mask."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        dy = unit_stride(dy)
        strides = dy.stride()[:3]
        _launch(_backward_kernel, unit_stride(x), mask, seed, scale, causal, dropout_p, (dy, dx), strides)
    return dx


def _fake_backward(x, mask, dy, seed, scale, causal, dropout_p):
    return x.new_empty(x.shape)


_softmax_backward = register("scale_mask_softmax_backward", _backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    scores, mask, seed, *ctx.numbers = inputs
    ctx.save_for_backward(*((output, None, None) if seed is None else (scores, mask, seed)))


def _gradient(ctx, dy):
    x, mask, seed = ctx.saved_tensors
    return _softmax_backward(x, mask, dy, seed, *ctx.numbers), None, None, None, None, None


_softmax = register("scale_mask_softmax", _forward, _fake_forward, _save_for_backward, _gradient)
