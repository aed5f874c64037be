"""Elementary functions for kernels, where Triton's own cost more than they must."""

import triton
import triton.language as tl

_INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2(x):
    """2^x. In float32 on a GPU a single instruction, which flushes denormal results to zero.

    `tl.exp2` and `tl.exp` keep them, for four more instructions a value.
    """
    if x.dtype == tl.float32 and not _INTERPRET:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def tile_at(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """-> row and column of a tile: column by column within `GROUP` rows of tiles, so that concurrent programs share
    operands in the L2 cache."""
    per_group = GROUP * tiles_n
    group = _quotient(tile, per_group)
    first = group * GROUP
    place = tile - group * per_group
    rows = tl.maximum(tl.minimum(tiles_m - first, GROUP), 1)  # of a tile beyond the last, too
    if rows == GROUP:
        column = place // GROUP
    else:
        column = place // rows
    return first + place - column * rows, column


@triton.jit
def _quotient(a, b):
    """``a // b`` of non-negative numbers, for a quotient below 2**20 and the same `b` each time: with its reciprocal,
    which is computed once. The processor has no instruction for a division of integers: it takes 150 cycles, in a
    matmul's loop while the tensor cores wait.
    """
    if _INTERPRET:
        return a // b
    else:
        q = (a.to(tl.float32) * (1.0 / b)).to(tl.int32)
        q = tl.where(q * b > a, q - 1, q)
        return tl.where((q + 1) * b <= a, q + 1, q)
