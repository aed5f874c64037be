"""Attention of one new token to those of a cache, which it joins: a decoding step.

Split over the keys (Dao et al., 2023, "Flash-Decoding for long-context inference"): each program reads a stretch of one
key-value head's keys and values for all queries that share it, and a second kernel joins the stretches. A program for
each head alone would leave most of a GPU idle: a model of eight key-value heads on two ranks has four.

Floor: keys and values are read once. Which slots are seen is read from the device, so that a CUDA graph of a step can
be replayed as the cache fills; stretches that nothing is in yet end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.elementary import LOG2E, exp2
from tpfused.kernels.launch import (
    block_of,
    cdiv,
    compute_type,
    is_floating,
    launch,
    multiprocessors,
    needs_kernel_device,
    on_device_of,
    unit_stride,
)

KEYS = 64  # a program reads at a time
MOST_HEAD_DIM = 256
PROGRAMS = 2  # for each multiprocessor, to ask for its share of the memory's bandwidth; not tuned
# Sequences times key-value heads that it is for: with more, torch's attention, one program each, fills the GPU as well,
# and takes 0.8 of the time at 128, where at 64 it takes 1.3 times as long (H200, bf16, 2048 slots).
MOST_HEADS = 64
MOST_PARTS = 128  # of one head, which a program of the second kernel holds at a time


@triton.jit
def _stretch_kernel(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, slot_ptr, first_ptr, parts_ptr, stats_ptr,
    scale: tl.float64, stretch, seen, kv_heads, head_dim,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, keys_batch, keys_head, keys_token,
    values_batch, values_head, values_token,
    QUERIES: tl.constexpr, FIRST: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One stretch of keys, for the queries of one key-value head: their sum of values, maximum, sum of exponentials."""
    at = tl.program_id(0)
    batch, head = (at // kv_heads).to(tl.int64), (at % kv_heads).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_ptr).to(tl.int32)
    first = 0
    if FIRST:
        first = tl.minimum(tl.load(first_ptr + batch).to(tl.int32), slot)  # padding sees itself
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < QUERIES) & (column < head_dim)
    q_at = q_ptr + batch * q_batch + (head * QUERIES + row) * q_head + column
    q = tl.load(q_at, mask=inside, other=0.0)
    new_k = tl.load(k_ptr + batch * k_batch + head * k_head + column, mask=column < head_dim, other=0.0)
    new_v = tl.load(v_ptr + batch * v_batch + head * v_head + column, mask=column < head_dim, other=0.0)
    keys_ptr += batch * keys_batch + head * keys_head
    values_ptr += batch * values_batch + head * values_head
    begin, end = part * stretch, tl.minimum((part + 1) * stretch, tl.minimum(slot + 1, seen))
    if (begin <= slot) & (slot < end):  # no one else reads the new token's slot, and there is none behind the cache
        tl.store(keys_ptr + slot.to(tl.int64) * keys_token + column, new_k, mask=column < head_dim)
        tl.store(values_ptr + slot.to(tl.int64) * values_token + column, new_v, mask=column < head_dim)

    top = tl.full((ROWS, 1), -float("inf"), COMPUTE)
    total = tl.zeros((ROWS, 1), COMPUTE)
    out = tl.zeros((ROWS, BLOCK), COMPUTE)
    if slot >= seen:  # a graph replayed on a full cache
        total += float("nan")
    for start in range(tl.maximum(begin, first // KEYS * KEYS), end, KEYS):
        token = start + tl.arange(0, KEYS)
        # What lies in slots that are not seen may be anything: zero times NaN would be NaN.
        sees = (token >= first) & (token < end)
        old = (sees & (token != slot))[:, None] & (column < head_dim)
        place = token.to(tl.int64)[:, None]
        # The new token's from where they were before: this program's stores above may not be seen yet.
        is_new = (token == slot)[:, None]
        k = tl.where(is_new, new_k, tl.load(keys_ptr + place * keys_token + column, mask=old, other=0.0))
        v = tl.where(is_new, new_v, tl.load(values_ptr + place * values_token + column, mask=old, other=0.0))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=COMPUTE) * tl.full((), scale, COMPUTE)
        scores = tl.where(sees[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1)[:, None])
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = exp2((scores - finite_top) * LOG2E)
        shrunk = exp2((top - finite_top) * LOG2E)
        total = total * shrunk + tl.sum(weights, axis=1)[:, None]
        out = out * shrunk + tl.dot(weights.to(v.dtype), v, input_precision="ieee", out_dtype=COMPUTE)
        top = new_top
    place = (at.to(tl.int64) * tl.num_programs(1) + part) * QUERIES + row
    tl.store(parts_ptr + place * head_dim + column, out, mask=inside)
    tl.store(stats_ptr + place * 2, top, mask=row < QUERIES)
    tl.store(stats_ptr + place * 2 + 1, total, mask=row < QUERIES)


@triton.jit
def _join_kernel(
    parts_ptr, stats_ptr, out_ptr, parts, head_dim,
    QUERIES: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query: the stretches' sums, weighted, over the sum of all exponentials."""
    at, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, column = tl.arange(0, PARTS)[:, None], tl.arange(0, BLOCK)[None, :]
    place = (at * parts + part) * QUERIES + query
    top = tl.load(stats_ptr + place * 2, mask=part < parts, other=-float("inf"))
    total = tl.load(stats_ptr + place * 2 + 1, mask=part < parts, other=0.0)
    weight = exp2((top - tl.max(top, axis=0)[None, :]) * LOG2E)  # the new token is in one of them
    inside = (part < parts) & (column < head_dim)
    sums = tl.sum(weight * tl.load(parts_ptr + place * head_dim + column, mask=inside, other=0.0), axis=0)[None, :]
    out = sums / tl.sum(weight * total, axis=0)[None, :]
    out_at = out_ptr + (at * QUERIES + query) * head_dim + column
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=column < head_dim)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: Tensor, seen: int, first: Tensor | None = None
) -> Tensor:
    """Put a new token's key and value into the cache, and attend from it to what is there. Not differentiable.

    Computed in float32 (float64 for float64), the weights rounded to the dtype before they meet the values.

    Args:
        q: ``[batch, heads, 1, head_dim]``.
        k, v: ``[batch, kv_heads, 1, head_dim]``.
        keys, values: the cache, ``[batch, kv_heads, slots, head_dim]``; written at `slot`.
        slot: int64 ``[1]``: the new token's. It sees the slots up to this one.
        seen: the work is split for so many slots, of which `slot` must be one: else the result is NaN, and the cache
            stays as it is.
        first: int64 ``[batch]``: the first slot that each sequence sees, for what is before is padding; None: 0.

    Returns:
        ``[batch, heads, 1, head_dim]``, contiguous.

    Raises:
        ValueError: shapes that do not fit, another device.
        TypeError: dtypes that differ or are not floating, a `slot` or `first` that is not int64.
    """
    _check(q, k, v, keys, values, slot, seen, first)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    queries, compute = heads // kv_heads, torch.promote_types(q.dtype, torch.float32)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    first = None if first is None else first.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    wanted = min(cdiv(PROGRAMS * multiprocessors(q.device), batch * kv_heads), MOST_PARTS)
    stretch = cdiv(cdiv(seen, wanted), KEYS) * KEYS
    parts = cdiv(seen, stretch)
    sums = torch.empty(batch * heads * parts * head_dim, dtype=compute, device=q.device)
    stats = torch.empty(batch * heads * parts * 2, dtype=compute, device=q.device)
    with on_device_of(q):
        launch(
            _stretch_kernel, (batch * kv_heads, parts),
            q, k, v, keys, values, slot, first, sums, stats,
            head_dim**-0.5, stretch, seen, kv_heads, head_dim,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *keys.stride()[:3], *values.stride()[:3],
            QUERIES=queries, FIRST=first is not None, COMPUTE=compute_type(q),
            ROWS=block_of(queries, 2**20), KEYS=KEYS, BLOCK=block_of(head_dim, 2**20), num_warps=4,
        )  # fmt: skip
        launch(
            _join_kernel, (batch * kv_heads, queries),
            sums, stats, out, parts, head_dim,
            QUERIES=queries, COMPUTE=compute_type(q), PARTS=block_of(parts, 2**20), BLOCK=block_of(head_dim, 2**20),
            num_warps=8,
        )  # fmt: skip
    return out


def _check(q, k, v, keys, values, slot, seen, first) -> None:
    given = {"q": q, "k": k, "v": v, "keys": keys, "values": values}
    if not is_floating(q) or any(x.dtype != q.dtype for x in given.values()):
        dtypes = ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')}" for name, x in given.items())
        raise TypeError(f"decode_attention needs q, k, v, keys and values of one floating dtype, not {dtypes}")
    for name, x in (("slot", slot), ("first", first)):
        if x is not None and x.dtype != torch.int64:
            raise TypeError(f"decode_attention: {name} must be int64, not {x.dtype}")
    if q.ndim != 4 or k.ndim != 4 or keys.ndim != 4:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
        raise ValueError(f"decode_attention: q, k and keys must be four-dimensional, not {shapes}")
    (batch, heads, _, head_dim), kv_heads, slots = q.shape, k.shape[1], keys.shape[2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"decode_attention: heads {heads} are no multiple of key-value heads {kv_heads}")
    if not 0 < head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"decode_attention: head_dim {head_dim} is not within {MOST_HEAD_DIM}")
    if not 0 < seen <= slots:
        raise ValueError(f"decode_attention: seen {seen} is not within the cache's {slots} slots")
    one, kept = (batch, kv_heads, 1, head_dim), (batch, kv_heads, slots, head_dim)
    expected = {"q": (batch, heads, 1, head_dim), "k": one, "v": one, "keys": kept, "values": kept}
    for name, x, shape in (
        *((name, x, expected[name]) for name, x in given.items()), ("slot", slot, (1,)), ("first", first, (batch,))
    ):  # fmt: skip
        if x is not None and x.shape != shape:
            raise ValueError(f"decode_attention: {name} is of shape {tuple(x.shape)}, not {shape}")
        if x is not None and x.device != q.device:
            raise ValueError(f"decode_attention: {name} is on {x.device}, q on {q.device}")
    for name in ("keys", "values"):
        if given[name].stride(-1) != 1:
            raise ValueError(
                f"decode_attention: an entry of {name} must lie beside the next, not {given[name].stride()}"
            )
    needs_kernel_device(q, "decode_attention")
