"""How an overlapped operation's rows travel: by copy engines ("p2p"), by NCCL, or before the matmul ("reference")."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tpfused.group import TPGroup
from tpfused.overlap.communicator import TYPES, Communicator, communicator_of

TIERS = ("nccl", "p2p")  # in the extension's order
NAMES = (*TIERS, "reference")
_forced: list[str] = []


@contextmanager
def tier(name: str) -> Iterator[None]:
    """Force a tier for the operations inside: "p2p", "nccl" or "reference" (torch's collectives, then the matmul).

    Raises:
        ValueError: there is no such tier.
    """
    if name not in NAMES:
        raise ValueError(f"tier must be one of {NAMES}, not {name!r}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def choose(group: TPGroup, x: Tensor) -> tuple[Communicator, str] | None:
    """The communicator and tier for an operation on `x`; None: the plain path.

    Raises:
        ValueError: the tier that TPFUSED_TIER or `tier` asks for is not to be had here.
    """
    wanted = _forced[-1] if _forced else os.environ.get("TPFUSED_TIER")
    if wanted is not None and wanted not in NAMES:
        raise ValueError(f"TPFUSED_TIER must be one of {NAMES}, not {wanted!r}")
    if wanted == "reference" or group.size == 1 or group.replicas > 1 or not x.is_cuda or x.dtype not in TYPES:
        return None
    capturing = torch.cuda.is_current_stream_capturing()  # uses of peers' memory are counted on the host
    communicator = None if capturing else communicator_of(group, x.device)
    possible = () if communicator is None else communicator.tiers
    if wanted is not None and wanted not in possible:
        why = " during a CUDA graph's capture" if capturing else ""
        raise ValueError(f"tier {wanted!r} is not to be had in this group{why}, only {(*possible, 'reference')}")
    return (communicator, wanted or possible[0]) if possible else None
