"""The row orders of packed weights, so that a contiguous shard is right at every tensor-parallel degree.

A packed projection keeps several weights in one, to run them as one matmul. Stacked one after the other
([q; k; v]), a contiguous slice of the rows would hold only queries on one rank and only values on another.
So the rows that must live together are put together: query, key and value by key-value head ("group-major"),
gate and up row by row.

All functions work on weights [rows, ...] and biases [rows] alike, whole or sharded (with the shard's head
counts).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Protocol

import torch
from torch import Tensor


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """q [num_heads*d, ...], k and v [num_kv_heads*d, ...] -> [(num_heads + 2*num_kv_heads)*d, ...].

    For each key-value head in turn: its num_heads/num_kv_heads query heads, then its key, then its value.
    Raises ValueError when the row counts do not fit the head counts.
    """
    queries = _queries_per_group(num_heads, num_kv_heads)
    head_dim = _rows_each(q.shape[0], num_heads, "q", "heads")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != num_kv_heads * head_dim:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, but {num_kv_heads} key-value heads of {head_dim} rows "
                f"each (q: {q.shape[0]} rows, {num_heads} heads) need {num_kv_heads * head_dim}"
            )
    grouped = (
        q.unflatten(0, (num_kv_heads, queries * head_dim)),
        k.unflatten(0, (num_kv_heads, head_dim)),
        v.unflatten(0, (num_kv_heads, head_dim)),
    )
    return torch.cat(grouped, dim=1).flatten(0, 1)


def unpack_qkv(packed: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`: [(num_heads + 2*num_kv_heads)*d, ...] -> q, k, v."""
    queries = _queries_per_group(num_heads, num_kv_heads)
    head_dim = _rows_each(
        packed.shape[0],
        num_heads + 2 * num_kv_heads,
        "packed qkv",
        f"query + 2*{num_kv_heads} key-value heads",
    )
    grouped = packed.unflatten(0, (num_kv_heads, (queries + 2) * head_dim))
    q, k, v = (part.flatten(0, 1) for part in grouped.split((queries * head_dim, head_dim, head_dim), dim=1))
    return q, k, v


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [F, ...] -> [2F, ...] with rows gate0, up0, gate1, up1, ..."""
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def unpack_gate_up(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_gate_up`: [2F, ...] -> gate, up, each [F, ...]."""
    rows = _rows_each(packed.shape[0], 2, "packed gate and up", "weights")
    gate, up = packed.unflatten(0, (rows, 2)).unbind(1)
    return gate, up


class Packing(Protocol):
    """How a packed child's parameters split into siblings: a layer lists it in its `packed_children`.

    `packed_children = {"qkv": QKVPacking(8, 2)}` says that child `qkv`'s `weight` and `bias` are, unpacked,
    those of children `q`, `k` and `v`, which is how checkpoints name them.
    """

    names: ClassVar[tuple[str, ...]]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Full tensors in the order of `names` -> the packed one."""

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The packed tensor -> full tensors in the order of `names`."""

    def read(self, sources: Sequence[Tensor], box: tuple[slice, ...]) -> Tensor:
        """The part `box` of the packed tensor, from slices of the full ones: tensors, or what is sliced like them."""


class _PackedRows:
    """`read` where packing moves whole rows."""

    def read(self, sources: Sequence[Tensor], box: tuple[slice, ...]) -> Tensor:
        ends = list(accumulate(source.shape[0] for source in sources))
        starts = [0, *ends[:-1]]
        came_from = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        rows, columns = self.pack(came_from)[box[0]], box[1:]
        out = None
        for source, start, end in zip(sources, starts, ends, strict=True):
            here = (rows >= start) & (rows < end)
            own = rows[here] - start
            # What is packed one after the other comes one after the other from each source: a slice of it.
            first, last = (own.min().item(), own.max().item()) if own.numel() else (0, -1)
            part = source[(slice(first, last + 1), *columns)]
            out = part.new_empty(len(rows), *part.shape[1:]) if out is None else out
            out[here] = part
        return out


@dataclass(frozen=True)
class QKVPacking(_PackedRows):
    """`pack_qkv` with the full model's head counts."""

    num_heads: int
    num_kv_heads: int
    names: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return pack_qkv(*tensors, self.num_heads, self.num_kv_heads)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return unpack_qkv(packed, self.num_heads, self.num_kv_heads)


@dataclass(frozen=True)
class GateUpPacking(_PackedRows):
    """`pack_gate_up` as a `Packing`."""

    names: ClassVar[tuple[str, ...]] = ("gate", "up")

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return pack_gate_up(*tensors)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return unpack_gate_up(packed)


@dataclass(frozen=True)
class StackedPacking:
    """`parts` equal projections one after the other along dimension `dim`, the first or the last: a dimension of their
    own for them. One tensor under one name: ``[parts * n, ...]`` -> ``[parts, n, ...]``.
    """

    parts: int
    dim: int
    names: ClassVar[tuple[str, ...]] = ()  # the packed one's own

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(self.dim, (self.parts, -1))

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        first = 0 if self.dim == 0 else packed.ndim - 2
        return (packed.flatten(first, first + 1),)

    def read(self, sources: Sequence[Tensor], box: tuple[slice, ...]) -> Tensor:
        source, first = sources[0], 0 if self.dim == 0 else len(box) - 2
        parts, within = box[first : first + 2]
        each = source.shape[first] // self.parts
        out = None
        for part in range(parts.start, parts.stop) or [0]:  # one even of none, for its dtype
            rows = slice(part * each + within.start, part * each + within.stop)
            read = source[(*box[:first], rows, *box[first + 2 :])]
            shape = [*read.shape[:first], parts.stop - parts.start, *read.shape[first:]]
            out = read.new_empty(shape) if out is None else out
            if part < parts.stop:
                out.select(first, part - parts.start).copy_(read)
        return out


def _queries_per_group(num_heads: int, num_kv_heads: int) -> int:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a positive multiple of num_kv_heads={num_kv_heads}")
    return num_heads // num_kv_heads


def _rows_each(rows: int, parts: int, what: str, of_what: str) -> int:
    if rows % parts:
        raise ValueError(f"{what} has {rows} rows, not a multiple of {parts} ({of_what})")
    return rows // parts
