"""The matmul of `matmul.py` with its epilogue beside the next tile's main loop, for Hopper's 16-bit types.

Written in Gluon, Triton's lower level, because this needs warps with different jobs:

- eight warps load operands by TMA into a ring of stages, and multiply. A finished tile leaves their registers as 16-bit
  numbers, bias added, for a buffer in shared memory, and they go on with the next;
- four warps turn that buffer into the outputs: what they do costs the tensor cores nothing, as long as it takes less
  time than the next tile.

So y is the activation of the *rounded* pre-activation, exactly what eager PyTorch computes.

Shared memory: 3 stages of 48 KiB, 64 KiB for the finished tile, 16 KiB for a part of a pre-activation that is read.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tpfused.kernels.activations import activate, derive
from tpfused.kernels.elementary import tile_at
from tpfused.kernels.launch import multiprocessors, on_device_of
from tpfused.kernels.matmul import HOPPER_COLUMNS, HOPPER_ROWS

BM, BN, BK = HOPPER_ROWS, HOPPER_COLUMNS, 64
GROUP = 8  # rows of tiles
STAGES = 3
PART = 64  # columns the epilogue holds at a time: 128 bytes, one row of a swizzled buffer
# Of a thread of the epilogue; the multiplying warps get the rest of 12 x 168, 184 or (without a bias) 160.
REGISTERS, REGISTERS_WITH_PRE = 136, 184


@gluon.jit
def _load_next(
    x, w, bias, a_ring, b_ring, bias_ring, ready, hook_ptr, tile, row, col, start, stage, turn, m, n, k,
    HAS_BIAS: gl.constexpr, W_BY_ROWS: gl.constexpr, BEFORE_TILE: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the load of one step's operands -> the next step's ``tile, row, col, start, stage, turn``."""
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    wanted = tile < tiles_m * tiles_n
    if BEFORE_TILE is not None:
        if wanted & (start == 0):
            BEFORE_TILE(hook_ptr, row, BM)
    arrived = ready.index(stage)
    if HAS_BIAS:
        # It comes with a tile's first step. A ring of two is enough: a tile takes more steps than there are stages.
        first = wanted & (start == 0)
        mbarrier.expect(arrived, (BM + BN) * BK * 2 + BN * 2, pred=first)
        mbarrier.expect(arrived, (BM + BN) * BK * 2, pred=wanted & (start != 0))
        tma.async_copy_global_to_shared(bias, [col], arrived, bias_ring.index(turn), pred=first)
    else:
        mbarrier.expect(arrived, (BM + BN) * BK * 2, pred=wanted)
    tma.async_copy_global_to_shared(x, [row, start], arrived, a_ring.index(stage), pred=wanted)
    if W_BY_ROWS:
        tma.async_copy_global_to_shared(w, [start, col], arrived, b_ring.index(stage), pred=wanted)
    else:
        tma.async_copy_global_to_shared(w, [col, start], arrived, b_ring.index(stage), pred=wanted)
    stage = (stage + 1) % STAGES
    start += BK
    if start >= k:
        start = 0
        turn ^= 1
        tile += PROGRAMS
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        col = tile_n * BN
    return tile, row, col, start, stage, turn


@gluon.jit
def _multiply(
    x, w, bias, a_ring, b_ring, bias_ring, ready, finished, done, taken, hook_ptr, m, n, k,
    HAS_BIAS: gl.constexpr, W_BY_ROWS: gl.constexpr, BEFORE_TILE: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16])
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    # The load cursor runs ahead of the multiplication, across tiles.
    load_tile = gl.program_id(0)
    tile_m, tile_n = tile_at(load_tile, tiles_m, tiles_n, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    load_start = 0
    load_stage = 0
    load_turn = 0
    for _ in gl.static_range(STAGES - 1):
        load_tile, row, col, load_start, load_stage, load_turn = _load_next(
            x, w, bias, a_ring, b_ring, bias_ring, ready, hook_ptr,
            load_tile, row, col, load_start, load_stage, load_turn, m, n, k,
            HAS_BIAS, W_BY_ROWS, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP, STAGES,
        )  # fmt: skip

    stage = 0
    phase = 0
    turn = 0
    for _tile in range(gl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
        for _step in range(0, k, BK):
            mbarrier.wait(ready.index(stage), phase)
            a = a_ring.index(stage)
            b = b_ring.index(stage)
            if not W_BY_ROWS:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            # With one step in flight, the one before it has left its stage, in every warp after the barrier.
            acc = warpgroup_mma_wait(1, deps=(acc, a, b))[0]
            gl.thread_barrier()
            load_tile, row, col, load_start, load_stage, load_turn = _load_next(
                x, w, bias, a_ring, b_ring, bias_ring, ready, hook_ptr,
                load_tile, row, col, load_start, load_stage, load_turn, m, n, k,
                HAS_BIAS, W_BY_ROWS, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP, STAGES,
            )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if HAS_BIAS:
            acc = acc + bias_ring.index(turn).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32)[None, :]
        mbarrier.wait(taken, turn ^ 1)
        finished.store(acc.to(finished.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(done)
        turn ^= 1


@gluon.jit
def _finish_block(
    part, pre, y, pre_part, pre_arrived, phase, more, sums_ptr, row, col, m, n, WAIT: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, BM: gl.constexpr, PART: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Turn one block of columns of a finished tile into its outputs, in place."""
    # Sixteen bytes a thread, and a thread's rows far apart: sums over rows are mostly its own additions.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PART, PART // 8], [WARPS, 1], [1, 0])
    z = part.load(LAYOUT).to(gl.float32)
    if PRE == "read":
        mbarrier.wait(pre_arrived, phase)
        before = pre_part.load(LAYOUT)
        gl.thread_barrier()
        mbarrier.expect(pre_arrived, BM * PART * 2, pred=more)
        tma.async_copy_global_to_shared(pre, [row, col + PART], pre_arrived, pre_part, pred=more)
        # Rows beyond m are zero in x, hence in z, and add nothing to the sums.
        z = z * derive(before.to(gl.float32), ACT, True)
        cols = col + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
        gl.store(sums_ptr + cols, gl.sum(z, axis=0), mask=cols < n)
    elif GATED:
        gate, up = gl.split(gl.reshape(z, (BM, PART // 2, 2)))
        z = activate(gate, ACT, True) * up
    else:
        z = activate(z, ACT, True)
    if PRE == "write":
        tma.store_wait(WAIT)
    gl.thread_barrier()
    if GATED:
        out = part._reinterpret(part.dtype, [BM, PART // 2], y.layout)
    else:
        out = part
    out.store(z.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(y, [row, col // 2 if GATED else col], out)


@gluon.jit
def _finish(
    finished, pre_part, pre_arrived, done, taken, pre, y, sums_ptr, m, n,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    BLOCKS: gl.constexpr = BN // PART
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if PRE == "read":
            mbarrier.expect(pre_arrived, BM * PART * 2)
            tma.async_copy_global_to_shared(pre, [row, col], pre_arrived, pre_part)
        mbarrier.wait(done, phase)
        if PRE == "write":
            for block in gl.static_range(BLOCKS):
                tma.async_copy_shared_to_global(pre, [row, col + block * PART], finished.index(block))
        for block in range(BLOCKS):
            # Of the stores under way, this block's pre-activation must be over: the others' and earlier y may not.
            _finish_block(
                finished.index(block), pre, y, pre_part, pre_arrived, block % 2, block < BLOCKS - 1,
                sums_ptr + tile_m.to(gl.int64) * n, row, col + block * PART, m, n, BLOCKS - 1,
                ACT, GATED, PRE, BM, PART, 4,
            )  # fmt: skip
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.arrive(taken)
        phase ^= 1


@gluon.jit
def _kernel(
    x, w, bias, pre, y, sums_ptr, hook_ptr, m, n, k,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, HAS_BIAS: gl.constexpr, W_BY_ROWS: gl.constexpr,
    BEFORE_TILE: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    b_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BN] if W_BY_ROWS else [STAGES, BN, BK], w.layout)
    bias_ring = gl.allocate_shared_memory(x.dtype, [2, BN], bias.layout)
    # One buffer, filled as a tile and emptied in parts: swizzled, it lies in memory as one block of 64 columns (128
    # bytes) after another, each row by row.
    WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], x.dtype)
    PARTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PART], x.dtype)
    finished = gl.allocate_shared_memory(x.dtype, [BM, BN], WHOLE)
    finished_parts = finished._reinterpret(x.dtype, [BN // PART, BM, PART], PARTS)
    pre_part = gl.allocate_shared_memory(x.dtype, [BM, PART] if PRE == "read" else [8, PART], PARTS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pre_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    mbarrier.init(pre_arrived, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x, w, bias, a_ring, b_ring, bias_ring, ready, finished, done, taken, hook_ptr, m, n, k,
                    HAS_BIAS, W_BY_ROWS, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP, STAGES,
                ),
            ),
            (
                _finish,
                (
                    finished_parts, pre_part, pre_arrived, done, taken, pre, y, sums_ptr, m, n,
                    ACT, GATED, PRE, PROGRAMS, BM, BN, GROUP, PART,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


def _describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.element_size() == 2 else gl.float32)
    return TensorDescriptor(x, x.shape, x.stride(), block, layout)


def matmul_hopper(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None,
    activation: int,
    gated: bool,
    pre: Tensor | None,
    column_sums: Tensor | None,
    before_tile: triton.JITFunction | None,
    hook: Tensor | None,
) -> None:
    """`matmul.matmul` where a TMA descriptor can describe every operand and ``K >= 256``."""
    (m, k), n = x.shape, w.shape[1]
    by_rows = w.stride(1) == 1
    programs = min(multiprocessors(x.device), triton.cdiv(m, BM) * triton.cdiv(n, BN))
    part = _describe(pre if pre is not None else x, [BM, PART])
    with on_device_of(x):
        _kernel[(programs,)](
            _describe(x, [BM, BK]), _describe(w, [BK, BN]) if by_rows else _describe(w.T, [BN, BK]),
            _describe(bias if bias is not None else x.reshape(-1), [BN]), part,
            _describe(y, [BM, PART // (1 + gated)]),
            y if column_sums is None else column_sums, y if hook is None else hook, m, n, k,
            ACT=activation, GATED=gated, PRE="none" if pre is None else "write" if column_sums is None else "read",
            HAS_BIAS=bias is not None, W_BY_ROWS=by_rows, BEFORE_TILE=before_tile, PROGRAMS=programs,
            BM=BM, BN=BN, BK=BK, GROUP=GROUP, STAGES=STAGES, PART=PART,
            REGISTERS=REGISTERS if column_sums is None else REGISTERS_WITH_PRE, num_warps=8,
        )  # fmt: skip
