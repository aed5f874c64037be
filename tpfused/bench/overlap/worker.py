"""One rank of the benchmark: builds each case, checks ours, and times all variants in turn with the other ranks."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpfused.bench.case import outputs_of
from tpfused.bench.measure import GpuTimer, Timed, median_and_iqr
from tpfused.bench.overlap.cases import Case
from tpfused.bench.overlap.works import COLLECTIVE, MATMUL, Call, Place, Work, build
from tpfused.bench.results import new_row, rounded
from tpfused.bench.runner import DTYPES, name_of
from tpfused.bench.sampling import Sampled, common_seed, in_a_row, interleave, join, slowest, together
from tpfused.workers import Worker

GRAPH_CALLS = 20  # in one graph: a call is shorter than a graph's launch
TOLERANCE = 1e-2  # relative, of the norm: both sides are rounded to 16 bits on their way

Row = dict[str, Any]


def run(argument: dict[str, Any], worker: Worker) -> None:
    """Measure ``argument["cases"]`` and give their rows to ``worker.emit``, on the first rank."""
    device = join(argument["device"], worker)
    torch.manual_seed(common_seed(argument["seed"]) + worker.rank)
    # Threads that watch the collectives go on calling CUDA during a capture.
    timer = GpuTimer(capture_error_mode="thread_local") if device.type == "cuda" else None
    place = Place(worker.world, device, DTYPES[argument["dtype"]])
    for case in argument["cases"]:
        if worker.rank == 0:
            worker.emit("start", case.label)
        rows = measure(case.on(worker.world), place, timer, argument["rounds"])
        if worker.rank == 0:
            worker.emit("rows", rows)
    dist.destroy_process_group()


def measure(case: Case, place: Place, timer: GpuTimer | None, rounds: int) -> list[Row]:
    """The rows of one case: every figure is the slowest rank's. `timer` captures, on a GPU."""
    row = partial(_row, case, name_of(place.dtype))
    work, error = together(partial(build, case, place))
    if work is None:
        return [row("ours", error=error)]
    timed: dict[str, Timed] = {}
    known: dict[str, Row] = {}
    for name, call in work.variants.items():
        ready, error = together(partial(_prepare, call, timer if case.decode else None))
        known[name] = {"error": error, "note": work.notes.get(name, "")}
        known[name]["comparable"] = name not in (MATMUL, COLLECTIVE, *work.notes)
        if ready is not None:
            timed[name] = ready
    for name in work.checked:
        if name in timed and work.right in timed:
            known[name]["correct"] = _agree(timed[name].run(), timed[work.right].run())
            if known[name]["correct"]:
                known[work.right]["correct"] = True  # two ways that have little in common
    samples, host_us = (interleave(timed, rounds, place.device), in_a_row(timed, place.device)) if timed else ({}, {})
    for name, sampled in samples.items():
        known[name] |= _figures(name, work, samples) | {"graph": timed[name].graph or None}
        known[name] |= {"host_us": round(host_us[name], 3), "calls": sampled.calls, "rounds": rounds}
    return [row(name, **facts) for name, facts in known.items()]


def _prepare(call: Call, timer: GpuTimer | None) -> Timed:
    """`call` after its first time; with a `timer`, as a CUDA graph, whose replay returns what its last call gave."""
    call()
    if timer is None:
        return Timed(call, 1, False)
    outputs = []

    def keep() -> None:
        outputs[:] = [call()]

    replay = timer.capture(keep, GRAPH_CALLS)

    def run() -> object:
        replay()
        return outputs[0]

    return Timed(run, GRAPH_CALLS, True)


def _agree(found: object, right: object) -> bool:
    """Whether a variant's outputs are the right ones, on every rank."""
    pairs = zip(outputs_of(found), outputs_of(right), strict=True)
    error = max(_distance(a.float(), b.float()) for a, b in pairs)
    return slowest([error if error == error else float("inf")])[0] < TOLERANCE


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item() if a.shape == b.shape else float("inf")


def _figures(name: str, work: Work, samples: dict[str, Sampled]) -> Row:
    """What one variant's times say, and beside those of its parts, round by round."""
    us = samples[name].us
    median, iqr = rounded(*median_and_iqr(us))
    row = {"us": median, "us_iqr": iqr, "rate": round(work.flops / median / 1e6, 1), "unit": "TFLOP/s"}
    row["amount"] = work.flops
    if set(work.floor) <= set(samples):
        floors = [max(each) for each in zip(*(samples[part].us for part in work.floor), strict=True)]
        row["floor"] = f"max({', '.join(work.floor)})" if len(work.floor) > 1 else work.floor[0]
        row["floor_us"], row["floor_us_iqr"] = rounded(*median_and_iqr(floors))
        ratios = [one / floor for one, floor in zip(us, floors, strict=True)]
        row["ratio"], row["ratio_iqr"] = rounded(*median_and_iqr(ratios), digits=4)
    parts = {MATMUL, COLLECTIVE}
    if name not in parts and parts <= set(samples):
        together = list(zip(us, samples[MATMUL].us, samples[COLLECTIVE].us, strict=True))
        row["exposed_us"] = round(statistics.median(one - matmul for one, matmul, _ in together), 3)
        shares = [(matmul + collective - one) / min(matmul, collective) for one, matmul, collective in together]
        row["hidden"] = round(statistics.median(shares), 4)
    return row


def _row(case: Case, dtype: str, variant: str, **known: Any) -> Row:
    own = {"m": case.m, "k": case.k, "n": case.n} | dict.fromkeys(("host_us", "exposed_us", "hidden"))
    return new_row(case.op, case.name, case.direction, dtype, variant, **own | known)
