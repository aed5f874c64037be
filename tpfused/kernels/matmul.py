"""The persistent matmul of `linear_act` and of the overlapped operations' plain path: ``epilogue(x @ w)``, by tiles.

Floor: 2 M N K FLOPs at the rate of the bare matmul. The epilogue works on the accumulator in registers; what it costs
is the time in which the tensor cores wait for it.

Each of as many programs as there are SMs takes every `PROGRAMS`-th tile. On Hopper and later, tiles travel by TMA
descriptors, and the next tile's first loads are under way during an epilogue (`flatten`). Elsewhere, and where an
operand is not aligned to 16 bytes, by pointers with masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpfused.kernels.activations import activate, derive
from tpfused.kernels.elementary import tile_at
from tpfused.kernels.last_wave import sharing
from tpfused.kernels.launch import (
    capability,
    cdiv,
    compute_type,
    is_half,
    launch,
    multiprocessors,
    on_device_of,
    register,
    without_autocast,
)

# matmul_hopper's tile, its step along K, and the least K it is for.
HOPPER_ROWS, HOPPER_COLUMNS, HOPPER_STEP, HOPPER_DEPTH = 128, 256, 64, 256


@triton.jit
def _store(out, value, row, col, m, n, TMA: tl.constexpr):
    if TMA:
        out.store([row, col], value.to(out.dtype))
    else:
        rows = row + tl.arange(0, value.shape[0])
        cols = col + tl.arange(0, value.shape[1])
        at = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (cols < n)[None, :])


@triton.jit
def _finish(
    acc, row, col, bias_ptr, pre, y, sums_ptr, m, n,
    ACT: tl.constexpr, GATED: tl.constexpr, PRE: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The epilogue of some columns of a tile."""
    cols = col + tl.arange(0, acc.shape[1])
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(acc.dtype)[None, :]
    if PRE == "read":
        if TMA:
            z = pre.load([row, col])
        else:
            rows = row + tl.arange(0, acc.shape[0])
            inside = (rows < m)[:, None] & (cols < n)[None, :]
            z = tl.load(pre + rows.to(tl.int64)[:, None] * n + cols[None, :], mask=inside, other=0.0)
        # Rows beyond m are zero in x, hence here, and add nothing to the sums.
        acc *= derive(z.to(acc.dtype), ACT, HALF)
        tl.store(sums_ptr + (row // acc.shape[0]).to(tl.int64) * n + cols, tl.sum(acc, axis=0), mask=cols < n)
        _store(y, acc, row, col, m, n, TMA)
    else:
        if PRE == "write":
            _store(pre, acc, row, col, m, n, TMA)
        if GATED:
            gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
            _store(y, activate(gate, ACT, HALF) * up, row, col // 2, m, n // 2, TMA)
        else:
            _store(y, activate(acc, ACT, HALF), row, col, m, n, TMA)


@triton.jit
def _halves(acc):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _matmul_kernel(
    x, w, bias_ptr, pre, y, sums_ptr, hook_ptr,
    m, n, k, x_stride_m, x_stride_k, w_stride_k, w_stride_n,
    ACT: tl.constexpr, GATED: tl.constexpr, PRE: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr,
    W_BY_ROWS: tl.constexpr, PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BEFORE_TILE: tl.constexpr,
    TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if BEFORE_TILE is not None:
            BEFORE_TILE(hook_ptr, row, BM)
        acc = tl.zeros((BM, BN), dtype=COMPUTE)
        for start in range(0, k, BK):
            if TMA:
                a = x.load([row, start])
                if W_BY_ROWS:
                    b = w.load([start, col])
                else:
                    b = w.load([col, start]).T
            else:
                rows = (row + tl.arange(0, BM)).to(tl.int64)[:, None]
                cols = (col + tl.arange(0, BN)).to(tl.int64)[None, :]
                depth = start + tl.arange(0, BK)
                a_at = x + rows * x_stride_m + depth[None, :].to(tl.int64) * x_stride_k
                a = tl.load(a_at, mask=(rows < m) & (depth[None, :] < k), other=0.0)
                b_at = w + depth[:, None].to(tl.int64) * w_stride_k + cols * w_stride_n
                b = tl.load(b_at, mask=(depth[:, None] < k) & (cols < n), other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=COMPUTE)

        if PARTS == 1:
            _finish(acc, row, col, bias_ptr, pre, y, sums_ptr, m, n, ACT, GATED, PRE, HAS_BIAS, HALF, TMA)
        else:
            # In parts, the buffer in which an output waits for its TMA store is smaller, which leaves room for one more
            # stage of operands.
            left, right = _halves(acc)
            if PARTS == 2:
                for part in tl.static_range(2):
                    some = left if part == 0 else right
                    _finish(
                        some, row, col + part * (BN // 2), bias_ptr, pre, y, sums_ptr, m, n,
                        ACT, GATED, PRE, HAS_BIAS, HALF, TMA,
                    )  # fmt: skip
            else:
                first, second = _halves(left)
                third, fourth = _halves(right)
                for part in tl.static_range(4):
                    some = first if part == 0 else (second if part == 1 else (third if part == 2 else fourth))
                    _finish(
                        some, row, col + part * (BN // 4), bias_ptr, pre, y, sums_ptr, m, n,
                        ACT, GATED, PRE, HAS_BIAS, HALF, TMA,
                    )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How a matmul is cut: tile rows, columns and depth, rows of tiles a group, parts of an epilogue."""

    rows: int
    columns: int
    depth: int
    group: int
    parts: int
    stages: int
    warps: int


def tiling_of(x: Tensor, n: int) -> Tiling:
    m = x.shape[0]
    if x.dtype in (torch.float32, torch.float64):
        return Tiling(64, 64, 32, 8, 1, 3, 4)
    if x.is_cuda and torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin < 200 * 1024:
        return Tiling(128, 128, 32, 8, 1, 3, 8)
    if cdiv(m, 128) * cdiv(n, 256) >= multiprocessors(x.device):
        return Tiling(128, 256, 64, 8, 2, 4, 8)
    if m > 64:
        return Tiling(128, 128, 64, 8, 1, 4, 8)
    return Tiling(64, 128, 64, 8, 1, 4, 4)


def matmul(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    activation: int = 0,
    gated: bool = False,
    pre: Tensor | None = None,
    column_sums: Tensor | None = None,
    before_tile: triton.JITFunction | None = None,
    hook: Tensor | None = None,
    tiling: Tiling | None = None,
) -> None:
    """Write ``act(x @ w + bias)`` to `y`, and ``x @ w + bias`` to `pre` if given.

    Args:
        x: ``[M, K]``. w: ``[K, N]``, of any strides: the transpose of a linear layer's weight, or a weight itself.
        y: contiguous ``[M, N]``; `gated`, where columns alternate between gate and up, ``[M, N / 2]``:
            ``act(gate) * up``.
        pre: contiguous ``[M, N]``.
        column_sums: float32 (float64) ``[row tiles, N]``, see `row_tile`. If given, `pre` is read, y is
            ``(x @ w) * act'(pre)`` and this receives the sums of its columns over each row of tiles.
        before_tile: ``(hook, first row, rows)``, called before a tile's first load of x: where a caller can wait for
            those rows to arrive (no operation of this package does yet: beside cuBLASLt their copies are as well
            hidden). TMA then reads them: what was written meanwhile needs a proxy fence of global memory at its end.
            `matmul_hopper` calls it two steps ahead, while the tile before is not finished: it must not wait for
            anything that depends on that.
        tiling: forces this kernel and its tiles; else `matmul_hopper` runs where it can.
    """
    if tiling is None and _hopper_can(x, w, y, pre, bias=bias):
        from tpfused.kernels.matmul_hopper import matmul_hopper

        return matmul_hopper(x, w, y, bias, activation, gated, pre, column_sums, before_tile, hook)
    m, k = x.shape
    n = w.shape[1]
    t = tiling or tiling_of(x, n)
    by_rows = w.stride(1) == 1
    tma = capability(x.device)[0] >= 9 or not x.is_cuda
    tma = tma and all(o is None or _aligned(o) for o in (x, y, pre)) and _aligned(w, by_rows)
    programs = min(multiprocessors(x.device), cdiv(m, t.rows) * cdiv(n, t.columns))
    width = t.columns // t.parts
    operands = x, w if by_rows or not tma else w.T, pre, y
    if tma:
        w_block = [t.depth, t.columns] if by_rows else [t.columns, t.depth]
        blocks = [t.rows, t.depth], w_block, [t.rows, width], [t.rows, width // (1 + gated)]
        operands = [
            TensorDescriptor(o, o.shape, o.stride(), b) if o is not None else None
            for o, b in zip(operands, blocks, strict=True)
        ]
    x_, w_, pre_, y_ = operands
    with on_device_of(x):
        launch(
            _matmul_kernel, (programs,),
            x_, w_, y if bias is None else bias, y_ if pre is None else pre_, y_,
            y if column_sums is None else column_sums, y if hook is None else hook,
            m, n, k, *x.stride(), *w.stride(),
            ACT=activation, GATED=gated, PRE="none" if pre is None else "write" if column_sums is None else "read",
            HAS_BIAS=bias is not None, HALF=is_half(x),
            W_BY_ROWS=by_rows, PRECISION="tf32" if in_tf32(x.dtype) else "ieee", COMPUTE=compute_type(x),
            BEFORE_TILE=before_tile, TMA=tma, BM=t.rows, BN=t.columns, BK=t.depth, GROUP=t.group, PARTS=t.parts,
            PROGRAMS=programs, FLATTEN=before_tile is None and tma, num_stages=t.stages, num_warps=t.warps,
        )  # fmt: skip


def row_tile(x: Tensor, w: Tensor, pre: Tensor) -> int:
    """Rows of a tile where `matmul` had better apply the derivative itself, or 0: after cuBLAS is faster.

    That is where the epilogue runs beside the next tile, and in the interpreter, so that it is tested.
    """
    if not x.is_cuda:
        return tiling_of(x, w.shape[1]).rows
    return HOPPER_ROWS if _hopper_can(x, w, pre) else 0


def _hopper_can(x: Tensor, w: Tensor, *outputs: Tensor | None, bias: Tensor | None = None) -> bool:
    """Whether `matmul_hopper` can multiply these; an output it can allocate itself need not be given."""
    if x.dtype not in (torch.float16, torch.bfloat16) or capability(x.device) != (9, 0):
        return False
    vector = bias is None or (bias.data_ptr() % 16 == 0 and bias.stride(0) == 1)
    return vector and _hopper_fits(
        multiprocessors(x.device),
        *((o.shape, o.stride(), o.data_ptr() % 16) for o in (x, w, *outputs) if o is not None),
    )


@lru_cache(maxsize=4096)
def _hopper_fits(processors: int, x: tuple, w: tuple, *outputs: tuple) -> bool:
    """Each tensor as shape, strides and alignment."""
    if x[0][1] < HOPPER_DEPTH or 4 * _hopper_tiles(x[0][0], w[0][1]) < 3 * processors:  # smaller tiles keep more busy
        return False
    operands = all(_describable(*o, itemsize=2, by_rows=o[1][1] == 1) for o in (x, w))
    return operands and all(_describable(*o, itemsize=2) for o in outputs)


def _hopper_tiles(m: int, n: int) -> int:
    return cdiv(m, HOPPER_ROWS) * cdiv(n, HOPPER_COLUMNS)


def in_tf32(dtype: torch.dtype) -> bool:
    """Whether torch's own matmuls of this dtype may round their operands, which three settings of torch's say."""
    # Not `allow_tf32`: torch refuses to tell that one once `fp32_precision` was set.
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _aligned(x: Tensor, by_rows: bool = True) -> bool:
    return _describable(x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), by_rows)


def _describable(shape: tuple, strides: tuple, misaligned: int, itemsize: int, by_rows: bool = True) -> bool:
    """Whether a TMA descriptor can describe a matrix, or its transpose: 16-byte aligned base and rows that lie apart,
    32-bit coordinates."""
    apart, unit = (0, 1) if by_rows else (1, 0)
    rows = strides[apart] * itemsize % 16 == 0 and strides[apart] >= shape[unit]
    return strides[unit] == 1 and rows and misaligned == 0 and max(shape) < 2**31


def _product(x: Tensor, w: Tensor) -> Tensor:
    (m, k), n = x.shape, w.shape[1]
    if n * x.element_size() % 16 == 0 and _hopper_can(x, w):
        if sharing(_hopper_tiles(m, n), multiprocessors(x.device), cdiv(k, HOPPER_STEP))[0]:
            y = torch.empty(m, n, dtype=x.dtype, device=x.device)
            matmul(x, w, y)
            return y
    with without_autocast(x):
        return x @ w


# ``x @ w`` of matrices with any strides: cuBLAS, or `matmul_hopper` where that shares out a last wave of tiles which
# cuBLAS leaves ragged: 4 % less time for M3584 K8192 N4096. Not differentiable.
product = register("matmul", _product, lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
