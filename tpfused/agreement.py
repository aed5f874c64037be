"""What one rank is refused must not leave the others waiting for it: all of them raise, or none.

Ranks are named by their numbers in the default group, whatever the group that talks.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from tpfused.group import exists

T = TypeVar("T")
# Ranks that hear of an exception raise one of these of its kinds; RuntimeError for others, which may take other
# arguments than a text.
_KINDS = (FileNotFoundError, OSError, ImportError, NotImplementedError, TypeError, ValueError)

_LEFT = b"left"


class _Sent(NamedTuple):
    """A value, and what its rank is in: ranks whose calls crossed would take each other's values for their own kind."""

    call: str
    value: Any


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


def together(step: Callable[[], T], groups: Iterable[dist.ProcessGroup], call: str) -> T:
    """What the step returns here, once it has returned on all ranks that the groups connect; else `raise_together`."""
    result, failure = attempt(step)
    raise_together(failure, groups, call)
    return result


def raise_together(failure: Exception | None, groups: Iterable[dist.ProcessGroup], call: str) -> None:
    """Raise `failure`, or where another rank of the groups has one, what tells of it: by one exchange over each.

    All ranks that the groups connect give them in the same order, and the same `call`, as for `by_rank`. What a rank
    hears of in one group it tells in the next: over both groups of a two-dimensional mesh all ranks hear of it.
    """
    heard = told(failure)
    for group in groups:
        of_all, crossed = attempt(by_rank, heard, group, call)
        failure = failure or crossed
        heard = told(crossed) if of_all is None else next(filter(None, of_all.values()), None)
    raise_either(failure, heard)


def by_rank(value: T, group: dist.ProcessGroup, call: str = "") -> dict[int, T]:
    """Each rank's value, in the group's order. One exchange over it.

    Args:
        call: what the user called, on all ranks alike.

    Raises:
        ValueError: on every rank that is in an exchange of this function, where another one has made another `call` or
            exchanges objects of its own; names two such ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    sent: list[_Sent] = [_Sent(call, value)] * len(ranks)
    dist.all_gather_object(sent, _Sent(call, value), group)
    calls: dict[str, int] = {}  # the first rank in each
    for rank, each in zip(ranks, sent, strict=True):
        name = (each.call or "another call") if isinstance(each, _Sent) else "a collective of its program's own"
        calls.setdefault(name, rank)
    if len(calls) > 1:
        places = ", ".join(f"{name} on rank {rank}" for name, rank in calls.items())
        raise ValueError(
            f"the ranks are not in the same call: {places}; all must make the same ones, with models that are split "
            f"over the same ranks (by parallelize, say, on each of them)"
        )
    return {rank: each.value for rank, each in zip(ranks, sent, strict=True)}


def meet(group: dist.ProcessGroup, what: str, seconds: float) -> None:
    """Wait until all ranks of the group are here, before exchanges whose own time-out names no rank.

    Through the group's store: no collective is left half done, and no GPU takes part. The n-th meeting of one rank is
    the n-th of all; one that failed may be tried again.

    A rank has come when it has seen this one, too: the store may remember ranks that have given up waiting, and others
    of a group that was destroyed before.

    Raises:
        RuntimeError: some have not come after so many `seconds`; names them, by their numbers in the group, and `what`.
    """
    for gone in [known for known in _meetings if not exists(known)]:
        del _meetings[gone]
    number = _meetings.get(group, 0) + 1
    store, rank, size = dist.distributed_c10d._get_process_group_store(group), dist.get_rank(group), group.size()
    came, seen = ([f"tpfused/meeting {number}/{word}/{each}" for each in range(size)] for word in ("came", "seen"))
    token = uuid.uuid4().hex.encode()
    store.set(came[rank], token)
    deadline, pause = time.monotonic() + seconds, 1e-3
    while missing := _not_here(store, came, seen, rank, token):
        if time.monotonic() > deadline:
            # Those that waited as long and have just left are missing because of others.
            never = [each for each in missing if not (store.check([came[each]]) and store.get(came[each]) == _LEFT)]
            for key in (came[rank], seen[rank]):
                store.set(key, _LEFT)  # no other is to take this one for waiting
            names = ", ".join(f"rank {each}" for each in never or missing)
            raise RuntimeError(f"{what} on rank {rank} of {size}: not called after {seconds:g} s by {names}")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    _tell_seen(store, came, seen[rank])  # once more: by now all have come, and wait for nothing else
    _meetings[group] = number
    if number > 1:  # which all ranks have left, as they are in this one
        for word in ("came", "seen"):
            store.delete_key(f"tpfused/meeting {number - 1}/{word}/{rank}")


def announce(group: dist.ProcessGroup, word: str, value: str, seconds: float) -> dict[int, str] | None:
    """What the ranks have announced in that `word`, by their numbers in the group, when all have or so many seconds are
    over; this one its `value`. Through the group's store, as for `meet`; None where that does not answer.
    """
    heard: list[dict[int, str] | None] = []
    # The store's own calls wait without end for an owner that has stopped, and for other threads' calls.
    thread = Thread(target=lambda: heard.append(attempt(_announce, group, word, value, seconds)[0]), daemon=True)
    thread.start()
    if seconds:
        thread.join(seconds + 1)
    return heard[0] if heard else None


def _announce(group: dist.ProcessGroup, word: str, value: str, seconds: float) -> dict[int, str]:
    store, rank, size = dist.distributed_c10d._get_process_group_store(group), dist.get_rank(group), group.size()
    keys = [f"tpfused/{word}/{each}" for each in range(size)]
    store.set(keys[rank], value)
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {each: store.get(key).decode() for each, key in enumerate(keys) if store.check([key])}


def _not_here(store: dist.Store, came: list[str], seen: list[str], rank: int, token: bytes) -> list[int]:
    """The ranks that have not come or not seen this one's `token`; once all have come, tells whom this one sees."""

    def absent(keys: list[str]) -> list[int]:
        return [] if store.check(keys) else [each for each, key in enumerate(keys) if not store.check([key])]

    if missing := absent(came):
        return missing
    _tell_seen(store, came, seen[rank])
    return absent(seen) or [each for each, told in enumerate(store.multi_get(seen)) if token not in told]


def _tell_seen(store: dist.Store, came: list[str], key: str) -> None:
    store.set(key, b" ".join(store.multi_get(came)))


_meetings: dict[dist.ProcessGroup, int] = {}  # how many each group has had


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
