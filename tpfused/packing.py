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


@dataclass(frozen=True)
class QKVPacking:
    """`pack_qkv` with the full model's head counts."""

    num_heads: int
    num_kv_heads: int
    names: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return pack_qkv(*tensors, self.num_heads, self.num_kv_heads)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return unpack_qkv(packed, self.num_heads, self.num_kv_heads)


@dataclass(frozen=True)
class GateUpPacking:
    """`pack_gate_up` as a `Packing`."""

    names: ClassVar[tuple[str, ...]] = ("gate", "up")

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return pack_gate_up(*tensors)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return unpack_gate_up(packed)


def _queries_per_group(num_heads: int, num_kv_heads: int) -> int:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a positive multiple of num_kv_heads={num_kv_heads}")
    return num_heads // num_kv_heads


def _rows_each(rows: int, parts: int, what: str, of_what: str) -> int:
    if rows % parts:
        raise ValueError(f"{what} has {rows} rows, not a multiple of {parts} ({of_what})")
    return rows // parts
