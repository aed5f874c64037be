"""`tpfused bench overlap`: workers on all GPUs, or torchrun's; then the table and the files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tpfused.bench.console import make_console
from tpfused.bench.options import check_options, describe_run, report, rounds_and_seed, select, write
from tpfused.bench.overlap.cases import OPERATIONS, Case, cases
from tpfused.bench.overlap.worker import run
from tpfused.bench.results import Row, is_ours
from tpfused.cli.errors import UserError
from tpfused.training.launch import Worker, WorkerFailed, run_workers, torchrun_worker

ROUNDS, QUICK_ROUNDS = 21, 5
# What changes the numbers and is set outside. The first and the last forbid multicast through NVSwitch.
SETTINGS = (
    "NCCL_NVLS_ENABLE NCCL_ALGO NCCL_PROTO CUDA_DEVICE_MAX_CONNECTIONS TPFUSED_TIER TORCH_SYMM_MEM_DISABLE_MULTICAST"
).split()


def execute(options: Mapping[str, Any], device: str = "cuda") -> int:
    """Do what the command line asks for; returns the exit code: 1 where something of ours was wrong."""
    chosen = select(OPERATIONS, lambda op: cases(op, options["sweep"]), options)
    if options["list"]:
        for case in chosen:
            print(f"{case.label}: {case.shape}{'  (quick)' * case.quick}")
        return 0
    worker = torchrun_worker(emit=lambda name, payload: None)
    found = torch.cuda.device_count() if device == "cuda" else 2
    world = worker.world if worker else options["gpus"] or found
    _check(options, world, worker.local_world if worker else world, found)
    rounds, seed = rounds_and_seed(options, ROUNDS, QUICK_ROUNDS)
    argument = {"cases": chosen, "device": device, "dtype": options["dtype"], "rounds": rounds, "seed": seed}
    if worker is not None and worker.rank != 0:
        run(argument, worker)
        return 0
    return _measure(argument, worker, world, options)


def is_bad(row: Row) -> bool:
    """Ours, and wrong or not measured: what the exit code tells."""
    return is_ours(row) and (row["correct"] is False or row["us"] is None)


def _check(options: Mapping[str, Any], world: int, local_world: int, found: int) -> None:
    check_options(options, ("bf16", "fp16"))
    if world < 2 or local_world > found:
        raise UserError(f"this needs at least two GPUs, and {world} were asked for where torch finds {found} here")


def _measure(argument: dict[str, Any], worker: Worker | None, world: int, options: Mapping[str, Any]) -> int:
    """Run the cases and report; returns the exit code. What is done is in the files even if the rest is interrupted."""
    console = make_console()
    card = torch.cuda.get_device_name() if argument["device"] == "cuda" else "CPU"
    meta = describe_run(card, world, options, argument["rounds"], argument["seed"])
    meta |= {"settings": {name: os.environ[name] for name in SETTINGS if name in os.environ}, "complete": False}
    chosen: list[Case] = argument["cases"]
    console.say(f"{world} x {card}: {len(chosen)} cases, {argument['rounds']} rounds each")
    rows: list[Row] = []
    code = 0
    with console.progress(len(chosen)) as progress:

        def on_event(name: str, payload: Any) -> None:
            if name == "start":
                progress.start(payload)
            else:
                rows.extend(payload)
                progress.done(payload)
                write(options, meta, rows)

        try:
            if worker is None:
                run_workers(run, argument, world, on_event)
            else:
                run(argument, replace(worker, emit=on_event))
            meta["complete"] = True
        except WorkerFailed as failure:
            print(f"tpfused bench overlap: {failure}\n{failure.details}", file=sys.stderr)
            code = failure.code
        except KeyboardInterrupt:
            print("tpfused bench overlap: interrupted", file=sys.stderr)
            code = 130
    write(options, meta, rows)
    bad = list(filter(is_bad, rows))
    report(console, options, rows, bad)
    if options["plot"] and rows:
        from tpfused.bench.overlap.plot import plot

        for path in plot(meta, rows, options["plot"]):
            console.say(f"wrote {path}")
    return code or int(bool(bad))
