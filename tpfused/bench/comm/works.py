"""The collectives themselves, each with data that tells whether it was right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.collectives import all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class Member:
    """This rank in its group. `memory`: two buffers that all collectives, one at a time, take their operands from."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    memory: tuple[Tensor, Tensor]


def join_groups(
    groups: dict[str, list[list[int]]], size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Member]:
    """This rank's group of each kind, with room for collectives of `size` bytes. All ranks call this together."""
    most = -(-size // dtype.itemsize) + max(len(ranks) for kind in groups.values() for ranks in kind)
    memory = torch.zeros(most, dtype=dtype, device=device), torch.zeros(most, dtype=dtype, device=device)
    found = {}
    for kind, members in groups.items():
        group = dist.new_subgroups_by_enumeration(members)[0]
        found[kind] = Member(group, dist.get_rank(group), dist.get_world_size(group), memory)
    return found


@dataclass(frozen=True)
class Work:
    """`call` does it; `right` is what `out` then holds, block by block, when each rank put its blocks' numbers in."""

    call: Callable[[], object]
    source: Tensor
    out: Tensor
    given: list[int]
    right: list[int]

    def check(self) -> bool:
        """Run it once, and compare. Leaves zeros, which stay what they are however often they are summed."""
        self.out.zero_()
        for block, number in zip(self.source.chunk(len(self.given)), self.given, strict=True):
            block.fill_(number)
        self.call()
        blocks = zip(self.out.chunk(len(self.right)), self.right, strict=True)
        right = all(bool((block == number).all()) for block, number in blocks)
        self.source.zero_()
        return right


def build(op: str, size: int, member: Member) -> Work:
    """`op` of `size` bytes (rounded up to a number a rank)."""
    group, rank, ranks = member.group, member.rank, member.ranks
    first, second = member.memory
    each = -(-size // (first.element_size() * ranks))
    whole, part, other = first[: each * ranks], second[:each], second[: each * ranks]
    everyone = range(ranks)
    total = sum(each_rank + 1 for each_rank in everyone)
    if op == "all_reduce":
        return Work(lambda: dist.all_reduce(whole, group=group), whole, whole, [rank + 1], [total])
    if op == "broadcast":
        source = dist.get_global_rank(group, 0)
        return Work(lambda: dist.broadcast(whole, source, group=group), whole, whole, [rank + 1], [1])
    if op == "all_gather":
        right = [each_rank + 1 for each_rank in everyone]
        return Work(lambda: all_gather_single(whole, part, group=group), part, whole, [rank + 1], right)
    if op == "reduce_scatter":
        given = [block + 1 for block in everyone]
        right = [ranks * (rank + 1)]
        return Work(lambda: reduce_scatter_single(part, whole, group=group), whole, part, given, right)
    # To each a number of its own: from rank r to rank d, r and twice d.
    given = [rank + 2 * block + 1 for block in everyone]
    right = [each_rank + 2 * rank + 1 for each_rank in everyone]
    return Work(lambda: dist.all_to_all_single(other, whole, group=group), whole, other, given, right)
