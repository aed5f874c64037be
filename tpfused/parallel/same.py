"""Shards of different models would be no model: what all ranks give is compared before anything is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.group import TPGroup

_CHUNK = 1 << 24  # entries summed at a time: bounds the memory for them as 64-bit integers


class _Given(NamedTuple):
    """What a rank says of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    bits: int | None  # None on the meta device

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}, {self.where}"


@torch.no_grad()
def check_same(params: Mapping[str, Tensor], group: TPGroup) -> None:
    """Names, shapes, dtypes, which are on the meta device, and the others' bits, by one exchange over the group.

    Raises:
        ValueError: on every rank, where two ranks differ; names the first difference.
    """
    if group.size == 1:
        return
    own = [
        _Given(
            name,
            tuple(param.shape),
            str(param.dtype).removeprefix("torch."),
            "on the meta device" if param.is_meta else "with values",
            None if param.is_meta else _bits(param),
        )
        for name, param in params.items()
    ]
    of_all: list[list[_Given]] = [[] for _ in range(group.size)]
    dist.all_gather_object(of_all, own, group.process_group)
    first = of_all[0]
    for rank, other in enumerate(of_all):
        # All but the bits; a rank that gives fewer has None where the others go on.
        for index in range(max(len(first), len(other))):
            here, there = (given[index] if index < len(given) else None for given in (first, other))
            if here is None or there is None or here[:-1] != there[:-1]:
                raise ValueError(
                    f"the ranks of the mesh give different models: parameter {index} of {len(first)} on rank 0 is "
                    f"({here or 'none'}), of {len(other)} on rank {rank} ({there or 'none'}): build the same model on "
                    f"all of them"
                )
    different = [given[0].name for given in zip(*of_all, strict=True) if any(g.bits != given[0].bits for g in given)]
    if different:
        raise ValueError(
            f"{len(different)} of {len(first)} parameters differ between the ranks of the mesh ({different[0]}, ...): "
            f"build the model from one seed or one checkpoint on all of them"
        )


def _bits(param: Tensor) -> int:
    """The sum of the bits of each entry times its place, from 1: exact modulo 2^64, whatever the order of summation,
    and another one for the same entries in other places.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(param.element_size(), torch.int64)
    entries = param.detach().contiguous().flatten().view(integers)
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    for start in range(0, entries.numel(), _CHUNK):
        part = entries[start : start + _CHUNK]
        total += (part * torch.arange(start + 1, start + 1 + part.numel(), device=param.device)).sum()
    return total.item()
