"""`tpfused bench overlap`: workers on all GPUs, or torchrun's; then the table and the files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tpfused.bench.console import make_console
from tpfused.bench.options import (
    check_gpus,
    check_options,
    conclude,
    describe_run,
    keep,
    rounds_and_seed,
    run_on_ranks,
    select,
    settings,
)
from tpfused.bench.overlap.cases import OPERATIONS, Case, cases
from tpfused.bench.overlap.worker import run
from tpfused.bench.results import Row, is_ours
from tpfused.workers import Worker, torchrun_worker

ROUNDS, QUICK_ROUNDS = 21, 5


def execute(options: Mapping[str, Any], device: str = "cuda") -> int:
    """Do what the command line asks for; returns the exit code: 1 where something of ours was wrong."""
    chosen = select(OPERATIONS, lambda op: cases(op, options["sweep"]), options)
    worker = torchrun_worker(emit=lambda name, payload: None)
    check_options(options, ("bf16", "fp16"), worker)
    if options["list"]:
        for case in chosen:
            print(f"{case.label}: {case.shape}{'  (quick)' * case.quick}")
        return 0
    found = torch.cuda.device_count() if device == "cuda" else 2
    world = worker.world if worker else options["gpus"] or found
    without = "--list needs none, and tpfused bench comm --cpu times collectives without"
    check_gpus(2, world, worker.local_world if worker else world, found, without)
    rounds, seed = rounds_and_seed(options, ROUNDS, QUICK_ROUNDS)
    argument = {"cases": chosen, "device": device, "dtype": options["dtype"], "rounds": rounds, "seed": seed}
    if worker is not None and worker.rank != 0:
        run(argument, worker)
        return 0
    return _measure(argument, worker, world, options)


def is_bad(row: Row) -> bool:
    """Ours, and wrong or not measured: what the exit code tells."""
    return is_ours(row) and (row["correct"] is False or row["us"] is None)


def _measure(argument: dict[str, Any], worker: Worker | None, world: int, options: Mapping[str, Any]) -> int:
    """Run the cases and report; returns the exit code. What is done is in the files even if the rest is interrupted."""
    console = make_console()
    card = torch.cuda.get_device_name() if argument["device"] == "cuda" else "CPU"
    meta = describe_run(card, world, options, argument["rounds"], argument["seed"])
    meta |= {"settings": settings(), "complete": False}
    chosen: list[Case] = argument["cases"]
    console.say(f"{world} x {card}: {len(chosen)} cases, {argument['rounds']} rounds each")
    rows: list[Row] = []
    with console.progress(len(chosen)) as progress:

        def on_event(name: str, payload: Any) -> None:
            if name == "start":
                progress.start(payload)
            else:
                rows.extend(payload)
                progress.done(payload)
                keep(options, meta, rows)

        code = run_on_ranks("bench overlap", run, argument, worker, world, on_event)

    def draw() -> list[str]:
        from tpfused.bench.overlap.plot import plot  # which needs matplotlib

        return plot(meta, rows, options["plot"])

    return conclude(console, options, meta, rows, code, is_bad, draw)
