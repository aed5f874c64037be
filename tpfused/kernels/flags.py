"""Flags through which the programs of one launch wait for each other: zero before each launch, and again after it."""

from __future__ import annotations

import torch

FLAGS = 256  # of a launch: at least one a program of a persistent kernel
SLOTS = 1024  # launches inside CUDA graphs whose flags are cleared in advance; later ones clear their own


def flags(device: torch.device) -> torch.Tensor:
    """`FLAGS` int32 zeros for one launch on the current stream of `device`, whose kernel leaves them zero.

    Eager launches of one stream follow each other and use the same. A captured launch has its own: its graph may be
    replayed on any stream.
    """
    if device.type != "cuda":
        return torch.zeros(FLAGS, dtype=torch.int32, device=device)
    capturing = torch._C._cuda_isCurrentStreamCapturing()
    known = _slots.get(device)
    if known is None and not capturing:
        known = _slots[device] = _Slots(device)
    found = None
    if known is not None:
        found = known.take() if capturing else known.of_stream(torch._C._cuda_getCurrentRawStream(device.index))
    return torch.zeros(FLAGS, dtype=torch.int32, device=device) if found is None else found


class _Slots:
    """The flags of one device, cleared in advance: to clear them before each launch would be another launch."""

    def __init__(self, device: torch.device):
        self.free = list(torch.zeros(SLOTS, FLAGS, dtype=torch.int32, device=device).unbind())
        self.streams: dict[int, torch.Tensor | None] = {}
        torch.cuda.synchronize(device)  # whatever stream uses them first

    def take(self) -> torch.Tensor | None:
        return self.free.pop() if self.free else None

    def of_stream(self, stream: int) -> torch.Tensor | None:
        if stream not in self.streams:
            self.streams[stream] = self.take()
        return self.streams[stream]


_slots: dict[torch.device, _Slots] = {}
