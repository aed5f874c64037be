"""What a process group needs to overlap its collectives with matmuls on one GPU: made once, by all its ranks together.

An NCCL communicator and side streams of the compiled extension, and where all ranks are on one host and can reach each
other's memory, buffers that the peers write.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpfused import extension
from tpfused.group import TPGroup

SLOT_STEP = 16 * 2**20  # peers' buffers grow by this many bytes, for growing stops the device
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TF32 = 3
NCCL_PROCESSORS = 8  # that NCCL may take from the matmuls beside it; with 4, it moves half as much
WORKSPACE = 2 * 32 * 2**20  # of the matmuls on an operation's two streams


class Communicator:
    """The extension's side of a group; `communicator_of` makes it.

    Attributes:
        tiers: the ways that rows can travel here, the fastest first: "p2p" where peers reach each other's memory.
    """

    def __init__(self, module, group: TPGroup, device: torch.device, nccl_id: bytes):
        self.module = module
        self.rank, self.size = group.rank, group.size
        self._process_group = group.process_group
        self._device = device
        self._slot_bytes = 0
        with torch.cuda.device(device):
            self.handle = module.group_create(device.index, group.rank, group.size, nccl_id, NCCL_PROCESSORS)
        self.set_timeout(_timeout)
        self.tiers = ("nccl",)
        if self._on_one_host() and self._grow(SLOT_STEP):
            self.tiers = ("p2p", "nccl")

    def set_timeout(self, seconds: float) -> None:
        self.module.group_timeout(self.handle, seconds)

    def close(self) -> None:
        if self.handle:
            self.module.group_destroy(self.handle)
            self.handle = 0

    def reserve(self, slot_bytes: int) -> None:
        """Peers' buffers of at least this size. All ranks ask for the same, in the same order."""
        if slot_bytes > self._slot_bytes and not self._grow(-(-slot_bytes // SLOT_STEP) * SLOT_STEP):
            raise RuntimeError(f"a rank could not get {slot_bytes / 2**20:.0f} MiB of memory for its peers to write")

    def _on_one_host(self) -> bool:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return len(set(_exchange(boot.read_text() if boot.exists() else None, self._process_group))) == 1

    def _grow(self, slot_bytes: int) -> bool:
        """Whether all ranks got new memory and reached that of all others."""
        self._slot_bytes = 0
        torch.cuda.synchronize(self._device)
        _exchange(None, self._process_group)  # nobody writes to the old memory any more
        self.module.group_disconnect(self.handle)
        _exchange(None, self._process_group)  # and nobody has it open
        mine = self._try(lambda: self.module.group_allocate(self.handle, slot_bytes))
        handles = _exchange(mine, self._process_group)
        connected = False
        if None not in handles:
            connected = self._try(lambda: self.module.group_connect(self.handle, handles) is None)
        if not all(_exchange(bool(connected), self._process_group)):
            return False
        self._slot_bytes = slot_bytes
        return True

    def _try(self, step) -> Any:
        try:
            return step()
        except RuntimeError as error:
            warnings.warn(f"rank {self.rank}: no memory that peers can write: {error}", stacklevel=2)
            return None


def set_timeout(seconds: float) -> None:
    """How long an overlapped operation may wait for other ranks, once the GPU has come to it; 600 s if not set.

    One that waits longer is given up: a line on stderr names the operation and the ranks that are missing, the GPU goes
    on, and the group's next operation raises RuntimeError.
    """
    global _timeout
    if not seconds > 0:
        raise ValueError(f"the time-out must be positive, not {seconds}")
    _timeout = float(seconds)
    for communicator in filter(None, _communicators.values()):
        communicator.set_timeout(_timeout)


_timeout = 600.0


def communicator_of(group: TPGroup, device: torch.device) -> Communicator | None:
    """The group's communicator on `device`; None where its ranks have to use torch's own collectives.

    The first call for a group is a collective of all its ranks.
    """
    key = group.process_group, device
    if key not in _communicators:
        for stale in [known for known in _communicators if not _exists(known[0])]:
            closed = _communicators.pop(stale)
            if closed is not None:
                closed.close()
        _communicators[key] = _make(group, device)
    return _communicators[key]


_communicators: dict[tuple[dist.ProcessGroup, torch.device], Communicator | None] = {}


def _make(group: TPGroup, device: torch.device) -> Communicator | None:
    module, reason = None, ""
    try:
        module = extension.load()
    except extension.NotBuildable as error:
        reason = str(error)
    offers = _exchange((reason, module.nccl_unique_id() if module else None), group.process_group)
    reasons = {rank: reason for rank, (reason, _) in enumerate(offers) if reason}
    if reasons:
        rank, reason = min(reasons.items())
        warnings.warn(
            f"tpfused: collectives are not overlapped with matmuls, for rank {rank} lacks the compiled extension: "
            f"{reason}",
            stacklevel=2,
        )
        return None
    return Communicator(module, group, device, offers[0][1])


def _exists(process_group: dist.ProcessGroup) -> bool:
    return process_group in dist.distributed_c10d._world.pg_map


def _exchange(value: Any, process_group: dist.ProcessGroup) -> list:
    """Each rank's value, in rank order."""
    values = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values
