"""The backward pass of an activation, ``dpre = dy * act'(pre)``, and the bias gradient: dpre's sum over the rows.

Floor: 3 values an entry (dy, pre, dpre), or 1 where only the sum is wanted.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.activations import derive
from tpfused.kernels.flags import FLAGS, flags
from tpfused.kernels.launch import (
    block_of,
    cdiv,
    compute_type,
    is_half,
    launch,
    multiprocessors,
    on_device_of,
    register,
    unit_stride,
)

TILE = 8192  # entries a program holds at a time
RESIDENT = 2  # such programs that one multiprocessor's registers have room for: all run at once, none is left over
PARTS = tl.constexpr(32)  # sums added at a time, the loads of which overlap


@triton.jit
def _act_backward_kernel(
    dy_ptr, pre_ptr, dpre_ptr, sums_ptr, total_ptr, finished_ptr, m, n, each, dy_stride,
    ACT: tl.constexpr, HALF: tl.constexpr, SUMS: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dpre = dy * act'(pre)`` of `each` rows (a multiple of `ROWS`) and `BLOCK` columns, and those columns' sums.

    Of the programs with the same columns, the last to finish adds all their sums, always in the same order.
    """
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * each
    total = tl.zeros((ROWS, BLOCK), COMPUTE)
    for step in range(0, each, ROWS):
        rows = first + step + tl.arange(0, ROWS)
        inside = (rows < m)[:, None] & (cols < n)[None, :]
        dpre = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0).to(COMPUTE)
        if ACT != 0:
            at = rows[:, None] * n + cols[None, :]
            dpre *= derive(tl.load(pre_ptr + at, mask=inside, other=0.0).to(COMPUTE), ACT, HALF)
            tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
        total += dpre
    if SUMS:
        parts = tl.num_programs(1)
        tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * n + cols, tl.sum(total, axis=0), mask=cols < n)
        tl.debug_barrier()  # of all threads, before one of them says so
        before = tl.atomic_add(finished_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if before == parts - 1:
            _add_sums(sums_ptr, total_ptr, parts, n, cols)
            tl.store(finished_ptr + tl.program_id(0), 0)


@triton.jit
def _add_sums(sums_ptr, out_ptr, parts, n, cols):
    """All parts of some columns, always in the same order."""
    total = tl.zeros((PARTS, cols.shape[0]), sums_ptr.dtype.element_ty)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (cols < n)[None, :]
        at = sums_ptr + part[:, None].to(tl.int64) * n + cols[None, :]
        total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")  # other programs wrote them in this launch
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def _add_sums_kernel(sums_ptr, out_ptr, parts, n, BLOCK: tl.constexpr):
    _add_sums(sums_ptr, out_ptr, parts, n, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))


def act_backward(dy: Tensor, pre: Tensor | None, activation: int, with_sums: bool) -> tuple[Tensor, Tensor]:
    """-> ``dy * act'(pre)`` (dy itself without an activation) and, or empty, the sum of its rows."""
    m, n = dy.shape
    dpre = dy if activation == 0 else dy.new_empty(m, n)
    total = dy.new_empty(n if with_sums else 0)
    if dy.numel() == 0:
        return dpre, total.zero_()
    if activation or with_sums:
        dy = unit_stride(dy)
        pre = pre.contiguous() if activation else dy
        sums = finished = dy
        block, rows, each, parts = _division(m, n, multiprocessors(dy.device))
        with on_device_of(dy):
            if with_sums:
                sums = dy.new_empty(parts, n, dtype=torch.promote_types(dy.dtype, torch.float32))
                finished = flags(dy.device)
            launch(
                _act_backward_kernel, (cdiv(n, block), parts),
                dy, pre, dpre, sums, total, finished, m, n, each, dy.stride(0),
                ACT=activation, HALF=is_half(dy), SUMS=with_sums, COMPUTE=compute_type(dy),
                ROWS=rows, BLOCK=block, num_warps=8,
            )  # fmt: skip
    return dpre, total


@lru_cache(1024)
def _division(m: int, n: int, processors: int) -> tuple[int, int, int, int]:
    """-> columns and rows of a tile, rows of a program, programs with the same columns."""
    block = block_of(n, 512)
    while cdiv(n, block) > FLAGS:
        block *= 2
    rows = max(1, TILE // block)
    parts = max(1, min(cdiv(m, rows), RESIDENT * processors // cdiv(n, block)))
    each = cdiv(cdiv(m, parts), rows) * rows
    return block, rows, each, cdiv(m, each)


def add_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """``[parts, N]`` -> ``[N]``."""
    parts, n = sums.shape
    total = torch.empty(n, dtype=dtype, device=sums.device)
    with on_device_of(sums):
        launch(_add_sums_kernel, (cdiv(n, 32),), sums, total, parts, n, BLOCK=32, num_warps=4)
    return total


def _bias_grad(dy: Tensor) -> Tensor:
    return act_backward(dy, None, 0, True)[1]


def _fake_bias_grad(dy):
    return dy.new_empty(dy.shape[1])


bias_grad = register("bias_grad", _bias_grad, _fake_bias_grad)
