"""Operations with inputs, and what plain collectives make of them: for tests that run thousands, whose errors stay on
the GPU until they are looked at.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.distributed import Context
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul, matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier
from tpfused.sharding import shard_range

FUNCTIONS = all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul_all_gather, column_matmul
OPERATIONS = {function.__name__: function for function in FUNCTIONS}
# The dimensions along which x, weight, bias and the result are split over the ranks; None: each rank has all of it.
SPLIT = {
    "all_gather_matmul": (0, 0, 0, 1),
    "matmul_reduce_scatter": (1, 1, None, 0),
    "matmul_all_reduce": (1, 1, None, None),
    "matmul_all_gather": (None, 0, 0, None),
    "column_matmul": (None, 0, 0, 1),
}
DTYPES = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = None, "gelu", "gelu_tanh"  # relu's derivative jumps: where the sum is near 0, a rounding decides
# Of a typical value. A few roundings to bfloat16 make 0.015; what a race gets wrong is off by as much as the value.
TOLERANCE = 0.05


def tiers_of(ctx: Context) -> tuple[str, ...]:
    return ("p2p", "nccl") if ctx.device.type == "cuda" else ("reference",)


class Case:
    """This rank's part of an operation on random inputs: of all ranks' `tokens`, `k` in and `n` out features.

    All ranks make the same cases in the same order, from one seed, and compute what to compare results with. On a CPU
    the `dtype` is float64.
    """

    def __init__(
        self,
        ctx: Context,
        name: str,
        tokens: int,
        k: int,
        n: int,
        activation: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        on_gpu = ctx.device.type == "cuda"
        x_dim, weight_dim, bias_dim, out_dim = SPLIT[name]
        options = {"in_features": k} if weight_dim == 1 else {"out_features": n, "activation": activation}
        if name == "all_gather_matmul":
            options["total_len"] = tokens
        self.name = f"{name} {tokens, k, n} {options.get('activation')} {dtype}"
        self._operation = partial(OPERATIONS[name], **options)

        def part(dim: int | None, *shape: int, scale: float = 1.0) -> Tensor:
            whole = torch.randn(shape, device=ctx.device, dtype=dtype if on_gpu else torch.float64) * scale
            if dim is None:
                return whole
            start, stop = shard_range(shape[dim], ctx.world, ctx.rank)
            return whole.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

        self.inputs = part(x_dim, tokens, k), part(weight_dim, n, k, scale=k**-0.5), part(bias_dim, n)
        self.grad = part(out_dim, tokens, n)
        for x in self.inputs:
            x.requires_grad_()
        with tier("reference"):
            self._expected = self.run(backward=True)
        # All entries of a small tensor may happen to be small, but none of the sums behind them.
        typical = 1.0, (n / k) ** 0.5, tokens**0.5, tokens**0.5
        self._scales = [max(usual, largest(x)) for usual, x in zip(typical, self._expected, strict=True)]

    def run(self, group=None, backward: bool = False) -> list[Tensor]:
        """The result; with `backward`, also the gradients of this rank's x, weight and bias."""
        with torch.set_grad_enabled(backward):
            out = self.forward(group)
        return [out.detach(), *(self.gradients(out) if backward else ())]

    def forward(self, group=None) -> Tensor:
        return self._operation(*self.inputs, group=group)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grad)

    def twin(self) -> "Case":
        """The same in memory of its own."""
        other = copy(self)
        other.inputs = tuple(x.detach().clone().requires_grad_() for x in self.inputs)
        other.grad = self.grad.clone()
        return other

    def copy_from(self, other: "Case") -> None:
        """The other's inputs, of the same shapes, in this one's memory."""
        with torch.no_grad():
            for mine, theirs in zip((*self.inputs, self.grad), (*other.inputs, other.grad), strict=True):
                mine.copy_(theirs)

    def error(self, results: Sequence[Tensor]) -> Tensor:
        """The largest error of what `run` gave, relative to a typical value; NaN where there is one."""
        return largest_error(results, self._expected[: len(results)], self._scales)


def largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """Of all entries of all tensors, relative to the tensor's scale. Nothing waits for the GPU."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    errors = [
        (one - other).abs().amax().float() / scale
        for one, other, scale in zip(actual, expected, scales, strict=False)
        if one.numel()
    ]
    return torch.stack(errors).amax() if errors else actual[0].new_zeros((), dtype=torch.float32)


def largest(x: Tensor) -> float:
    return x.abs().amax().item() if x.numel() else 0.0


def make_graphed(function, inputs):
    """As torch does, whose graphs die in cycles: one that is collected during a capture breaks it off."""
    gc.collect()
    return torch.cuda.make_graphed_callables(function, inputs)


class Captured:
    """An operation in a CUDA graph, forward or with its backward pass, for the inputs of all of `cases`."""

    def __init__(self, cases: Sequence[Case], tier_name: str, backward: bool, group=None):
        self.cases, self.name = cases, f"{cases[0].name} {tier_name} {backward=}"
        self._graph, self._inputs = torch.cuda.CUDAGraph(), cases[0].twin()
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with tier(tier_name):
            with torch.cuda.stream(warm_up):  # as torch wants it; and each shape runs once before it is captured
                self._inputs.run(group, backward)
            torch.cuda.current_stream().wait_stream(warm_up)
            with torch.cuda.graph(self._graph):
                self._results = self._inputs.run(group, backward)

    def replay(self, case: Case) -> list[Tensor]:
        """With the inputs of `case` -> results, until the next replay."""
        self._inputs.copy_from(case)
        self._graph.replay()
        return self._results


class Errors:
    """The largest error of each of some names, gathered on the device that computes them, by one stream."""

    def __init__(self, ctx: Context, names: Sequence[str]):
        self._names, self._worst = list(names), torch.zeros(len(names), device=ctx.device)

    def add(self, index: int, error: Tensor) -> None:
        self._worst[index] = torch.maximum(self._worst[index], error)  # NaN stays

    def check(self, when: str) -> None:
        """Waits for all errors so far."""
        worst = zip(self._names, self._worst.tolist(), strict=True)
        wrong = {name: error for name, error in worst if not error <= TOLERANCE}
        assert not wrong, f"{when}: errors relative to a typical value {wrong}"


def check_in_turn(
    ctx: Context,
    rng: random.Random,
    runs: Sequence[tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]],
    steps: int,
) -> None:
    """Calls, each with what it is to give, in random order, eager and replayed from CUDA graphs, with ranks that are
    late. `rng` is in the same state on every rank."""
    captured = []
    for run, expected in runs:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        captured.append((run, graph, results, expected, [largest(y) for y in expected]))
    errors = Errors(ctx, [str(index) for index in range(len(runs))])
    for _ in range(steps):
        index, replayed = rng.randrange(len(runs)), rng.random() < 0.5
        run, graph, results, expected, scales = captured[index]
        perhaps_late(ctx, rng)
        if replayed:
            graph.replay()
        errors.add(index, largest_error(results if replayed else run(), expected, scales))
    errors.check(f"after {steps} steps")


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory has NaN in it, and a CUDA graph's again at each replay: what is read too early shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills what `torch.empty` gives in this mode
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def perhaps_late(ctx: Context, rng: random.Random, chance: float = 0.03) -> None:
    """Now and then one rank is up to 30 ms late, its process or its GPU. `rng` is in the same state on every rank."""
    if rng.random() >= chance:
        return
    late, seconds, on_host = rng.randrange(ctx.world), 0.03 * rng.random() ** 4, rng.random() < 0.5
    if ctx.rank != late:
        return
    if on_host or ctx.device.type == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1.7e9))  # clock cycles


def assert_given_up(told: str, wait: Callable[[], object], operate: Callable[[], object]) -> None:
    """`wait` enqueues what other ranks never join, with a time-out of 1.5 s: the GPU goes on nevertheless, and then
    `operate`, another operation of that group, raises what is `told`.
    """
    start = time.monotonic()
    wait()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match=told):
        for _ in range(20):  # the watchdog may need a moment to say so
            time.sleep(0.1)
            operate()
    with tier("reference"), pytest.raises(RuntimeError, match=told):  # whichever way it goes
        operate()
