"""Greedy decoding steps of our model, eager and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tpfused.bench.measure import GpuTimer, Timed
from tpfused.generation import vocab_parallel_argmax
from tpfused.layers.cache import KVCache
from tpfused.layers.transformer import ParallelTransformer
from tpfused.overlap.tiers import tier


def step_of(model: ParallelTransformer, batch: int, context: int) -> tuple[Callable[[], Tensor], Tensor, KVCache]:
    """A call that decodes a token of `batch` sequences, each time the last one of `context` tokens.

    -> the call, which returns the logits ``[batch, vocabulary shard]``, the ids ``[batch, 1]`` that it reads and
    writes, and its cache. Keys and values of the earlier tokens are drawn.
    """
    model.eval()
    config, device = model.config, model.embedding.local("weight").device
    cache = KVCache(model, batch, context)
    generator = torch.Generator(device).manual_seed(model.group.rank)
    for part in (cache.keys, cache.values):
        part.normal_(generator=generator)
    cache.length = context - 1
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def step() -> Tensor:
        logits = model(ids, cache=cache)[:, -1]
        ids.copy_(vocab_parallel_argmax(logits, config.vocab_size, model.group).unsqueeze(-1))
        if not cache.captured():
            cache.length = context - 1
        return logits

    return step, ids, cache


def prepare(
    model: ParallelTransformer, batch: int, context: int, forced: str | None, timer: GpuTimer | None
) -> tuple[Timed, Tensor, Tensor]:
    """A step by the `forced` tier (None: the measured ones), with a `timer` as a CUDA graph; and the logits of an eager
    step, and of one as it will be timed, for the same tokens."""
    step, ids, cache = step_of(model, batch, context)
    if forced is not None:
        step = partial(_by_tier, forced, step)
    eager = step().clone()
    cache.fixed = True
    step()  # nothing is left to measure or to compile then
    timed = Timed(step if timer is None else _captured(step, timer), 1, timer is not None)
    ids.zero_()
    return timed, eager, timed.run().clone()


def _captured(step: Callable[[], Tensor], timer: GpuTimer) -> Callable[[], Tensor]:
    results: list[Tensor] = []
    replay = timer.capture(lambda: results.append(step()), 1)

    def run(step: Callable[[], Tensor] = step) -> Tensor:  # which keeps the memory that the graph works on
        replay()
        return results[0]

    return run


def _by_tier(name: str, step: Callable[[], Tensor]) -> Tensor:
    with tier(name):
        return step()
