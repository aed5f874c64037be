"""Random numbers in a tensor-parallel program: common outside tensor-parallel regions, each rank's own inside.

Dropout on an activation that is whole on every rank must drop the same entries everywhere, or the replicas drift apart.
So all ranks of a tensor-parallel group keep their default generators in one state: seed them alike. Dropout on a
sharded activation (attention probabilities of this rank's heads, this rank's tokens under sequence parallelism) must
draw independently on each rank; `rank_rng` is the region for that, and `rank_dropout` the dropout,
which needs no region on GPUs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.explanation import PLAIN, tell
from tpfused.group import TPGroup, resolve_group
from tpfused.kernels.dropout import dropout
from tpfused.layers.backend import runs_kernels

WHAT = "dropout of a rank's own"  # for `explain`


@contextmanager
def rank_rng(group: dist.ProcessGroup | TPGroup | None, device: torch.device | str) -> Iterator[None]:
    """Inside, `device`'s default generator draws a stream of this rank's own.

    The stream is derived from the default generator's state and the rank, and the default generator moves on by one
    draw on leaving, however much was drawn inside. There is no state besides torch's: whatever replays torch's
    generator (activation checkpointing, a saved RNG state) replays the region, and the ranks stay in step outside.

    `group` is the tensor-parallel group, as a layer takes it. In a group of one nothing changes. torch.compile breaks
    its graph at a region.

    Raises:
        RuntimeError: a CUDA graph is being captured, in a group of more than one.
    """
    group, device = resolve_group(group), torch.device(device)
    if group.size == 1:
        yield
        return
    if _is_capturing(device):
        raise RuntimeError(
            f"rank_rng: a CUDA graph is being captured, during which torch lets nobody set a generator's state, as a "
            f"rank that draws its own numbers must (this is rank {group.rank} of {group.size}). Capture the model in "
            f"eval mode or without the dropout in the region, which parallelize makes between a column- and a "
            f"row-parallel layer; the dropout of tpfused's own layers can be captured, but not on the plain path"
        )
    with _fork(group.rank, device):
        yield


def has_region(group: TPGroup, device: torch.device) -> bool:
    """Whether `rank_rng` can be entered: in a group of several not under torch.compile, for Inductor draws the seeds of
    all its random numbers at once, wherever those are used, nor while a CUDA graph is captured.
    """
    return group.size == 1 or not (torch.compiler.is_compiling() or _is_capturing(device))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def rank_dropout(x: Tensor, p: float, group: TPGroup, backend: str | None = None) -> Tensor:
    """Dropout of this rank's own entries, ``0 <= p < 1``; the default generator moves on by one draw, as on all ranks.

    On GPUs a kernel, the same in eager calls, compiled code and CUDA graphs, so that what is to be captured has run
    before. The plain path, which `backend` of a layer can ask for, is ``F.dropout`` in `rank_rng`'s region; in compiled
    code an operator that draws the same.
    """
    if group.size == 1:
        tell(WHAT, x, PLAIN, "one rank")
        return F.dropout(x, p)
    if runs_kernels(x, backend, WHAT):
        return dropout(x, p, group.rank)
    if torch.compiler.is_compiling():
        return x * _kept(x.detach(), p, group.rank) * (1 / (1 - p))
    with rank_rng(group, x.device):
        return F.dropout(x, p)


# Random, so that a recomputation draws again what was drawn; and the host is asked, so it is for no CUDA graph.
@torch.library.custom_op(
    "tpfused::kept", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
)
def _kept(x: Tensor, p: float, rank: int) -> Tensor:
    """Which entries of `x` this rank's dropout keeps."""
    with _fork(rank, x.device):
        return F.dropout(torch.ones_like(x), p) != 0


@_kept.register_fake
def _(x: Tensor, p: float, rank: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _fork(rank: int, device: torch.device) -> AbstractContextManager[None]:
    return (_fork_philox if device.type == "cuda" else _fork_cpu)(rank, device)


@contextmanager
def _fork_cpu(rank: int, device: torch.device) -> Iterator[None]:
    generator = torch.default_generator
    key = torch.randint(2**63 - 1, (), generator=generator, device="cpu").item()
    outside = generator.get_state()
    generator.manual_seed(_derive_seed(key, rank))
    try:
        yield
    finally:
        generator.set_state(outside)


@contextmanager
def _fork_philox(rank: int, device: torch.device) -> Iterator[None]:
    # The Philox state is a seed and an offset on the host: reading them costs no synchronisation.
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_derive_seed(seed, offset, rank))
    try:
        yield
    finally:
        generator.manual_seed(seed)
        generator.set_offset(offset + 4)  # offsets are multiples of 4: one draw of a Philox counter


def state_of(device: torch.device) -> bytes:
    """A digest of all that the device's default generator will draw."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return hashlib.blake2b(bytes(state.tolist()), digest_size=8).digest()


def _derive_seed(*parts: int) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
