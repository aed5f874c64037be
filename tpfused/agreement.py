"""What one rank is refused must not leave the others waiting for it: all of them raise, or none.

Ranks are named by their numbers in the default group, whatever the group that talks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")
# Ranks that hear of an exception raise one of these of its kinds; RuntimeError for others, which may take other
# arguments than a text.
_KINDS = (FileNotFoundError, OSError, ImportError, NotImplementedError, TypeError, ValueError)


class Failure(NamedTuple):
    """What a rank tells the others of the exception that it raises."""

    rank: int
    kind: type[Exception]
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.text}"


def attempt(step: Callable[..., T], *args: object) -> tuple[T | None, Exception | None]:
    """What the step returns, or the exception that it raises: the other is None."""
    try:
        return step(*args), None
    except Exception as error:
        return None, error


def together(step: Callable[[], T], groups: Iterable[dist.ProcessGroup]) -> T:
    """What the step returns here, once it has returned on all ranks that the groups connect; else `raise_together`."""
    result, failure = attempt(step)
    raise_together(failure, groups)
    return result


def raise_together(failure: Exception | None, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise `failure`, or where another rank of the groups has one, what tells of it: by one exchange over each.

    All ranks that the groups connect give them in the same order. What a rank hears of in one group it tells in the
    next: over both groups of a two-dimensional mesh all ranks hear of it.
    """
    heard = told(failure)
    for group in groups:
        heard = next(filter(None, by_rank(heard, group).values()), None)
    raise_either(failure, heard)


def by_rank(value: T, group: dist.ProcessGroup) -> dict[int, T]:
    """Each rank's value, in the group's order. One exchange over it."""
    ranks = dist.get_process_group_ranks(group)
    values: list[T] = [value] * len(ranks)
    dist.all_gather_object(values, value, group)
    return dict(zip(ranks, values, strict=True))


def told(failure: Exception | None) -> Failure | None:
    if failure is None:
        return None
    kind = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    return Failure(dist.get_rank() if dist.is_initialized() else 0, kind, f"{type(failure).__name__}: {failure}")


def raise_either(own: Exception | None, heard: Failure | None) -> None:
    if own is not None:
        raise own
    if heard is not None:
        raise heard.kind(str(heard))
