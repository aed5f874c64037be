"""What the ranks of a benchmark do together: join, try a step, and time calls in turn, by the slowest rank's clock."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpfused.agreement import attempt, by_rank
from tpfused.bench.measure import Timed, in_turn
from tpfused.bench.results import error_line
from tpfused.workers import Worker, join_group

TIMEOUT_S = 300.0
SAMPLE_US = 4000  # of calls between two looks at the clock
LEAST_RUNS, MOST_RUNS = 2, 10
LEAD_US = 1000  # that the host is ahead of the GPU, at least
CYCLES_PER_US = 2000  # of a GPU; a slower one only waits longer
ROW_CALLS, ROW_COLD, ROW_ROUNDS = 12, 4, 3  # calls in a row: not so many that a GPU's queue is full; see `in_a_row`
LOAD_SIZE = 8192  # of the matmuls of a `Load`
LOAD_WARM_S, LOAD_BATCH = 1.5, 10  # so long, for a GPU's clock to settle, and between two looks at the host's


@dataclass(frozen=True)
class Sampled:
    """One variant's times, of the slowest rank: microseconds a call, round by round, and of the host to launch one."""

    us: list[float]
    host_us: float
    calls: int


def join(device: str, worker: Worker) -> torch.device:
    """This rank's device of type "cuda" or "cpu", made current, once it is in the default group. Ranks share a CPU's
    cores evenly.
    """
    if device == "cuda":
        torch.cuda.set_device(worker.local_rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // worker.local_world))
    found = torch.device(device, worker.local_rank if device == "cuda" else None)
    join_group(worker, found, TIMEOUT_S)
    return found


def common_seed(seed: int) -> int:
    """The first rank's, which the report names: torchrun's ranks have drawn one each, unless they were given it."""
    return next(iter(by_rank(seed, dist.group.WORLD).values()))


def together(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what `step` gives, None) or (None, why it failed): one rank's failure is every rank's."""
    result, failure = attempt(step)  # whatever a baseline raises, the others have a chance
    problem = None if failure is None else error_line(failure)
    told = next(filter(None, by_rank(problem, dist.group.WORLD).values()), None)
    return (None, told) if told else (result, None)


def interleave(
    timed: dict[Hashable, Timed],
    rounds: int,
    device: torch.device,
    *,
    ahead: bool = True,
    waiting: Container[Hashable] = (),
    load: Load | None = None,
) -> dict[Hashable, Sampled]:
    """All variants in each round. Not `ahead`, and for those in `waiting`: the GPU waits for its host as it does in a
    program. `load` is what the GPU does until a sample begins, instead of idling.
    """
    lead_us = LEAD_US if ahead else 0

    def sample(name: Hashable, runs: int) -> tuple[float, float]:
        return _sample(timed[name], runs, 0 if name in waiting else lead_us, device, load)

    first = {name: sample(name, LEAST_RUNS) for name in timed}
    us, host_us = (slowest(list(values)) for values in zip(*first.values(), strict=True))
    runs = {}
    for (name, each), one, host in zip(timed.items(), us, host_us, strict=True):
        runs[name] = max(LEAST_RUNS, min(MOST_RUNS, round(SAMPLE_US / (one * each.calls))))
        # The same for all: who has waited longer finds a cooler GPU, whose clock is higher.
        if ahead and name not in waiting:
            lead_us = max(lead_us, 1.25 * host * runs[name] * each.calls)
    found: dict[Hashable, list[tuple[float, float]]] = {name: [] for name in timed}
    for _, name in in_turn(timed, rounds):
        found[name].append(sample(name, runs[name]))
    samples = {}
    for name, pairs in found.items():
        us, host_us = (slowest(list(values)) for values in zip(*pairs, strict=True))
        samples[name] = Sampled(us, statistics.median(host_us), runs[name] * timed[name].calls)
    return samples


class Load:
    """Keeps a GPU busy with large matmuls, so that what follows runs at the clock of a long computation.

    A GPU that idles between measurements has power to spare, and a clock that it cannot hold: on an H200 a matmul of
    8192 x 4096 x 14336 once ran at 793 TFLOP/s between pauses, and at 705 amid training steps.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        operands = (torch.randn(LOAD_SIZE, LOAD_SIZE, device=device, dtype=dtype) for _ in range(2))
        self._matmul = partial(torch.mm, *operands, out=torch.empty(LOAD_SIZE, LOAD_SIZE, device=device, dtype=dtype))
        end = time.perf_counter() + LOAD_WARM_S
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(LOAD_BATCH):
                self._matmul()
            torch.cuda.synchronize()
            self._us = (time.perf_counter() - start) * 1e6 / LOAD_BATCH  # the last batch's

    def __call__(self, us: float) -> None:
        """Launches matmuls that take so long at least."""
        for _ in range(math.ceil(us / self._us)):
            self._matmul()


def load_of(device: torch.device, dtype: torch.dtype) -> Load | None:
    """For a GPU; a CPU's clock is left alone."""
    return Load(device, dtype) if device.type == "cuda" else None


def _sample(
    timed: Timed, runs: int, lead_us: float, device: torch.device, load: Load | None = None
) -> tuple[float, float]:
    """Microseconds a call: of the GPU, which starts with the others' and its host so far ahead; of the host."""
    calls = runs * timed.calls
    if device.type != "cuda":
        dist.barrier()
        us = _host_us(timed, runs) / calls
        return us, us
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if load is not None:
        load(max(lead_us, LEAD_US))
        if not lead_us:
            torch.cuda.synchronize()
    elif lead_us:
        torch.cuda._sleep(int(lead_us * CYCLES_PER_US))
    dist.all_reduce(torch.zeros(1, device=device))
    begin.record()
    host = _host_us(timed, runs) / calls
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls, host


def _host_us(timed: Timed, runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        timed.run()
    return (time.perf_counter() - start) * 1e6


def in_a_row(timed: dict[Hashable, Timed], device: torch.device) -> dict[Hashable, float]:
    """Microseconds of the host to launch one call amid others, of the slowest rank: a median.

    The first few after a pause are left out: what they need is in none of the processor's caches. On the host of an
    H200 the first one took 300 to 500 us, the second 70 to 200, and from the fifth on each 35 to 100; a matmul of
    torch's 85, 22, and 18.
    """
    times: dict[Hashable, list[float]] = {name: [] for name in timed}
    for _, name in in_turn(timed, ROW_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        us = [_host_us(timed[name], 1) / timed[name].calls for _ in range(ROW_CALLS)]
        times[name] += us[ROW_COLD:]
    return dict(zip(times, slowest([statistics.median(us) for us in times.values()]), strict=True))


def slowest(values: list[float]) -> list[float]:
    """Each value's largest over the ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
