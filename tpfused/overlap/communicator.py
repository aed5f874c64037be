"""What a process group needs to overlap its collectives with matmuls on one GPU: made once, by all its ranks together.

An NCCL communicator and side streams of the compiled extension, and where all ranks are on one host and can reach each
other's memory, buffers that the peers write.
"""

from __future__ import annotations

import os
import platform
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused import extension
from tpfused.agreement import announce, attempt, by_rank, meet
from tpfused.explanation import size_text
from tpfused.group import TPGroup, exists

FIRST_SLOT = 2**20  # bytes of each of the peers' buffers at first
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TF32 = 3
Shape = tuple[int, int | None, int | None]  # rows, input and output features of all ranks; None: a rank does not know
Rows = tuple[int, int, int]  # tokens, rows of each one after the other, times that all tokens come: csrc/group.h's
NCCL_PROCESSORS = 32  # that NCCL may take from the matmuls beside it, at most: of a small card fewer
MOST_RANKS = 64
MAKING = "a group's first overlapped operation"
UNSEEN = "; which ranks are missing can't be seen"  # in csrc/time_out.cpp's words
HEARD_AFTER = 10.0  # seconds that ranks are given to tell, once one has given up, that they have as well
# Bytes for the matmuls on an operation's two streams, by the type's code: `workspace_bytes` of csrc/matmul.h.
WORKSPACE = {code: 2 * (2 if code == TYPES[torch.float32] else 32) * 2**20 for code in (*TYPES.values(), TF32)}


class Communicator:
    """The extension's side of a group; `communicator_of` makes it.

    Attributes:
        tiers: the ways that rows can travel here, the fastest first: "p2p" where peers reach each other's memory.
        why_no_peers: or why they do not; the same on all ranks.
        members: the ranks' processes, by their hosts and numbers.
        workspaces: of operations on each of the caller's streams. A group's own: threads may use two groups on one
            stream, and each group has streams of its own beside, which the caller's does not order.
    """

    def __init__(self, module, handle: int, group: TPGroup, device: torch.device):
        self.module, self.handle = module, handle
        self.rank, self.size = group.rank, group.size
        self.process_group = group.process_group
        boot, _ = attempt(Path("/proc/sys/kernel/random/boot_id").read_text)
        place = boot, platform.node(), os.getpid()
        told = exchange((place, uuid.uuid4().hex), self.process_group, MAKING)
        self.members = frozenset(place for place, _ in told)
        self._failing = f"given up {told[0][1]}"  # the store may remember a group of before, of the same name
        self.device = device
        self.workspaces: dict[int, Tensor] = {}
        self._slot_bytes = 0
        self._deterministic = self._has_nccl = False
        self._failure: str | None = None
        self._one_asks = Lock()
        self.set_timeout(_timeout)
        self.tiers, self.why_no_peers = ("nccl",), ""
        if not self._on_one_host():
            self.why_no_peers = "they are on several hosts"
        elif self._grow(FIRST_SLOT, MAKING):
            self.tiers = ("p2p", "nccl")
        else:
            self.why_no_peers = "they do not reach each other's memory"
        if self.why_no_peers and self.rank == 0:
            told = f"tpfused: the rows of {self.size} ranks travel by NCCL, for {self.why_no_peers}"
            warnings.warn(told, stacklevel=2)

    def connect_nccl(self, operation: str) -> None:
        """An NCCL communicator for the NCCL tier, made once. All ranks together, in that operation.

        Raises:
            RuntimeError: on all ranks, where one could not make it or did not come, or a CUDA graph is being captured.
        """
        if self._has_nccl:
            return
        with self._together(operation, "NCCL's first operation"):
            unique_id, failure = attempt(self.module.nccl_unique_id) if self.rank == 0 else (None, None)
            (unique_id, *_) = exchange(unique_id, self.process_group, operation)
            if unique_id is not None:
                _, failure = attempt(self.module.group_connect_nccl, self.handle, unique_id, NCCL_PROCESSORS)
            reasons = by_rank(_reason(failure), self.process_group, operation).items()
            failed = [f"rank {rank} could not make an NCCL communicator: {told}" for rank, told in reasons if told]
            if failed:
                raise RuntimeError("; ".join(failed))
        self._has_nccl = True

    def set_timeout(self, seconds: float) -> None:
        self.module.group_timeout(self.handle, seconds)

    def check_alive(self) -> None:
        """
        Raises:
            RuntimeError: an operation was broken off or given up: what this rank has computed since is wrong. Names the
                ranks that are missing, or those of which nothing is heard.
        """
        if not self.handle:
            return
        try:
            self.module.group_check_alive(self.handle)
        except RuntimeError as error:
            with self._one_asks:  # a backward pass has a thread of its own
                if self._failure is None:
                    self._failure = self._with_missing(str(error))
            raise RuntimeError(self._failure) from None

    def _with_missing(self, told: str) -> str:
        """A failure, which the other ranks are told. Where this one could not see which are missing, as NCCL does not
        tell, with those that tell of none: they wait for nothing, or have come later."""
        head, unseen, _ = told.partition(UNSEEN)
        heard = announce(self.process_group, self._failing, head, HEARD_AFTER if unseen else 0.0)
        if not unseen or heard is None:
            return told
        if missing := [str(rank) for rank in range(self.size) if rank not in heard]:
            return f"{head}; nothing has been heard of rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        return "; ".join([head, *(f"on rank {rank}: {text}" for rank, text in heard.items() if rank != self.rank)])

    def leave(self) -> None:
        """Wait for this rank's operations, and let go of the peers' memory, that of captured graphs too. Each has to
        before any rank closes."""
        if self.handle:
            self.module.group_disconnect(self.handle, True)
        self.workspaces.clear()

    def close(self) -> None:
        if self.handle:
            handle, self.handle = self.handle, 0  # first: other threads may ask what it keeps
            self.module.group_destroy(handle)

    def reserve(self, slot_bytes: int, operation: str) -> None:
        """Peers' buffers of at least this size. All ranks ask for the same, in the same operations."""
        if slot_bytes <= self._slot_bytes:
            return
        needed = (
            f"an operation that needs {slot_bytes} bytes of memory for its peers to write, while there are "
            f"{self._slot_bytes}"
        )
        with self._together(operation, needed):
            # At least what there was at first: small sums count on it, also after memory that was not to be had.
            if not self._grow(rounded_up(max(slot_bytes, FIRST_SLOT)), operation):
                mib = f"{slot_bytes / 2**20:.0f} MiB"
                raise RuntimeError(f"a rank could not get {mib} of memory for its peers to write")

    @property
    def has_peers(self) -> bool:
        """Whether all ranks have memory that their peers write; the same on each."""
        return self.handle != 0 and self._slot_bytes > 0

    @property
    def peer_bytes(self) -> int:
        """Of this rank's memory that its peers write. It is not of torch's allocator."""
        return self.module.group_peer_bytes(self.handle) if self.handle else 0

    @property
    def workspace_bytes(self) -> int:
        """Kept from call to call: of torch's allocator."""
        return sum(workspace.numel() for workspace in list(self.workspaces.values()))  # other threads may add one

    def set_deterministic(self, wanted: bool) -> None:
        """Whether every tier is to give the same bits from now on. The same on all ranks."""
        if wanted != self._deterministic:
            self.module.group_deterministic(self.handle, wanted)
            self._deterministic = wanted

    @contextmanager
    def _together(self, operation: str, what: str) -> Iterator[None]:
        """For exchanges of all ranks in that operation: outside of captures, and on the group's device, for those by
        NCCL are on the current one, which need not be the operands'."""
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"a CUDA graph can't be captured of {what}: run it once before the capture")
            meet_for(operation, self.process_group)
            yield

    def _on_one_host(self) -> bool:
        boots = {boot for boot, *_ in self.members}
        return boots != {None} and len(boots) == 1

    def _grow(self, slot_bytes: int, call: str) -> bool:
        """Whether all ranks got new memory and reached that of all others."""
        self._slot_bytes = 0
        _, failure = attempt(torch.cuda.synchronize, self.device)
        exchange(None, self.process_group, call)  # nobody writes to the old memory any more
        _, left = attempt(self.module.group_disconnect, self.handle, False)
        exchange(None, self.process_group, call)  # and nobody has it open
        failure, mine = failure or left, None
        if failure is None:
            mine, failure = attempt(self._allocate, slot_bytes)
        handles = exchange(mine, self.process_group, call)
        if None not in handles:
            _, failure = attempt(self.module.group_connect, self.handle, handles)
        if any(exchange(failure is not None, self.process_group, call)):
            if failure is not None:
                reason = _reason(failure)
                warnings.warn(f"rank {dist.get_rank()}: no memory that peers can write: {reason}", stacklevel=2)
            return False
        self._slot_bytes = slot_bytes
        return True

    def _allocate(self, slot_bytes: int) -> bytes:
        """New memory, for peers to write: not of torch's allocator, which may hold what there is without a use."""
        try:
            return self.module.group_allocate(self.handle, slot_bytes)
        except RuntimeError:
            torch.cuda.empty_cache()
            return self.module.group_allocate(self.handle, slot_bytes)


class Rehearsal:
    """In a communicator's place: an operation allocates all that it needs, and does nothing. So it fails for want of
    memory as it would, but before any other rank waits for this one."""

    def __init__(self, communicator: Communicator):
        self.size, self.handle = communicator.size, communicator.handle
        self.workspaces = communicator.workspaces
        self.module = self

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Of a communicator's methods and of the extension's functions."""
        return lambda *arguments: None


def rounded_up(size: int) -> int:
    """Bytes to allocate for something that may want more later: to a quarter of the power of two, for growing stops the
    device."""
    step = max(1, 1 << size.bit_length() >> 3)
    return -(-size // step) * step


def all_made() -> list[Communicator]:
    """Those of groups that are destroyed, too, as long as they hold memory."""
    return [*filter(None, _communicators.values()), *_left]


def peer_bytes() -> int:
    """Of this rank's memory that its peers write, in all groups. It is not of torch's allocator."""
    return sum(made.peer_bytes for made in all_made())


def kept_bytes(process_group: dist.ProcessGroup) -> int:
    """What a group keeps from call to call: workspaces, and memory that peers write."""
    return sum(made.peer_bytes + made.workspace_bytes for made in all_made() if made.process_group == process_group)


def set_timeout(seconds: float) -> None:
    """How long an overlapped operation may wait for other ranks, once the GPU has come to it; 600 s if not set.

    One that waits longer is given up: a line on stderr names the operation and, but by NCCL, the ranks that are
    missing, the GPU goes on, and the group's next operation raises RuntimeError, by NCCL with the ranks of which
    nothing has been heard ten seconds later. What the group computes from then on is wrong, also on a rank that comes
    late and raises only when it waits for this one: stop them all. Where the ranks have to meet before an operation (a
    group's first one, a size that is new), that one raises it. After an operation that raised halfway, its stream waits
    as long for what others were to send. The plain path, as on a CPU, has the time-out of torch's process group
    instead: ``init_process_group(timeout=...)``.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not positive, or not finite.
    """
    global _timeout
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise TypeError(f"the time-out must be a number of seconds, not {seconds!r}")
    if not (seconds > 0 and isfinite(seconds)):
        raise ValueError(f"the time-out must be positive and finite, not {seconds}")
    _timeout = float(seconds)
    for communicator in filter(None, _communicators.values()):
        communicator.set_timeout(_timeout)


_timeout = 600.0


def check_alive() -> None:
    """Raise what the next overlapped operation would, of a group in which one was given up (`set_timeout`).

    For programs that only replay CUDA graphs: a replay raises nothing, and what it computed after that is wrong. Call
    it where the results are used, after waiting for the GPU. Waits for nothing else, and for no other rank; only once
    one was given up by NCCL, for ten seconds at most, as said there.

    Raises:
        RuntimeError: names the operation, and the ranks that are missing.
    """
    for (process_group, _), communicator in list(_communicators.items()):
        if communicator is not None and exists(process_group):
            communicator.check_alive()


def communicator_of(group: TPGroup, device: torch.device) -> Communicator | None:
    """The group's communicator on `device`; None where its ranks have to use torch's own collectives.

    The first call for a group is a collective of all its ranks, which no CUDA graph can hold: None while one is
    captured.
    """
    key = group.process_group, device
    if key not in _communicators:
        if torch.cuda.is_current_stream_capturing():
            return None
        for stale in [_communicators.pop(known) for known in list(_communicators) if not exists(known[0])]:
            if stale is not None:
                stale.leave()
                _left.append(stale)
        made = _communicators[key] = _make(group, device)
        if made is not None:  # its ranks have met: all of them have left what they had before
            for stale in [stale for stale in _left if stale.members <= made.members]:
                _left.remove(stale)
                stale.close()
    return _communicators[key]


_communicators: dict[tuple[dist.ProcessGroup, torch.device], Communicator | None] = {}
_left: list[Communicator] = []  # whose memory other ranks may still have open


def meet_for(operation: str, process_group: dist.ProcessGroup) -> None:
    """`meet` before the ranks' exchanges for that operation, as long as an operation may take."""
    meet(process_group, operation, _timeout)


def check_agreement(
    group: TPGroup, operation: str, shape: Shape, dtype: torch.dtype, tier: str, rows: Rows | None = None
) -> None:
    """A collective, for when ranks may not mean the same call.

    Raises:
        ValueError: on every rank, if the group's ranks differ in the operation, the shape of the whole, how its rows
            lie, the dtype, or the tier that is asked for.
    """
    calls = by_rank(
        (operation, shape, rows_text(rows), str(dtype), tier), group.process_group, "an overlapped operation"
    )
    if len(set(calls.values())) > 1:
        told = "; ".join(
            f"rank {rank}: {name}, {size_text(m)} rows{lie}, {size_text(k)} -> {size_text(n)} features, {kind}, "
            f"tier {by}"
            for rank, (name, (m, k, n), lie, kind, by) in calls.items()
        )
        raise ValueError(f"the ranks of a group make different calls: {told}")


def rows_text(rows: Rows | None) -> str:
    """How they lie; nothing where each is a token."""
    if rows is None or rows[1:] == (1, 1):
        return ""
    tokens, each, batch = rows
    return f" ({batch} x {tokens} tokens of {each})"


def _make(group: TPGroup, device: torch.device) -> Communicator | None:
    if group.size > MOST_RANKS:
        told = f"a group of {group.size} ranks: the extension takes up to {MOST_RANKS}"
        warnings.warn(f"tpfused: collectives are not overlapped with matmuls in {told}", stacklevel=2)
        return None

    def create() -> tuple[Any, int]:
        module = extension.load()
        with torch.cuda.device(device):
            return module, module.group_create(device.index, group.rank, group.size)

    # Whatever it is: the others are about to exchange, and wait for this rank.
    made, failure = attempt(create)
    reasons = {rank: told for rank, told in by_rank(_reason(failure), group.process_group, MAKING).items() if told}
    if not reasons:
        return Communicator(*made, group, device)
    if made is not None:
        module, handle = made
        module.group_destroy(handle)
    rank, reason = next(iter(reasons.items()))
    warnings.warn(
        f"tpfused: collectives are not overlapped with matmuls, for rank {rank} lacks the compiled extension: {reason}",
        stacklevel=2,
    )
    return None


def exchange(value: Any, process_group: dist.ProcessGroup, call: str) -> list:
    """Each rank's value, in rank order; `call` as for `by_rank`."""
    return list(by_rank(value, process_group, call).values())


def _reason(failure: Exception | None) -> str:
    """In words, and not empty, as some exceptions' are; empty where there is none."""
    return "" if failure is None else str(failure) or type(failure).__name__
