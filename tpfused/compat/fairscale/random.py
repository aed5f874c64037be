"""fairscale's random numbers: a stream of this rank's own beside torch's default one, and checkpoints that replay both.

A tracker's states are torch's, of the current CUDA device; those of the CPU where there is no CUDA (fairscale's tracker
does not work there). Differs from fairscale: nothing is printed, and `checkpoint` is torch's non-reentrant one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.checkpoint
from torch import Tensor

from tpfused.compat.fairscale.initialize import get_data_parallel_rank as get_data_parallel_rank
from tpfused.compat.fairscale.initialize import get_model_parallel_rank

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Named streams of random numbers, each continued where its last `fork` left it."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """The streams' states by name, in a new dictionary."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all streams by those of `states`, which is copied."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new stream. Raises `ValueError` where its name or seed is taken."""
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} is another stream's already")
        if name in self.states_:
            raise ValueError(f"there is a stream {name!r} already")
        rng = _rng()
        outside = rng.get_rng_state()
        rng.manual_seed(seed)
        self.states_[name] = rng.get_rng_state()
        _set_cuda_rng_state(outside)
        self.seeds_.add(seed)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Inside, torch's default generator draws from the stream. Raises `ValueError` where there is none so named."""
        if name not in self.states_:
            raise ValueError(f"there is no stream {name!r}: add it, or call model_parallel_cuda_manual_seed")
        rng = _rng()
        outside = rng.get_rng_state()
        _set_cuda_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = rng.get_rng_state()
            _set_cuda_rng_state(outside)


def _rng():
    return torch.cuda if torch.cuda.is_available() else torch.random


def _set_cuda_rng_state(new_state: Tensor, device: int | str | torch.device = -1) -> None:
    """Continue `device`'s default stream from `new_state`; -1: the current CUDA device's. Programs import it."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(new_state, "cuda" if device == -1 else device)
    else:
        torch.set_rng_state(new_state)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The process's tracker."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed CUDA's default stream with `seed`, alike on all ranks, and the tracker's with one for each rank of a model.

    Without CUDA only the tracker is seeded. The seeds are fairscale's.
    """
    own_seed = seed + 2718 + get_model_parallel_rank()
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    _tracker.reset()
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own_seed)


def checkpoint(function, *args):
    """``function(*args)``, computed again in backward instead of kept, with the random numbers of the first time."""
    first: list[dict[str, Tensor]] = []

    def replayed(*args):
        # Not by torch's `context_fn`: compiled code takes contexts of torch's own kind only. What it holds as one graph
        # forks no stream, for that breaks the graph.
        if torch.compiler.is_compiling():
            return function(*args)
        if not first:
            first.append(_tracker.get_states())
            return function(*args)
        later = _tracker.get_states()
        _tracker.set_states(first[0])
        try:
            return function(*args)
        finally:
            _tracker.set_states(later)

    return torch.utils.checkpoint.checkpoint(replayed, *args, use_reentrant=False)


class CheckpointFunction:
    """For programs that call its `apply` instead of `checkpoint`; no autograd function here."""

    apply = staticmethod(checkpoint)
