"""`tpfused bench overlap`: workers on all GPUs, or torchrun's; then the table and the files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from tpfused.bench.console import make_console
from tpfused.bench.outputs import check_options, write
from tpfused.bench.overlap.cases import OPERATIONS, QUICK, Case, all_cases
from tpfused.bench.overlap.worker import run
from tpfused.cli.errors import UserError
from tpfused.provenance import measured_on
from tpfused.training.launch import Worker, WorkerFailed, run_workers, torchrun_worker

ROUNDS, QUICK_ROUNDS = 21, 5


def execute(options: Mapping[str, Any], device: str = "cuda") -> int:
    """Do what the command line asks for; returns the exit code: 1 where something was wrong."""
    cases = select(options)
    if options["list"]:
        for case in cases:
            print(f"{case.label}: M{case.m} K{case.k} N{case.n}")
        return 0
    worker = torchrun_worker(emit=lambda name, payload: None)
    world = worker.world if worker else options["gpus"] or (torch.cuda.device_count() if device == "cuda" else 2)
    _check(options, world, device)
    rounds = options["rounds"] or (QUICK_ROUNDS if options["quick"] else ROUNDS)
    seed = torch.seed() % 2**31 if options["seed"] is None else options["seed"]
    argument = {"cases": cases, "device": device, "dtype": options["dtype"], "rounds": rounds, "seed": seed}
    if worker is not None and worker.rank != 0:
        run(argument, worker)
        return 0
    return _report(argument, worker, world, options)


def select(options: Mapping[str, Any]) -> list[Case]:
    operations = options["op"] or OPERATIONS
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown:
        raise UserError(f"unknown operation {unknown[0]!r}: choose {', '.join(OPERATIONS)}")
    cases = [case for case in all_cases(options["sweep"]) if case.op in operations]
    if options["quick"]:
        cases = [case for case in cases if case.name in QUICK]
    if options["case"]:
        cases = [case for case in cases if options["case"] in case.name]
        if not cases:
            quick = "quick " if options["quick"] else ""
            raise UserError(f"no {quick}case has {options['case']!r} in its name: --list shows them")
    return cases


def _check(options: Mapping[str, Any], world: int, device: str) -> None:
    check_options(options)
    if options["dtype"] not in ("bf16", "fp16"):
        raise UserError(f"unknown dtype {options['dtype']!r}: choose bf16 or fp16")
    if device == "cuda" and (world < 2 or world > torch.cuda.device_count()):
        found = torch.cuda.device_count()
        raise UserError(f"this needs at least two GPUs, and {world} were asked for where torch finds {found} here")


def _report(argument: dict[str, Any], worker: Worker | None, world: int, options: Mapping[str, Any]) -> int:
    console = make_console()
    meta = _describe(argument, world)
    console.say(f"{world} x {meta['card']}: {len(argument['cases'])} cases, {argument['rounds']} rounds each")
    rows: list[dict[str, Any]] = []
    code = 0
    with console.progress(len(argument["cases"])) as progress:

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
                run(argument, Worker(**{**vars(worker), "emit": on_event}))
            meta["complete"] = True
        except WorkerFailed as failure:
            print(f"tpfused bench overlap: {failure}\n{failure.details}", file=sys.stderr)
            code = failure.code
        except KeyboardInterrupt:
            print("tpfused bench overlap: interrupted", file=sys.stderr)
            code = 130
    write(options, meta, rows)
    for name in dict.fromkeys(row["op"] for row in rows):
        console.table(f"{name}, {argument['dtype']}", [row for row in rows if row["op"] == name])
    if options["plot"] and rows:
        from tpfused.bench.plot import plot

        for path in plot(meta, rows, options["plot"], "overlap"):
            console.say(f"wrote {path}")
    wrong = any(row["correct"] is False or (row["error"] and row["variant"].startswith("ours")) for row in rows)
    return code or int(wrong)


def _describe(argument: dict[str, Any], world: int) -> dict[str, Any]:
    card = torch.cuda.get_device_name() if argument["device"] == "cuda" else "CPU"
    found = measured_on(card, world)
    return {
        "card": card,
        "gpus": world,
        **found["versions"],
        "commit": found["commit"],
        "date": found["date"],
        "rounds": argument["rounds"],
        "seed": argument["seed"],
        "complete": False,
    }
