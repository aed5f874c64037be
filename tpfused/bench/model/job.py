"""`tpfused bench model`: workers on all GPUs, or torchrun's; then the tables and the files."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch

from tpfused.bench.console import make_console
from tpfused.bench.model import megatron
from tpfused.bench.model.cases import OPERATIONS, SIZES, Case, Size, cases, degrees_of
from tpfused.bench.model.programs import PEERS
from tpfused.bench.model.worker import Plan, run
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
from tpfused.bench.results import Row, is_ours
from tpfused.cli.errors import UserError
from tpfused.workers import Worker, torchrun_worker

ROUNDS, QUICK_ROUNDS = 21, 5


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code: 1 where something was wrong, or ours failed."""
    device = "cpu" if options["size"] == "tiny" and not torch.cuda.is_available() else "cuda"
    worker = torchrun_worker(emit=lambda name, payload: None)
    check_options(options, ("bf16", "fp16"), worker)
    room = worker.local_world if worker else options["gpus"] or 2  # on a CPU, for as many as are wanted
    found = torch.cuda.device_count() if device == "cuda" else room
    world = worker.world if worker else options["gpus"] or found
    if options["list"] and not options["gpus"]:
        world = lcm(world or 1, *_numbers("tp", options["tp"]))  # as many as the degrees need
    size = _size(options)
    chosen = _cases(options, size, max(world, 1))
    if options["list"]:
        for case in chosen:
            print(f"{case.label}{'  (quick)' * case.quick}")
        return 0
    here = worker.local_world if worker else world
    check_gpus(1, world, here, found, "--size tiny runs on a CPU, and --list needs none")
    rounds, seed = rounds_and_seed(options, ROUNDS, QUICK_ROUNDS)
    layers = size.layers if options["layers"] is None else options["layers"]
    variants = _variants(options, device == "cuda")
    plan = Plan(device, options["dtype"], size, layers, tuple(chosen), variants, rounds, seed)
    if worker is not None and worker.rank != 0:
        run(plan, worker)
        return 0
    return _measure(plan, worker, world, options)


def is_bad(row: Row) -> bool:
    """Wrong, for then the others were not the same model; or ours, and not measured: what the exit code tells."""
    return row["correct"] is False or (is_ours(row) and row["us"] is None)


def _size(options: Mapping[str, Any]) -> Size:
    if options["size"] not in SIZES:
        raise UserError(f"unknown size {options['size']!r}: choose {', '.join(SIZES)}")
    return SIZES[options["size"]]


def _cases(options: Mapping[str, Any], size: Size, world: int) -> list[Case]:
    tps = _numbers("tp", options["tp"]) or [tp for tp in (1, 2, 4, 8) if world % tp == 0 == size.kv_heads % tp]
    for tp in tps:
        if world % tp:
            raise UserError(f"--tp {tp} does not divide {world} GPUs")
        if size.kv_heads % tp:
            raise UserError(f"--tp {tp} does not divide the model's {size.kv_heads} key-value heads")
    sequences = _numbers("sequence", options["sequence"]) or list(size.sequences)
    for tokens in sequences:
        if tokens % max(tps):
            raise UserError(f"--sequence {tokens} is not a multiple of --tp {max(tps)}, as torch's own layers need it")
    if options["layers"] is not None and not 1 <= options["layers"] <= size.whole:
        raise UserError(f"--layers must be from 1 to the model's {size.whole}, not {options['layers']}")
    degrees = degrees_of(tps, world)
    known = [op for op in OPERATIONS if op != "decode" or options["decode"]]
    return select(known, lambda op: cases(op, size, degrees, sequences), options)


def _numbers(option: str, given: str | None) -> list[int]:
    """``"1,2"`` -> [1, 2]; nothing -> []."""
    if given is None:
        return []
    try:
        found = [int(part) for part in given.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1 or len(set(found)) < len(found):
        raise UserError(f"--{option} takes different positive numbers with commas between, as in 1,2, not {given!r}")
    return found


def _variants(options: Mapping[str, Any], on_gpu: bool) -> tuple[str, ...]:
    peers = [] if options["no_peers"] else list(PEERS)
    if not on_gpu or not megatron.version():
        peers = [name for name in peers if name != "megatron"]  # which expects a GPU
    if not on_gpu:
        peers = [name for name in peers if name != "dtensor_compiled"]
    return ("ours", *peers, "ours_reference")


def _measure(plan: Plan, worker: Worker | None, world: int, options: Mapping[str, Any]) -> int:
    """Run the cases and report; returns the exit code. What is done is in the files even if the rest is interrupted."""
    console = make_console()
    card = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    meta = describe_run(card, world, options, plan.rounds, plan.seed)
    meta |= {"settings": settings(), "size": options["size"], "layers": plan.layers, "tp": options["tp"]}
    meta |= {"sequence": options["sequence"], "megatron": megatron.version(), "complete": False}
    console.say(f"{world} x {card}: {len(plan.cases)} cases of {plan.layers} layers, {plan.rounds} rounds each")
    rows: list[Row] = []
    with console.progress(len(plan.cases)) as progress:

        def on_event(name: str, payload: Any) -> None:
            if name == "start":
                progress.start(payload)
            else:
                label, found = payload
                rows.extend(found)
                progress.start(label)
                progress.done(found)
                keep(options, meta, rows)

        code = run_on_ranks("bench model", run, plan, worker, world, on_event)

    def draw() -> list[str]:
        from tpfused.bench.model.plot import plot  # which needs matplotlib

        return plot(meta, rows, options["plot"])

    return conclude(console, options, meta, rows, code, is_bad, draw)
