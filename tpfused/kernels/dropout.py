"""Dropout whose mask follows from a seed and is never written: one read and one write, and the same backward.

Floor, in values moved an entry: forward 2 (x, y), backward 2 (dy, dx). torch's own writes a byte of mask for each, too,
and keeps it for backward; here the seed is kept. It is drawn on the device: a CUDA graph's replays draw anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.launch import (
    cdiv,
    compute_type,
    is_floating,
    launch,
    needs_kernel_device,
    on_device_of,
    register,
)

BLOCK = 2048  # entries a program, 16 a thread; forward and backward alike, for the mask depends on it


@triton.jit
def kept(seed_ptr, row, start, dropout_p, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which entries from column `start` of the rows survive dropout: four random numbers for each Philox counter.

    The counter is the row, of 64 bits, and a quarter of the column, of 32: forward and backward draw the same, however
    they are launched.
    """
    seed = tl.load(seed_ptr)
    column = start // 4 + tl.arange(0, BLOCK // 4)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    low = (row & 0xFFFFFFFF).to(tl.uint32) + tl.zeros((ROWS, BLOCK // 4), tl.uint32)
    high = (row >> 32).to(tl.uint32) + tl.zeros((ROWS, BLOCK // 4), tl.uint32)
    a, b, c, d = tl.philox(seed, column.to(tl.uint32), low, high, tl.zeros((ROWS, BLOCK // 4), tl.uint32))
    random = tl.join(tl.join(a, b), tl.join(c, d)).reshape(ROWS, BLOCK)
    # 24 bits are what a float32 in [0, 1) holds.
    return (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


def draw_seed(device: torch.device, rank: int = 0) -> Tensor:
    """-> ``[1]`` int64: 31 bits of the device's default generator and, above 32 bits, the rank: Philox's key of 64.

    Ranks whose generators are in one state draw the same bits and move on by as much, but share no key.
    """
    first = rank << 32
    return torch.randint(first, first + 2**31, (1,), device=device)


@triton.jit
def _dropout_kernel(x_ptr, y_ptr, seed_ptr, p, growth: tl.float64, entries, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at, mask=at < entries, other=0.0).to(COMPUTE)
    y = tl.where(kept(seed_ptr, block, 0, p, 1, BLOCK), x * tl.full((), growth, COMPUTE), 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < entries)


def dropout(x: Tensor, p: float, rank: int = 0) -> Tensor:
    """Each entry of `x` is zero with probability `p`, and else times ``1 / (1 - p)``; differentiable.

    Args:
        x: of any shape and strides, float32, float16 or bfloat16 (computed in float32), or float64.
        p: in [0, 1).
        rank: whose mask is drawn. One number comes from torch's generator of the device, whatever the rank and shape:
            ranks whose generators are in step stay so, and drop entries of their own.

    Returns:
        as `x`, contiguous.

    Raises:
        ValueError: `p` is out of range, or `x` on a device without kernels.
        TypeError: `x` is not floating-point.
    """
    if not is_floating(x):
        raise TypeError(f"dropout: x must be floating-point, not {x.dtype}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: p must be in [0, 1), not {p}")
    needs_kernel_device(x, "dropout")
    return _dropout(x, draw_seed(x.device, rank), float(p))


def _forward(x: Tensor, seed: Tensor, p: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if entries := x.numel():
        x = x.contiguous()  # entries are counted in this order, for a gradient may have other strides
        with on_device_of(x):
            launch(
                _dropout_kernel, (cdiv(entries, BLOCK),),
                x, y, seed, p, 1.0 / (1.0 - p), entries,
                COMPUTE=compute_type(x), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return y


def _fake_forward(x, seed, p):
    return x.new_empty(x.shape)


def _save_for_backward(ctx, inputs, output):
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)


def _gradient(ctx, dy):
    return _dropout(dy, *ctx.saved_tensors, ctx.p), None, None


_dropout = register("dropout", _forward, _fake_forward, _save_for_backward, _gradient)
