"""Shards of different models would be no model: what all ranks give is compared before anything is split.

What one rank is refused, or cannot tell, is raised on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.agreement import Failure, attempt, by_rank, raise_either, told
from tpfused.group import TPGroup

_CHUNK = 1 << 24  # entries summed at a time: bounds the memory for them as 64-bit integers


class _Said(NamedTuple):
    """What a rank tells the others of all that it was given."""

    failure: Failure | None
    params: list[str] | None  # None: it could not tell
    styles: Mapping[str, str] = {}
    bits: Sequence[int | None] = ()  # of each tensor; None on the meta device
    config: Mapping[str, str] = {}


def check_alike(describe: Callable[[], list[str]], group: dist.ProcessGroup, call: str) -> None:
    """What `describe` says of a model's tensors is the same on every rank of the group. One exchange over it, which all
    ranks make in the `call` of that name.

    Raises:
        ValueError: on every rank, where two ranks differ; names the first difference.
        Exception: on every rank, where `describe` raises on one.
    """
    params, failure = attempt(describe)
    _exchange(_Said(told(failure), params), failure, group, call)


@torch.no_grad()
def check_same(
    params: Mapping[str, Tensor], group: TPGroup, check: Callable[[], Mapping[str, str]] = dict, config: object = None
) -> dict[str, str]:
    """What every rank can be given, and the same: names, shapes, dtypes, which are frozen or on the meta device, the
    others' bits, what `check` returns: styles by module, and the model's `config`, if it has one. One exchange over the
    group. `params`: buffers too.

    Raises:
        ValueError: on every rank, where two ranks differ; names the first difference.
        Exception: on every rank, where `check` raises on one.
    """
    if group.size == 1:
        return dict(check())

    def look() -> tuple[dict[str, str], list[int | None], dict[str, str]]:
        # No bits of what is refused, which may be in parts already.
        styles = dict(check())
        return styles, [None if param.is_meta else _bits(param) for param in params.values()], _entries_of(config)

    looked, refused = attempt(look)
    styles, bits, entries = looked or ({}, [], {})
    described, failure = attempt(lambda: [_describe(name, param) for name, param in params.items()])
    failure = refused or failure
    said = _Said(told(failure), described, {name: repr(style) for name, style in styles.items()}, bits, entries)
    of_all = _exchange(said, failure, group.process_group, "parallelize")
    _check_tables({rank: of.config for rank, of in of_all.items()}, "not there", "models of different configs")
    _check_tables({rank: of.styles for rank, of in of_all.items()}, "'replicate'", "different styles")
    different = [
        name for name, *own in zip(params, *(of.bits for of in of_all.values()), strict=True) if len(set(own)) > 1
    ]
    if different:
        raise ValueError(
            f"{len(different)} of {len(params)} tensors differ between the ranks of the mesh ({different[0]}, ...): "
            f"build the model from one seed or one checkpoint on all of them"
        )
    return styles


def _check_tables(of_all: Mapping[int, Mapping[str, str]], without: str, told: str) -> None:
    """Each rank's words by names are the first one's. `without`: the words of a name that is not there."""
    one, first = next(iter(of_all.items()))
    for rank, other in of_all.items():
        for name in sorted(first.keys() | other.keys()):
            here, there = first.get(name, without), other.get(name, without)
            if here != there:
                raise ValueError(f"the ranks give {told}: {name} is {here} on rank {one}, but {there} on rank {rank}")


def _entries_of(config: object) -> dict[str, str]:
    """By which two models of the same weights may compute otherwise: a dataclass's, or what transformers' configs have
    beside where they are from."""
    if is_dataclass(config) and not isinstance(config, type):
        known = asdict(config)
    else:
        known = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name: repr(value) for name, value in known.items() if not name.startswith("_")}


def _describe(name: str, param: Tensor) -> str:
    dtype = str(param.dtype).removeprefix("torch.")
    frozen = "" if param.requires_grad else ", frozen"
    where = "on the meta device" if param.is_meta else "with values"
    return f"{name} {list(param.shape)} {dtype}, {where}{frozen}"


def _exchange(said: _Said, failure: Exception | None, group: dist.ProcessGroup, call: str) -> dict[int, _Said]:
    """What each rank says; raises on all of them where one has failed, or their models differ."""
    of_all = by_rank(said, group, call)
    heard = next((of.failure for of in of_all.values() if of.failure is not None), None)
    different = _different({rank: of.params for rank, of in of_all.items() if of.params is not None})
    if different:
        raise ValueError(f"{different}; {heard}" if heard else different) from failure
    raise_either(failure, heard)
    return of_all


def _different(models: dict[int, list[str]]) -> str | None:
    """The first difference between the ranks' parameters; None where there is none."""
    first, here = next(iter(models.items()), (0, []))
    for rank, there in models.items():
        # Of a rank that gives fewer, none where the others go on.
        pairs = zip_longest(here, there, fillvalue="none")
        for index, (mine, its) in enumerate(pairs):
            if mine != its:
                return (
                    f"the ranks give different models: parameter {index} of {len(here)} on rank {first} is ({mine}), "
                    f"of {len(there)} on rank {rank} ({its}): build the same model on all of them"
                )
    return None


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
