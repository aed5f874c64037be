"""Queries, keys and values out of their packed projection, the first two with rotary positions (Su et al., 2021,
"RoFormer", eq. 34), in one pass; backward into one packed gradient.

Floor: each value is read once and written once, forward and backward. Plain PyTorch copies the queries out, rotates in
a dozen passes over float32, and fills gradients up with zeros to add them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.launch import (
    block_of,
    cdiv,
    compute_type,
    is_floating,
    launch,
    needs_kernel_device,
    on_device_of,
    register,
)

TOKENS, MANY = 4, 4096  # a program, which computes the frequencies once, where there are many tokens


@triton.jit
def _copy(from_ptr, to_ptr, mask, cos, sin, HALF: tl.constexpr, ROTATE: tl.constexpr, COMPUTE: tl.constexpr):
    """Heads of one token; each entry of a head's first half and the one `HALF` behind it are turned together."""
    first = tl.load(from_ptr, mask=mask, other=0.0).to(COMPUTE)
    second = tl.load(from_ptr + HALF, mask=mask, other=0.0).to(COMPUTE)
    if ROTATE:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    tl.store(to_ptr, first.to(to_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr + HALF, second.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, positions_ptr, rows, inner, position_stride,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, LOG2_THETA: tl.constexpr,
    TOKENS_FIRST: tl.constexpr, POSITIONS: tl.constexpr, BACKWARD: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of the packed projection: `inner` batches of each token, or tokens of each batch."""
    column = tl.arange(0, BLOCK)
    # In float64, for an angle of thousands has an error as many times the frequency's.
    exponent = column.to(tl.float64) / HALF
    frequency = tl.exp2(exponent * tl.full((BLOCK,), -LOG2_THETA, tl.float64)).to(COMPUTE)
    column = column[None, :]
    q_head, kv_head = tl.arange(0, Q_BLOCK)[:, None], tl.arange(0, KV_BLOCK)[:, None]
    # In the packed row, each key-value head has its queries, its key and its value side by side.
    q_packed = (q_head // QUERIES * (QUERIES + 2) + q_head % QUERIES) * (2 * HALF) + column
    k_packed = (kv_head * (QUERIES + 2) + QUERIES) * (2 * HALF) + column
    q_at, kv_at = q_head * (2 * HALF) + column, kv_head * (2 * HALF) + column
    for step in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        inside = row < rows
        # None behind the last row. Triton 3.9's interpreter does not take a mask that is joined with a scalar.
        here = tl.where(inside, KV_HEADS, 0)
        q_mask, kv_mask = (q_head < here * QUERIES) & (column < HALF), (kv_head < here) & (column < HALF)
        token = row // inner if TOKENS_FIRST else row % inner
        position = token
        if POSITIONS:
            batch = row % inner if TOKENS_FIRST else row // inner
            position = tl.load(positions_ptr + batch * position_stride + token, mask=inside, other=0)
        angle = position.to(COMPUTE) * frequency
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
        packed = qkv_ptr + row * (KV_HEADS * (QUERIES + 2) * 2 * HALF)
        q = q_ptr + row * (KV_HEADS * QUERIES * 2 * HALF) + q_at
        k, v = (k_ptr + row * (KV_HEADS * 2 * HALF) + kv_at), (v_ptr + row * (KV_HEADS * 2 * HALF) + kv_at)
        if BACKWARD:
            _copy(q, packed + q_packed, q_mask, cos, -sin, HALF, True, COMPUTE)
            _copy(k, packed + k_packed, kv_mask, cos, -sin, HALF, True, COMPUTE)
            _copy(v, packed + k_packed + 2 * HALF, kv_mask, cos, sin, HALF, False, COMPUTE)
        else:
            _copy(packed + q_packed, q, q_mask, cos, sin, HALF, True, COMPUTE)
            _copy(packed + k_packed, k, kv_mask, cos, sin, HALF, True, COMPUTE)
            _copy(packed + k_packed + 2 * HALF, v, kv_mask, cos, sin, HALF, False, COMPUTE)


def rotary_qkv(
    qkv: Tensor, queries: int, head_dim: int, theta: float, positions: Tensor | None = None, tokens_first: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into heads, and turn queries and keys by their positions. Differentiable in `qkv`.

    Computed in float32 (float64 for float64) and rounded once. The results have the memory order of `qkv`.

    Args:
        qkv: ``[batch, tokens, kv_heads * (queries + 2) * head_dim]``, or ``[tokens, batch, ...]`` with `tokens_first`:
            for each key-value head its queries, its key and its value.
        queries: that share a key-value head.
        head_dim: even.
        theta: the base of the frequencies.
        positions: int64 ``[batch or 1, tokens]``; None: 0, 1, 2, ...

    Returns:
        q ``[batch, kv_heads * queries, tokens, head_dim]``, k and v ``[batch, kv_heads, tokens, head_dim]``.

    Raises:
        ValueError: sizes that do not fit, another device.
        TypeError: a projection that is not floating, positions that are not int64.
    """
    if not is_floating(qkv):
        raise TypeError(f"rotary_qkv needs a floating-point tensor, not {qkv.dtype}")
    group = (queries + 2) * head_dim
    if qkv.ndim != 3 or head_dim % 2 or queries < 1 or qkv.shape[-1] % group:
        raise ValueError(
            f"rotary_qkv needs three dimensions, the last of heads of (queries {queries} + 2) x an even head_dim "
            f"{head_dim}, not shape {tuple(qkv.shape)}"
        )
    batch, tokens = qkv.shape[1::-1] if tokens_first else qkv.shape[:2]
    if positions is not None:
        if positions.dtype != torch.int64:
            raise TypeError(f"positions must be int64, not {positions.dtype}")
        if positions.shape not in ((batch, tokens), (1, tokens)) or positions.device != qkv.device:
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} on {positions.device} do not fit {batch} sequences of "
                f"{tokens} tokens on {qkv.device}"
            )
    needs_kernel_device(qkv, "rotary_qkv")
    order = (1, 2, 0, 3) if tokens_first else (0, 2, 1, 3)
    return tuple(part.permute(order) for part in _rotary_qkv(qkv, positions, queries, head_dim, theta, tokens_first))


def _run(
    qkv: Tensor, apart: tuple[Tensor, Tensor, Tensor], positions: Tensor | None, theta: float, tokens_first: bool,
    backward: bool,
) -> None:  # fmt: skip
    q, k, v = apart
    rows, heads, kv_heads, half = q.shape[:2].numel(), q.shape[2], k.shape[2], q.shape[3] // 2
    if qkv.numel() == 0:
        return
    if positions is not None:
        positions = positions.contiguous()
    count = TOKENS if rows >= MANY else 1
    with on_device_of(qkv):
        launch(
            _kernel, (cdiv(rows, count),),
            qkv, q, k, v, positions, rows, qkv.shape[1],
            0 if positions is None or positions.shape[0] == 1 else positions.shape[1],
            KV_HEADS=kv_heads, QUERIES=heads // kv_heads, HALF=half, LOG2_THETA=math.log2(theta),
            TOKENS_FIRST=tokens_first, POSITIONS=positions is not None, BACKWARD=backward, COMPUTE=compute_type(qkv),
            ROWS=count, Q_BLOCK=triton.next_power_of_2(heads), KV_BLOCK=triton.next_power_of_2(kv_heads),
            BLOCK=block_of(half, 2**20), num_warps=8 if heads * half > 4096 else 4,
        )  # fmt: skip


def rotary_qkv_forward(
    qkv: Tensor, positions: Tensor | None, queries: int, head_dim: int, theta: float, tokens_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """-> q ``[.., .., heads, head_dim]``, k and v, in the order of `qkv`'s dimensions."""
    qkv = qkv.contiguous()
    apart = _fake_forward(qkv, positions, queries, head_dim, theta, tokens_first)
    _run(qkv, apart, positions, theta, tokens_first, backward=False)
    return apart


def _fake_forward(qkv, positions, queries, head_dim, theta, tokens_first):
    kv_heads = qkv.shape[-1] // ((queries + 2) * head_dim)
    return tuple(qkv.new_empty(*qkv.shape[:2], heads, head_dim) for heads in (kv_heads * queries, kv_heads, kv_heads))


def rotary_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, positions: Tensor | None, theta: float, tokens_first: bool
) -> Tensor:
    """-> the gradient of the packed projection; `dq`, `dk` and `dv` are as forward's results."""
    dqkv = _fake_backward(dq, dk, dv, positions, theta, tokens_first)
    _run(dqkv, (dq.contiguous(), dk.contiguous(), dv.contiguous()), positions, theta, tokens_first, backward=True)
    return dqkv


def _fake_backward(dq, dk, dv, positions, theta, tokens_first):
    return dq.new_empty(*dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3])


_rotary_qkv_backward = register("rotary_qkv_backward", rotary_qkv_backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    _, positions, _, _, ctx.theta, ctx.tokens_first = inputs
    ctx.save_for_backward(positions)


def _gradient(ctx, dq, dk, dv):
    (positions,) = ctx.saved_tensors
    return _rotary_qkv_backward(dq, dk, dv, positions, ctx.theta, ctx.tokens_first), None, None, None, None, None


_rotary_qkv = register("rotary_qkv", rotary_qkv_forward, _fake_forward, _save_for_backward, _gradient)
