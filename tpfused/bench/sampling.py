"""What the ranks of a benchmark do together: join, try a step, and time calls in turn, by the slowest rank's clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
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


def together(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what `step` gives, None) or (None, why it failed): one rank's failure is every rank's."""
    result, failure = attempt(step)  # whatever a baseline raises, the others have a chance
    problem = None if failure is None else error_line(failure)
    told = next(filter(None, by_rank(problem, dist.group.WORLD).values()), None)
    return (None, told) if told else (result, None)


def interleave(
    timed: dict[Hashable, Timed], rounds: int, device: torch.device, *, ahead: bool = True
) -> dict[Hashable, Sampled]:
    """All variants in each round. Not `ahead`: the GPU waits for its host as it does in a program."""
    lead_us = LEAD_US if ahead else 0
    first = {name: _sample(each, LEAST_RUNS, lead_us, device) for name, each in timed.items()}
    us, host_us = (slowest(list(values)) for values in zip(*first.values(), strict=True))
    runs = {}
    for (name, each), one, host in zip(timed.items(), us, host_us, strict=True):
        runs[name] = max(LEAST_RUNS, min(MOST_RUNS, round(SAMPLE_US / (one * each.calls))))
        # The same for all: who has waited longer finds a cooler GPU, whose clock is higher.
        lead_us = max(lead_us, 1.25 * host * runs[name] * each.calls) if ahead else 0
    found: dict[Hashable, list[tuple[float, float]]] = {name: [] for name in timed}
    for _, name in in_turn(timed, rounds):
        found[name].append(_sample(timed[name], runs[name], lead_us, device))
    samples = {}
    for name, pairs in found.items():
        us, host_us = (slowest(list(values)) for values in zip(*pairs, strict=True))
        samples[name] = Sampled(us, statistics.median(host_us), runs[name] * timed[name].calls)
    return samples


def _sample(timed: Timed, runs: int, lead_us: float, device: torch.device) -> tuple[float, float]:
    """Microseconds a call: of the GPU, which starts with the others' and its host so far ahead; of the host."""
    calls = runs * timed.calls
    if device.type != "cuda":
        dist.barrier()
        us = _host_us(timed, runs) / calls
        return us, us
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if lead_us:
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


def slowest(values: list[float]) -> list[float]:
    """Each value's largest over the ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()
