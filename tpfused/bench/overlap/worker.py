"""One rank of the benchmark: builds each case, checks ours, and times all variants in turn with the other ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpfused.bench.measure import median_and_iqr
from tpfused.bench.overlap.cases import Case, Work, build
from tpfused.bench.runner import DTYPES
from tpfused.training.launch import Worker

TIMEOUT = timedelta(minutes=5)
SAMPLE_US = 4000  # of calls between two looks at the clock
MOST_CALLS = 50
TOLERANCE = 1e-2  # relative, of the norm: both sides are rounded to 16 bits on their way


def run(argument: dict[str, Any], worker: Worker) -> None:
    """Measure ``argument["cases"]`` and give their rows to ``worker.emit``, on the first rank."""
    on_gpu = argument["device"] == "cuda"
    device = torch.device("cuda", worker.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    place = {}
    if worker.port is not None:
        store = dist.TCPStore("127.0.0.1", worker.port, is_master=False, timeout=TIMEOUT)
        place = dict(store=store, rank=worker.rank, world_size=worker.world)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=device if on_gpu else None, **place
    )
    try:
        torch.manual_seed(argument["seed"] + worker.rank)
        for case in argument["cases"]:
            if worker.rank == 0:
                worker.emit("start", case.label)
            rows = measure(case, device, argument["dtype"], argument["rounds"])
            if worker.rank == 0:
                worker.emit("rows", rows)
    finally:
        dist.destroy_process_group()


def measure(case: Case, device: torch.device, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of one case: every figure is the slowest rank's."""
    work = build(case, device, DTYPES[dtype])
    failed: dict[str, str] = {}
    for name, call in work.variants.items():
        _attempt(name, call, failed)
    variants = {name: call for name, call in work.variants.items() if name not in failed}
    correct = {name: _agrees(work, name) for name in work.checked if name in variants}
    times, hosts = _interleave(variants, rounds, device)
    floors = [max(each) for each in zip(*(times[name] for name in work.floor), strict=True)]
    return [
        _row(case, work, dtype, name, times.get(name), hosts.get(name), floors, correct.get(name), failed.get(name))
        for name in work.variants
    ]


def _attempt(name: str, call: Callable[[], object], failed: dict[str, str]) -> None:
    """Run it once on every rank; one rank's failure is every rank's."""
    problem = None
    try:
        call()
    except (RuntimeError, ValueError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    told = next(filter(None, problems), None)
    if told:
        failed[name] = told


def _agrees(work: Work, name: str) -> bool:
    """Whether a variant's outputs are those of `work.right`, on every rank."""
    found, right = (_list(work.variants[each]()) for each in (name, work.right))
    error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, right, strict=True))
    return _slowest([error if error == error else float("inf")])[0] < TOLERANCE


def _list(outputs: object) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _interleave(
    variants: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds a call of each variant, round by round, and of the host's time to make one."""
    once = {name: _sample(call, 3, device)[0] for name, call in variants.items()}
    calls = {
        name: max(2, min(MOST_CALLS, round(SAMPLE_US / us)))
        for name, us in zip(once, _slowest(list(once.values())), strict=True)
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            samples[name].append(_sample(variants[name], calls[name], device))
    times = {name: _slowest([us for us, _ in found]) for name, found in samples.items()}
    hosts = {name: _slowest([statistics.median(host for _, host in found)])[0] for name, found in samples.items()}
    return times, hosts


def _sample(call: Callable[[], object], calls: int, device: torch.device) -> tuple[float, float]:
    """Microseconds a call, on the GPU and of the host; the GPU starts when the host is well ahead of it."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        us = (time.perf_counter() - start) * 1e6 / calls
        return us, us
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = (time.perf_counter() - start) * 1e6 / calls
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls, host


def _slowest(values: list[float]) -> list[float]:
    """Each value's largest over the ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _row(case, work, dtype, name, us, host, floors, correct, error) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.op, "case": case.name, "pass": case.direction, "dtype": dtype, "variant": name}
    numbers = "us us_iqr host_us floor_us floor_us_iqr ratio ratio_iqr rate".split()
    row |= dict.fromkeys(numbers) | {"floor": f"max({', '.join(work.floor)})", "unit": "TFLOP/s", "amount": work.flops}
    row |= {"eager_us": None, "extra_bytes": None, "graph": True, "autograd": True, "correct": correct, "error": error}
    row |= {"comparable": name not in (*work.floor, *work.notes), "note": work.notes.get(name, "")}
    if us is None:
        return row
    row["us"], row["us_iqr"] = median_and_iqr(us)
    row["floor_us"], row["floor_us_iqr"] = median_and_iqr(floors)
    row["ratio"], row["ratio_iqr"] = median_and_iqr([one / floor for one, floor in zip(us, floors, strict=True)])
    row["rate"] = work.flops / row["us"] / 1e6
    row["host_us"] = host
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
