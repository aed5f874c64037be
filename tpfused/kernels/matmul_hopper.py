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

from functools import lru_cache

import torch
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
from tpfused.kernels.flags import flags
from tpfused.kernels.last_wave import sharing, work_at, works
from tpfused.kernels.launch import cdiv, launch, multiprocessors, on_device_of
from tpfused.kernels.matmul import HOPPER_COLUMNS, HOPPER_ROWS, HOPPER_STEP

BM, BN, BK = HOPPER_ROWS, HOPPER_COLUMNS, HOPPER_STEP
GROUP = 8  # rows of tiles
STAGES = 3
PART = 64  # columns the epilogue holds at a time: 128 bytes, one row of a swizzled buffer
BIAS_DEPTH = gl.constexpr(16)  # the least that can be multiplied
LAST_BLOCKS = 1  # of four, of a program's last tile, that the epilogue's four warps do; the other eight do the rest
# Of a thread of the epilogue; the multiplying warps get the rest of 12 x 168, 184 or (without a bias) 160.
REGISTERS, REGISTERS_WITH_PRE = 136, 184


# Names that changed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_PUBLIC_NAME = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _view(buffer, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape and layout."""
    if _PUBLIC_NAME:
        return buffer.reinterpret(buffer.dtype, shape, layout)
    else:
        return buffer._reinterpret(buffer.dtype, shape, layout)


@gluon.jit
def _begin(
    work, count, waves, helped, taken, m, n, k, hook_ptr,
    BEFORE_TILE: gl.constexpr, PROGRAMS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One of `count` pieces of work, its rows awaited -> where its tile begins, its first step and the last's next."""
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    tile, step, stop = work_at(work, gl.program_id(0), PROGRAMS, waves, helped, taken, gl.cdiv(k, BK))
    tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
    if BEFORE_TILE is not None:
        if work < count:
            BEFORE_TILE(hook_ptr, tile_m * BM, BM)
    return tile_m * BM, tile_n * BN, step, stop


@gluon.jit
def _load_next(
    x, w, bias, a_ring, b_ring, bias_tile, ready, hook_ptr, work, row, col, step, stop, stage,
    count, waves, helped, taken, m, n, k,
    HAS_BIAS: gl.constexpr, X_BY_ROWS: gl.constexpr, W_BY_ROWS: gl.constexpr, BEFORE_TILE: gl.constexpr,
    PROGRAMS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Start the load of one step's operands -> the next step's ``work, row, col, step, stop, stage``."""
    wanted = work < count
    arrived = ready.index(stage)
    if HAS_BIAS:
        # It comes with a tile's first step; the tile before has used its own, for it takes more steps than the ring has
        # stages. There is one row of bias: the others come as zeros.
        begins = wanted & (step == 0)
        mbarrier.expect(arrived, (BM + BN) * BK * 2 + BIAS_DEPTH * BN * 2, pred=begins)
        mbarrier.expect(arrived, (BM + BN) * BK * 2, pred=wanted & (step != 0))
        tma_load(bias, [0, col], arrived, bias_tile, pred=begins)
    else:
        mbarrier.expect(arrived, (BM + BN) * BK * 2, pred=wanted)
    if X_BY_ROWS:
        tma_load(x, [row, step * BK], arrived, a_ring.index(stage), pred=wanted)
    else:
        tma_load(x, [step * BK, row], arrived, a_ring.index(stage), pred=wanted)
    if W_BY_ROWS:
        tma_load(w, [step * BK, col], arrived, b_ring.index(stage), pred=wanted)
    else:
        tma_load(w, [col, step * BK], arrived, b_ring.index(stage), pred=wanted)
    stage = (stage + 1) % STAGES
    step += 1
    if step == stop:
        work += 1
        row, col, step, stop = _begin(
            work, count, waves, helped, taken, m, n, k, hook_ptr, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP
        )
    return work, row, col, step, stop, stage


@gluon.jit
def _multiply(
    x, w, bias, a_ring, b_ring, bias_tile, ready, finished, done, emptied, hook_ptr, sums_of_others, flags_ptr,
    finished_parts, late_arrived, pre, y, sums_ptr, m, n, k, waves, helped, taken,
    HAS_BIAS: gl.constexpr, X_BY_ROWS: gl.constexpr, W_BY_ROWS: gl.constexpr, BEFORE_TILE: gl.constexpr,
    SHARED: gl.constexpr, PROGRAMS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, PART: gl.constexpr, LAST_BLOCKS: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16])
    ONES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    program = gl.program_id(0)
    count = works(program, PROGRAMS, waves, helped, tiles_m * tiles_n)
    # The load cursor runs ahead of the multiplication, across tiles.
    load_work = 0
    load_stage = 0
    row, col, step, stop = _begin(
        load_work, count, waves, helped, taken, m, n, k, hook_ptr, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP
    )
    for _ in gl.static_range(STAGES - 1):
        load_work, row, col, step, stop, load_stage = _load_next(
            x, w, bias, a_ring, b_ring, bias_tile, ready, hook_ptr, load_work, row, col, step, stop, load_stage,
            count, waves, helped, taken, m, n, k,
            HAS_BIAS, X_BY_ROWS, W_BY_ROWS, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP, STAGES,
        )  # fmt: skip

    stage = 0
    phase = 0
    buffer_phase = 1
    for work in range(0, count):
        tile, from_step, to_step = work_at(work, program, PROGRAMS, waves, helped, taken, steps)
        acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
        if HAS_BIAS:
            if from_step == 0:
                # The sums start from it: ones times it, exact. To spread it over the threads' registers took a
                # microsecond a tile, and so did adding it at the end.
                mbarrier.wait(ready.index(stage), phase)
                depth = gl.arange(0, BIAS_DEPTH, gl.SliceLayout(0, ONES))[None, :]
                ones, depth = gl.broadcast(gl.full((BM, 1), 1.0, x.dtype, ONES), depth)
                acc = warpgroup_mma(gl.where(depth == 0, ones, 0.0).to(x.dtype), bias_tile, acc)
        for _step in range(from_step, to_step):
            mbarrier.wait(ready.index(stage), phase)
            a = a_ring.index(stage)
            b = b_ring.index(stage)
            if not X_BY_ROWS:
                a = a.permute((1, 0))
            if not W_BY_ROWS:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            # With one step in flight, the one before it has left its stage, in every warp after the barrier.
            acc = warpgroup_mma_wait(1, deps=(acc, a, b))[0]
            thread_barrier()
            load_work, row, col, step, stop, load_stage = _load_next(
                x, w, bias, a_ring, b_ring, bias_tile, ready, hook_ptr, load_work, row, col, step, stop, load_stage,
                count, waves, helped, taken, m, n, k,
                HAS_BIAS, X_BY_ROWS, W_BY_ROWS, BEFORE_TILE, PROGRAMS, BM, BN, BK, GROUP, STAGES,
            )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if SHARED:
            place = tile - waves * PROGRAMS
            acc = _meet(acc, from_step, to_step, steps, sums_of_others, flags_ptr, place, BM, BN)
        if from_step == 0:
            mbarrier.wait(emptied, buffer_phase)
            finished.store(acc.to(finished.dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(done)
            buffer_phase ^= 1

    # Nothing hides the last tile's epilogue: these warps, now idle, take the larger part of it.
    last, from_step, _stop = work_at(count - 1, program, PROGRAMS, waves, helped, taken, steps)
    if (count > 0) & (from_step == 0):
        tile_m, tile_n = tile_at(last, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        if PRE == "read":
            mbarrier.expect(late_arrived, BM * PART * 2)
            tma_load(pre, [row, col + LAST_BLOCKS * PART], late_arrived, a_ring.index(0))
        _finish_blocks(
            finished_parts, LAST_BLOCKS, BN // PART, a_ring.index(0), late_arrived, pre, y,
            sums_ptr + tile_m.to(gl.int64) * n, row, col, m, n, ACT, GATED, PRE, BM, PART, 8,
        )  # fmt: skip


@gluon.jit
def _meet(acc, from_step, to_step, steps, sums_ptr, flags_ptr, place, BM: gl.constexpr, BN: gl.constexpr):
    """Leave the sums of a tile's last steps in memory, or add them to those of its first, in slot `place`.

    Who has added them clears the flag, for the next launch.
    """
    rows = gl.arange(0, BM, gl.SliceLayout(1, acc.type.layout))[:, None]
    cols = gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout))[None, :]
    at = sums_ptr + place * (BM * BN) + rows * BN + cols
    if from_step > 0:
        gl.store(at, acc)
        thread_barrier()
        gl.atomic_xchg(flags_ptr + place, 1, sem="release", scope="gpu")
    if to_step < steps:
        while gl.atomic_add(flags_ptr + place, 0, sem="acquire", scope="gpu") == 0:
            pass
        thread_barrier()
        acc += gl.load(at, cache_modifier=".cg")
        gl.store(flags_ptr + place, 0)
    return acc


@gluon.jit
def _finish_blocks(
    finished, first, end, pre_part, pre_arrived, pre, y, sums_ptr, row, col, m, n,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, BM: gl.constexpr, PART: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Turn the blocks of columns from `first` to `end` of a finished tile at (row, col) into its outputs, in place."""
    # Sixteen bytes a thread, and a thread's rows far apart: sums over rows are mostly its own additions.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // PART, PART // 8], [WARPS, 1], [1, 0])
    if PRE == "write":
        for block in range(first, end):
            tma_store(pre, [row, col + block * PART], finished.index(block))
    for block in range(first, end):
        part = finished.index(block)
        block_col = col + block * PART
        z = part.load(LAYOUT).to(gl.float32)
        if PRE == "read":
            mbarrier.wait(pre_arrived, (block - first) % 2)
            before = pre_part.load(LAYOUT)
            thread_barrier()
            more = block + 1 < end
            mbarrier.expect(pre_arrived, BM * PART * 2, pred=more)
            tma_load(pre, [row, block_col + PART], pre_arrived, pre_part, pred=more)
            # Rows beyond m are zero in x, hence in z, and add nothing to the sums.
            z = z * derive(before.to(gl.float32), ACT, True)
            cols = block_col + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
            # Even and odd columns in turn, which halves the shared memory that sums need.
            even, odd = gl.split(gl.reshape(z, (BM, PART // 2, 2)))
            total = gl.reshape(gl.join(gl.sum(even, axis=0), gl.sum(odd, axis=0)), (PART,))
            total = gl.convert_layout(total, gl.SliceLayout(0, LAYOUT))
            gl.store(sums_ptr + cols, total, mask=cols < n)
        elif GATED:
            gate, up = gl.split(gl.reshape(z, (BM, PART // 2, 2)))
            z = activate(gate, ACT, True) * up
        else:
            z = activate(z, ACT, True)
        if PRE == "write":
            # This block's pre-activation must have left, and has once all stores but the last have: unless it is that.
            if end - first > 1:
                tma.store_wait(1)
            else:
                tma.store_wait(0)
        thread_barrier()
        if GATED:
            HALF_AS_WIDE: gl.constexpr = y.layout
            out = _view(part, [2, BM, PART // 2], HALF_AS_WIDE).index(0)
        else:
            out = part
        out.store(z.to(out.dtype))
        fence_async_shared()
        thread_barrier()
        tma_store(y, [row, block_col // 2 if GATED else block_col], out)
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
def _finish(
    finished, pre_part, pre_arrived, done, emptied, pre, y, sums_ptr, m, n, k, waves, helped, taken,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, PROGRAMS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
    LAST_BLOCKS: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(m, BM)
    tiles_n = gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    program = gl.program_id(0)
    count = works(program, PROGRAMS, waves, helped, tiles_m * tiles_n)
    phase = 0
    for work in range(0, count):
        tile, from_step, _stop = work_at(work, program, PROGRAMS, waves, helped, taken, steps)
        if from_step == 0:
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
            row = tile_m * BM
            col = tile_n * BN
            if PRE == "read":
                mbarrier.expect(pre_arrived, BM * PART * 2)
                tma_load(pre, [row, col], pre_arrived, pre_part)
            mbarrier.wait(done, phase)
            blocks = LAST_BLOCKS if work == count - 1 else BN // PART
            _finish_blocks(
                finished, 0, blocks, pre_part, pre_arrived, pre, y, sums_ptr + tile_m.to(gl.int64) * n, row, col, m, n,
                ACT, GATED, PRE, BM, PART, 4,
            )  # fmt: skip
            mbarrier.arrive(emptied)
            phase ^= 1


@gluon.jit
def _kernel(
    x, w, bias, pre, y, sums_ptr, hook_ptr, sums_of_others, flags_ptr, m, n, k, waves, helped, taken,
    ACT: gl.constexpr, GATED: gl.constexpr, PRE: gl.constexpr, HAS_BIAS: gl.constexpr,
    X_BY_ROWS: gl.constexpr, W_BY_ROWS: gl.constexpr, BEFORE_TILE: gl.constexpr, SHARED: gl.constexpr,
    PROGRAMS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr, LAST_BLOCKS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    if not SHARED:
        helped = 0
    a_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK] if X_BY_ROWS else [STAGES, BK, BM], x.layout)
    b_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BN] if W_BY_ROWS else [STAGES, BN, BK], w.layout)
    bias_tile = gl.allocate_shared_memory(x.dtype, [BIAS_DEPTH if HAS_BIAS else 8, BN], bias.layout)
    # One buffer, filled as a tile and emptied in parts: swizzled, it lies in memory as one block of 64 columns (128
    # bytes) after another, each row by row.
    WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BN], x.dtype)
    PARTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PART], x.dtype)
    finished = gl.allocate_shared_memory(x.dtype, [BM, BN], WHOLE)
    finished_parts = _view(finished, [BN // PART, BM, PART], PARTS)
    pre_part = gl.allocate_shared_memory(x.dtype, [BM, PART] if PRE == "read" else [8, PART], PARTS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pre_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    late_arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    mbarrier.init(pre_arrived, count=1)
    mbarrier.init(late_arrived, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(emptied, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x, w, bias, a_ring, b_ring, bias_tile, ready, finished, done, emptied, hook_ptr,
                    sums_of_others, flags_ptr, finished_parts, late_arrived, pre, y, sums_ptr,
                    m, n, k, waves, helped, taken,
                    HAS_BIAS, X_BY_ROWS, W_BY_ROWS, BEFORE_TILE, SHARED, PROGRAMS, BM, BN, BK, GROUP, STAGES,
                    ACT, GATED, PRE, PART, LAST_BLOCKS,
                ),
            ),
            (
                _finish,
                (
                    finished_parts, pre_part, pre_arrived, done, emptied, pre, y, sums_ptr,
                    m, n, k, waves, helped, taken,
                    ACT, GATED, PRE, PROGRAMS, BM, BN, BK, GROUP, PART, LAST_BLOCKS,
                ),
            ),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


@lru_cache
def _layout(*block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)  # float16's is the same


def _describe(x: Tensor, by_rows: bool, rows: int, columns: int) -> TensorDescriptor:
    """Blocks of `rows` and `columns` of a matrix, or of its transpose: of what has unit stride in its last dimension.

    A vector is a matrix of one row. Without the slow checks of the descriptor's constructor, which `matmul` has made.
    """
    shape, strides, block = x.shape, x.stride(), (rows, columns)
    if x.ndim == 1:
        shape, strides = (1, *shape), (*shape, 1)
    if not by_rows:
        shape, strides, block = shape[::-1], strides[::-1], block[::-1]
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=x, shape=shape, strides=strides, block_shape=block, layout=_layout(*block), padding="zero"
    )
    return descriptor


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
    x_by_rows, w_by_rows = x.stride(1) == 1, w.stride(1) == 1
    tiles = cdiv(m, BM) * cdiv(n, BN)
    programs = multiprocessors(x.device)
    helped, taken = sharing(tiles, programs, cdiv(k, BK))
    if not helped:
        programs = min(programs, tiles)
    with on_device_of(x):
        others, arrived = y, y
        if helped:
            others = torch.empty(tiles % programs, BM, BN, dtype=torch.float32, device=x.device)
            arrived = flags(x.device)
        launch(
            _kernel, (programs,),
            _describe(x, x_by_rows, BM, BK), _describe(w, w_by_rows, BK, BN),
            _describe(y if bias is None else bias, True, BIAS_DEPTH.value, BN),
            _describe(y if pre is None else pre, True, BM, PART), _describe(y, True, BM, PART // (1 + gated)),
            y if column_sums is None else column_sums, y if hook is None else hook, others, arrived,
            m, n, k, tiles // programs, helped, taken,
            ACT=activation, GATED=gated, PRE="none" if pre is None else "write" if column_sums is None else "read",
            HAS_BIAS=bias is not None, X_BY_ROWS=x_by_rows, W_BY_ROWS=w_by_rows, BEFORE_TILE=before_tile,
            SHARED=helped > 0, PROGRAMS=programs, BM=BM, BN=BN, BK=BK, GROUP=GROUP, STAGES=STAGES, PART=PART,
            LAST_BLOCKS=LAST_BLOCKS, REGISTERS=REGISTERS if column_sums is None else REGISTERS_WITH_PRE, num_warps=8,
        )  # fmt: skip
