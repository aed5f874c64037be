"""Shards of different models would be no model: what all ranks give is compared before anything is split.

And a rank that is given something refused must not leave the others waiting for it: all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.group import TPGroup

_CHUNK = 1 << 24  # entries summed at a time: bounds the memory for them as 64-bit integers
# Ranks that hear of an exception raise one of these of its kinds; RuntimeError for others, which may take other
# arguments than a text.
_KINDS = (FileNotFoundError, OSError, NotImplementedError, TypeError, ValueError)


class _Failure(NamedTuple):
    """What a rank tells the others of the exception that it raises."""

    rank: int  # in the default group
    kind: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.text}"


class _Said(NamedTuple):
    """What a rank tells the others of all that it was given."""

    failure: _Failure | None
    params: list[str] | None  # None: it could not tell
    styles: Mapping[str, str] = {}
    bits: Sequence[int | None] = ()  # of each parameter; None on the meta device


def failure_of(step: Callable[..., object], *args: object) -> Exception | None:
    try:
        step(*args)
    except Exception as error:
        return error
    return None


def raise_together(failure: Exception | None, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise `failure`, or where another rank of the groups has one, what tells of it: by one exchange over each.

    All ranks that the groups connect give them in the same order. What a rank hears of in one group it tells in the
    next: over both groups of a two-dimensional mesh all ranks hear of it.
    """
    heard = _told(failure)
    for group in groups:
        of_all: list[_Failure | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_all, heard, group)
        heard = next(filter(None, of_all), None)
    _raise_either(failure, heard)


def check_alike(describe: Callable[[], list[str]], group: dist.ProcessGroup) -> None:
    """What `describe` says of a model's tensors is the same on every rank of the group. One exchange over it.

    Raises:
        ValueError: on every rank, where two ranks differ; names the first difference.
        Exception: on every rank, where `describe` raises on one.
    """
    params: list[str] = []
    failure = failure_of(lambda: params.extend(describe()))
    _exchange(_Said(_told(failure), None if failure else params), failure, group)


@torch.no_grad()
def check_same(
    params: Mapping[str, Tensor], group: TPGroup, check: Callable[[], Mapping[str, str]] = dict
) -> dict[str, str]:
    """What every rank can be given, and the same: names, shapes, dtypes, which are frozen or on the meta device, the
    others' bits, and what `check` returns: styles by module. One exchange over the group.

    Raises:
        ValueError: on every rank, where two ranks differ; names the first difference.
        Exception: on every rank, where `check` raises on one.
    """
    styles: dict[str, str] = {}
    failure = failure_of(lambda: styles.update(check()))
    if group.size == 1:
        _raise_either(failure, None)
        return styles
    # No bits of what was refused, which may be in parts already.
    bits = [None if param.is_meta or failure is not None else _bits(param) for param in params.values()]
    said = _Said(_told(failure), [_describe(name, param) for name, param in params.items()], styles, bits)
    of_all = _exchange(said, failure, group.process_group)
    first = of_all[0]
    for rank, other in enumerate(of_all):
        for name in sorted(first.styles.keys() | other.styles.keys()):
            here, there = (given.styles.get(name, "replicate") for given in (first, other))
            if here != there:
                raise ValueError(
                    f"the ranks of the mesh give different styles: {name} is {here!r} on rank 0, but {there!r} on rank "
                    f"{rank}"
                )
    different = [name for name, *own in zip(params, *(of.bits for of in of_all), strict=True) if len(set(own)) > 1]
    if different:
        raise ValueError(
            f"{len(different)} of {len(params)} parameters differ between the ranks of the mesh ({different[0]}, ...): "
            f"build the model from one seed or one checkpoint on all of them"
        )
    return styles


def _describe(name: str, param: Tensor) -> str:
    dtype = str(param.dtype).removeprefix("torch.")
    frozen = "" if param.requires_grad else ", frozen"
    where = "on the meta device" if param.is_meta else "with values"
    return f"{name} {list(param.shape)} {dtype}, {where}{frozen}"


def _told(failure: Exception | None) -> _Failure | None:
    if failure is None:
        return None
    kind = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    return _Failure(dist.get_rank() if dist.is_initialized() else 0, kind, f"{type(failure).__name__}: {failure}")


def _raise_either(own: Exception | None, heard: _Failure | None) -> None:
    if own is not None:
        raise own
    if heard is not None:
        raise heard.kind(str(heard))


def _exchange(said: _Said, failure: Exception | None, group: dist.ProcessGroup) -> list[_Said]:
    """What each rank says; raises on all of them where one has failed, or their models differ."""
    of_all: list[_Said] = [said] * dist.get_world_size(group)
    dist.all_gather_object(of_all, said, group)
    heard = next((of.failure for of in of_all if of.failure is not None), None)
    different = _different({rank: of.params for rank, of in enumerate(of_all) if of.params is not None})
    if different:
        raise ValueError(f"{different}; {heard}" if heard else different) from failure
    _raise_either(failure, heard)
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
