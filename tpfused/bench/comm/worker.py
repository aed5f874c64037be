"""One rank of the benchmark: the sizes of a collective take turns, on each kind of group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpfused.bench.comm.cases import Case, told
from tpfused.bench.comm.rates import measure_rates
from tpfused.bench.comm.works import Member, Work, build, join_groups
from tpfused.bench.measure import Timed, median_and_iqr
from tpfused.bench.results import new_row, rounded
from tpfused.bench.runner import DTYPES
from tpfused.bench.sampling import Sampled, common_seed, interleave, join, slowest, together
from tpfused.cli.errors import UserError
from tpfused.planning.communication import bandwidths
from tpfused.workers import Worker

SMALL, SMALL_CALLS = 2**22, 20  # bytes; calls between two looks at the clock, of what is over in microseconds

Row = dict[str, Any]


def run(argument: dict[str, Any], worker: Worker) -> None:
    """Measure ``argument["cases"]`` on ``argument["groups"]``; the first rank emits the "rows" of each collective, and
    the machine's other "rates" at the end, of layers that the groups ``argument["split"]`` split.
    """
    device = join(argument["device"], worker)
    dtype = DTYPES[argument["dtype"]]
    torch.manual_seed(common_seed(argument["seed"]))
    measure_all(argument, worker, device, dtype)
    report_rates(argument, worker, device, dtype)
    dist.destroy_process_group()


def report_rates(argument: dict[str, Any], worker: Worker, device: torch.device, dtype: torch.dtype) -> None:
    """The first rank emits the "rates", of layers that the groups ``argument["split"]`` split, or none do."""
    if worker.rank == 0:
        worker.emit("start", "rates")
    groups = argument["split"]
    group = None if groups is None else dist.new_subgroups_by_enumeration(groups)[0]
    rates = measure_rates(device, dtype, argument["rounds"], group)
    if worker.rank == 0:
        worker.emit("rates", rates)


def measure_all(argument: dict[str, Any], worker: Worker, device: torch.device, dtype: torch.dtype) -> None:
    """The collectives of `run`: the first rank emits "start" and "rows" of each."""
    cases: list[Case] = argument["cases"]
    if not cases:
        return
    largest = max(case.size for case in cases)
    members, error = together(partial(join_groups, argument["groups"], largest, dtype, device))
    if members is None:
        raise UserError(f"two buffers of {told(largest)} a rank: {error}")
    for op in dict.fromkeys(case.op for case in cases):
        if worker.rank == 0:
            worker.emit("start", op)
        rows = measure(op, [case for case in cases if case.op == op], members, argument, device)
        if worker.rank == 0:
            worker.emit("rows", rows)


def measure(op: str, cases: list[Case], members: dict[str, Member], argument: dict[str, Any], device) -> list[Row]:
    """The rows of one collective, the slowest rank's times: all sizes and kinds of group in each round."""
    works = {(case, kind): build(op, case.size, member) for case in cases for kind, member in members.items()}
    correct = {key: _agreed(work) for key, work in works.items()}
    timed = {key: Timed(_repeated(work.call, _calls(key[0])), _calls(key[0]), False) for key, work in works.items()}
    samples = interleave(timed, argument["rounds"], device)
    return [
        _row(case, kind, members[kind].ranks, argument, samples[case, kind], correct[case, kind])
        for case, kind in works
    ]


def _calls(case: Case) -> int:
    return SMALL_CALLS if case.size <= SMALL else 1


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def _agreed(work: Work) -> bool:
    """Whether it was right on every rank."""
    return slowest([float(not work.check())])[0] == 0


def _row(case: Case, kind: str, ranks: int, argument: dict[str, Any], sampled: Sampled, correct: bool) -> Row:
    us, iqr = rounded(*median_and_iqr(sampled.us))
    algorithm, bus = rounded(*bandwidths(case.op, ranks, case.size, us), digits=4)
    known = {"us": us, "us_iqr": iqr, "host_us": round(sampled.host_us, 3), "amount": case.size, "correct": correct}
    known |= {"ranks": ranks, "group": kind, "algorithm_gbps": algorithm, "bus_gbps": bus}
    known |= {"calls": sampled.calls, "rounds": argument["rounds"], "fit_us": None, "fit_error": None}
    return new_row(case.op, case.name, "", argument["dtype"], f"{kind}, {ranks} ranks", **known)
