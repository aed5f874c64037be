"""Which of several ways to do the same is the fastest, by the clock of the slowest rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from tpfused.agreement import attempt, by_rank

ROUNDS = 8  # in each of which all candidates take their turn, so that a busy moment hits them alike
LAP = 5e-3  # seconds that a candidate's turn takes at least, unless that is more than so many calls:
MOST_CALLS = 50
NOISE = 0.01  # of the plain path's time: what a tier must gain to be taken
# Of the fastest tier's time: those that are as near come in their order. What is measured for one number of output
# features may be taken for others (`out_features=None`). Where there are many, the matmul hides nearly everything by
# any tier; where there are few, copy engines gain more: of 8192 x 8192 rows 4 % over NCCL with 28672 features and 12 %
# with 10240 (two H200).
NEAR = 0.03


@torch.no_grad()
def measure(
    candidates: dict[str, Callable[[], object]],
    rehearsals: dict[str, Callable[[], object]],
    device: torch.device,
    process_group: dist.ProcessGroup,
) -> tuple[dict[str, float], dict[str, str]]:
    """Time all `candidates`, which run on the current stream. All ranks call this together, and get the same.

    Args:
        rehearsals: of some of them, first: what they raise on one rank alone keeps no other one waiting.

    Returns:
        Microseconds a call, the median over the rounds, each that of the slowest rank; and what the candidates raised
        that failed on any rank.
    """
    laps, failures, calls = {name: [] for name in candidates}, {}, 2

    def runs(name: str, told: dict[int, object]) -> bool:
        """Whether it does on all ranks, whose laps these are, or what they raised."""
        failed = [f"rank {rank}: {lap}" for rank, lap in told.items() if isinstance(lap, str)]
        if failed:
            failures[name] = failed[0]
            del laps[name]
        return not failed

    for name, rehearse in rehearsals.items():
        _, failure = attempt(rehearse)
        runs(name, by_rank(failure and _text(failure), process_group, "a measurement"))
    for turn in range(1 + ROUNDS):  # the first warms up
        for name in list(laps)[:: -1 if turn % 2 else 1]:  # clocks fall while they are measured: none is always first
            told = by_rank(_lap(candidates[name], calls, device), process_group, "a measurement")
            if runs(name, told):
                laps[name].append(max(told.values()))
        if turn == 0:
            shortest = min((first for (first,) in laps.values()), default=LAP)
            calls = min(MOST_CALLS, math.ceil(LAP / shortest))
    return {name: round(statistics.median(times[1:]) * 1e6, 2) for name, times in laps.items()}, failures


def fastest(us: dict[str, float]) -> str:
    """The tier to take: the first in the order of `us` that is as fast as any, within a few percent; "reference", the
    plain path, where none gains more than noise, or none was measured."""
    limit = (1 - NOISE) * us.get("reference", math.inf)
    tiers = {name: each for name, each in us.items() if name != "reference" and each < limit}
    return next((name for name in tiers if (1 - NEAR) * tiers[name] <= min(tiers.values())), "reference")


def _lap(run: Callable[[], object], calls: int, device: torch.device) -> float | str:
    """Seconds a call, or what it raised.

    As a user meets it: from an idle GPU on, calls back to back. Where they are small, the GPU waits for the host to
    launch them, and their time is the host's; events around the kernels alone would not count that.
    """
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        run()  # not timed: it may compile or allocate, and the ranks do not come here at the same moment
        stream.synchronize()
        start.record(stream)
        for _ in range(calls):
            run()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls
    except Exception as error:  # whatever it is: the operation has other ways
        return _text(error)


def _text(error: Exception) -> str:
    message, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {message}"
