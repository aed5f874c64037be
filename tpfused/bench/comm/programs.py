"""Layers as a program calls them: how much of its host's time a call takes, and what of a collective a matmul hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tpfused import reference
from tpfused.bench.comm.works import Member, build
from tpfused.group import TPGroup, resolve_group
from tpfused.kernels.gated_act import gated_act
from tpfused.kernels.rotary import rotary_qkv
from tpfused.layers.attention import scaled_dot_product_attention
from tpfused.layers.backend import runs_kernels
from tpfused.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpfused.layers.norm import Norm
from tpfused.overlap.choice import made
from tpfused.planning.block import Setting, column, row
from tpfused.planning.rates import MATMUL, OTHER, PARALLEL_MATMUL
from tpfused.planning.work import Matmul, Pair

# Tokens, features of each, and between the two matmuls those of a rank. The host's time is the same for any size: a
# small one has it launch faster than the GPU computes. Large, as a layer's are: what a matmul hides.
SMALL = {"cuda": (512, 1024, 1024), "cpu": (8, 32, 32)}
LARGE = {"cuda": (8192, 4096, 4096), "cpu": (256, 512, 512)}
LINEAR_CALLS = 6  # of two layers: one matmul forward, two backward
# Of `_others`: rotary positions, attention, norm, activation and three sums; backward as many, but one sum.
OTHER_CALLS = 12
HEADS = 8
LARGE_LAYERS = "two large layers"
ALONE = TPGroup(None, rank=0, size=1)


def overlaps(ranks: int) -> bool:
    """Whether the layers that have run on so many ranks overlapped their collectives."""
    return any(choice.tier != "reference" for choice in made() if choice.ranks == ranks)


class Programs:
    """What is to be timed.

    Attributes:
        calls: by what they are: layers forward and backward and, for `hidden`, collectives.
        matmuls: those that `hidden` needs the times of.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None):
        self.matmuls: list[Matmul] = []
        self._parts: list[Matmul | Pair] = []
        self._group = None if group is None else resolve_group(group)
        place = {"device": device, "dtype": dtype}
        small, large = SMALL[device.type], LARGE[device.type]
        self.calls: dict[object, Callable] = {MATMUL: _layers(*small, ALONE, place), OTHER: _others(*small[:2], place)}
        if self._group is not None:
            self.calls[PARALLEL_MATMUL] = _layers(*small, self._group, place)
            self.calls[LARGE_LAYERS] = _layers(*large, self._group, place)
        for call in self.calls.values():
            call()  # operations measure their ways, kernels are compiled
        if self._group is not None and overlaps(self._group.size):
            self._parts = parts_of_layers(*large, self._group.size, dtype.itemsize)
            self.matmuls = list(dict.fromkeys(_matmul(part) for part in self._parts))
            self.calls |= _collectives(self._parts, self._group, place)

    def host_us(self, host_us: Mapping[object, float]) -> dict[str, float]:
        """Of `Rates`, from the host's times of `calls`."""
        counts = {MATMUL: LINEAR_CALLS, PARALLEL_MATMUL: LINEAR_CALLS, OTHER: OTHER_CALLS}
        return {kind: host_us[kind] / count for kind, count in counts.items() if kind in host_us}

    def hidden(self, us: Mapping[object, float]) -> float | None:
        """Of `Rates`, from the times of `calls` and `matmuls`: by how much the large layers are faster than their parts
        one after the other, as a share of the shorter ones of each pair. 0 where nothing overlaps; None on one rank."""
        if self._group is None:
            return None
        return hidden_share(self._parts, us) if self._parts else 0.0


def hidden_share(parts: list[Matmul | Pair], us: Mapping[object, float]) -> float:
    """From 0 to 1: what of each pair's shorter part was hidden, by the times of the parts and of `LARGE_LAYERS`."""
    pairs = [(us[part.matmul], us[part.collective]) for part in parts if isinstance(part, Pair)]
    apart = sum(us[_matmul(part)] for part in parts) + sum(collective for _, collective in pairs)
    return min(1.0, max(0.0, (apart - us[LARGE_LAYERS]) / sum(map(min, pairs))))


def parts_of_layers(rows: int, hidden: int, features: int, ranks: int, size: int) -> list[Matmul | Pair]:
    """The work of `_layers` on one of several ranks that overlap; `size`: bytes of a number."""
    setting = Setting(ranks, rows // ranks * ranks, 1, size, sequence_parallel=True, overlap=True)
    both = column(hidden, features, False, setting) + row(features, hidden, False, setting)
    return [*both.forward, *both.backward]


def _matmul(part: Matmul | Pair) -> Matmul:
    return part.matmul if isinstance(part, Pair) else part


def _collectives(parts: list[Matmul | Pair], group: TPGroup, place: dict[str, Any]) -> dict[object, Callable]:
    """Those of the parts, each once."""
    found = dict.fromkeys(part.collective for part in parts if isinstance(part, Pair))
    numbers = max(each.bytes for each in found) // place["dtype"].itemsize
    member = Member(group.process_group, group.rank, group.size, tuple(torch.zeros(2, numbers, **place)))
    return {each: build(each.op, each.bytes, member).call for each in found}


def _layers(rows: int, hidden: int, features: int, group: TPGroup, place: dict[str, Any]) -> Callable:
    """Forward and backward of a column-parallel layer and a row-parallel one, on several ranks under sequence
    parallelism; `features` of a rank."""
    how = {"bias": False, "sequence_parallel": group.size > 1, "group": group, **place}
    first = ColumnParallelLinear(hidden, group.size * features, **how)
    second = RowParallelLinear(group.size * features, hidden, **how)
    x, grad = (torch.randn(rows // group.size, hidden, **place) for _ in range(2))
    leaves = [x.requires_grad_(), first.weight, second.weight]
    return lambda: torch.autograd.grad(second(first(x)), leaves, grad)


def _others(rows: int, hidden: int, place: dict[str, Any]) -> Callable:
    """Forward and backward of what a block has beside its matmuls, about as often."""
    norm = Norm("rmsnorm", hidden, group=ALONE, **place)
    x, grad = (torch.randn(rows, 1, hidden, **place) for _ in range(2))
    qkv, gates = (torch.randn(rows, 1, parts * hidden, requires_grad=True, **place) for parts in (3, 2))
    rotary, gated = reference.rotary_qkv, reference.gated_act
    if runs_kernels(x):
        rotary, gated = rotary_qkv, gated_act
    leaves = [x.requires_grad_(), qkv, gates, norm.weight]

    def run() -> tuple[torch.Tensor, ...]:
        heads = rotary(qkv, 1, hidden // HEADS, 10000.0, None, tokens_first=True)
        attended = scaled_dot_product_attention(*heads, None, True, 0.0).permute(2, 0, 1, 3)
        y = x + attended.flatten(2)
        return torch.autograd.grad(y + norm(y + gated(gates, activation="silu")), leaves, grad)

    return run
