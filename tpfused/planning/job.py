"""`tpfused plan`: predicts every layout, from measured rates; with --check, predicts blocks and runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tpfused.bench.comm import worker as comm
from tpfused.bench.comm.cases import CPU_MOST, QUICK, SIZES, Case, blocks
from tpfused.bench.comm.job import find_device, fits_of
from tpfused.bench.comm.rates import pass_rates
from tpfused.bench.console import make_console
from tpfused.bench.options import run_on_ranks, settings
from tpfused.bench.results import write_json
from tpfused.cli.errors import UserError
from tpfused.planning.block import Setting, block
from tpfused.planning.communication import Fit
from tpfused.planning.layouts import Layout, Plan, Step, layouts, predict
from tpfused.planning.options import (
    USED,
    Machine,
    check_options,
    check_small,
    machine_of,
    overridden,
    shape_of,
    step_of,
)
from tpfused.planning.rates import Rates
from tpfused.planning.report import Entry, checked_row, show_checked, show_plans
from tpfused.planning.shape import Shape
from tpfused.planning.time import Time, forward_and_backward
from tpfused.planning.work import Pass
from tpfused.planning.worker import BLOCKS, check
from tpfused.provenance import commit, measured_on
from tpfused.workers import torchrun_worker

ROUNDS = 11


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code."""
    if torchrun_worker(emit=lambda name, payload: None) is not None:
        raise UserError("it starts its own workers: run it without torchrun, on one host")
    check_options(options)
    shape = shape_of(options)
    device, found = find_device(options["cpu"])
    return (_check if options["check"] else _plan)(options, shape, device, found)


# Predict every layout.


def _plan(options: Mapping[str, Any], shape: Shape, device: str, found: int) -> int:
    gpus = options["gpus"] or found
    step = step_of(options, shape, gpus)
    chosen = [layout for layout in layouts(shape, step, gpus) if _wanted(layout, options)]
    if not chosen:
        asked = "".join(f", --{name} {options[name]}" for name in ("tp", "dp", "pp") if options[name])
        raise UserError(
            f"no layout of {_counted(gpus)}{asked}: tp must divide {shape.heads} heads, pp be at most {shape.layers} "
            f"layers, and the batch of {step.batch} be whole micro-batches of {step.micro_batch} on each dp rank"
        )
    console = make_console()
    machine = machine_of(options, gpus)
    if machine is None:
        machine = _measured(options, console, device, gpus, found)
        if isinstance(machine, int):
            return machine
    entries = sorted(
        (_entry(shape, step, layout, machine, options["checkpoint_activations"]) for layout in chosen),
        key=lambda entry: (not entry.fits, entry.plan.step_us),
    )
    told = f"{options['model'] or 'a model'} of {shape.parameters() / 1e9:,.2f} B parameters on {_counted(gpus)}"
    together = f"{step.batch} sequences of {step.tokens} tokens a step, {options['dtype']}"
    show_plans(console, f"{told}, {together}", entries, step.batch * step.tokens, gpus)
    console.say(f"rates: {_tell(machine.rates)}; {machine.memory_bytes / 2**30:,.0f} GiB; from {machine.source}")
    _say_extrapolated(console, machine.rates, chosen)
    if options["json"]:
        about = {"gpus": gpus, "commit": commit(), "source": machine.source, "memory_bytes": machine.memory_bytes}
        about |= {"rates": machine.rates.as_dict(), "shape": asdict(shape), "step": asdict(step)}
        write_json(options["json"], about, [entry.as_dict() for entry in entries])
        console.say(f"wrote {options['json']}")
    return 0


def _counted(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus > 1)}"


def _wanted(layout: Layout, options: Mapping[str, Any]) -> bool:
    return all(options[name] in (None, getattr(layout, name)) for name in ("tp", "dp", "pp"))


def _entry(shape: Shape, step: Step, layout: Layout, machine: Machine, recomputed: bool | None) -> Entry:
    """The layout as it is or, where only that fits or it was asked for, with blocks computed again."""

    def plan_of(again: bool, sequence_parallel: bool = step.sequence_parallel) -> Plan:
        return predict(
            shape, replace(step, checkpointed=again, sequence_parallel=sequence_parallel), layout, machine.rates
        )

    for again in (False, True) if recomputed is None else (recomputed,):
        plan = plan_of(again)
        fits = plan.memory.fits(machine.memory_bytes)
        if fits:
            break
    activations = {
        f"{what}{how}": plan_of(again, split).memory.activations
        for what, again in (("kept", False), ("recomputed", True))
        for how, split in (("", False), (", SP", True))
    }
    return Entry(plan, again, fits, activations)


def _measured(options: Mapping[str, Any], console, device: str, gpus: int, found: int) -> Machine | int:
    """What a short run finds; or its exit code, if it fails."""
    if device == "cuda" and gpus > found:
        raise UserError(f"{_counted(gpus)} cannot be measured here, where torch finds {found}: give --from FILE")
    degrees = [degree for degree in range(2, gpus + 1) if gpus % degree == 0]
    sizes = [size for size in QUICK if device == "cuda" or size <= CPU_MOST]
    argument = {
        "cases": [Case(op, size, True) for op in USED for size in sizes] if degrees else [],
        "groups": {f"groups of {degree}": blocks(gpus, degree) for degree in degrees},
        "device": device,
        "dtype": options["dtype"],
        "rounds": options["rounds"] or ROUNDS,
        "seed": 0,
    }
    fits: list[Fit] = []
    rates: dict[str, Any] = {}
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    console.say(f"measuring {gpus} x {card}")

    def on_event(name: str, payload: Any) -> None:
        if name == "rows":
            fits.extend(fits_of(payload))
        elif name == "rates":
            rates.update(payload)

    code = run_on_ranks("plan", comm.run, argument, None, gpus, on_event)
    if code:
        return code
    memory = rates.pop("memory_bytes")
    measured = Machine(Rates(**rates, fits=tuple(fits)), memory, f"a short run on {gpus} x {card}")
    return overridden(measured, options)


def _tell(rates: Rates) -> str:
    passes = " and ".join(f"{rate:,.3g} ({kind})" for kind, rate in rates.pass_rates.items())
    attention = f"{rates.attention_tflops:,.3g} and {rates.attention_backward_tflops:,.3g} (backward)"
    return (
        f"matmul {rates.matmul_tflops:,.3g} TFLOP/s, attention {attention}, memory {rates.memory_gbps:,.0f} GB/s, "
        f"passes {passes} billion elements a second"
    )


def _say_extrapolated(console, rates: Rates, chosen: list[Layout]) -> None:
    known = {each.ranks for each in rates.fits}
    guessed = {layout.tp for layout in chosen} | {layout.dp for layout in chosen}
    guessed -= known | {1}
    if guessed:
        console.say(
            f"groups of {', '.join(map(str, sorted(guessed)))} were not measured: their collectives are taken to have "
            f"the bus bandwidth of groups of {', '.join(map(str, sorted(known)))}"
        )


# Predict blocks, and run them.


def _check(options: Mapping[str, Any], shape: Shape, device: str, found: int) -> int:
    world = options["gpus"] or found
    if device == "cuda" and world > found:
        raise UserError(f"--gpus {world}: torch finds {found} here")
    if device == "cpu" and not options["cpu"]:
        raise UserError("--check runs blocks on GPUs, and torch finds none here; --cpu tries it, with a small shape")
    step = replace(step_of(options, shape, world), kernels=device == "cuda")
    degrees = [tp for tp in range(1, world + 1) if world % tp == 0 and options["tp"] in (None, tp) and shape.splits(tp)]
    if not degrees:
        raise UserError(f"{world} ranks have no tp of {options['tp'] or 'any degree'} that splits {shape.heads} heads")
    layers = options["layers"] or 1
    if device == "cpu":
        check_small(shape, step, layers)
    largest = step.tokens * step.micro_batch * shape.hidden * step.bytes
    sizes = [size for size in SIZES if size < max(16 * largest, 2**16)]  # several, or nothing is fitted
    argument = {
        "shape": shape,
        "layers": layers,
        "settings": [step.setting(tp) for tp in degrees],
        "cases": [Case(op, size, True) for op in USED[:3] for size in sizes],
        "device": device,
        "dtype": options["dtype"],
        "rounds": options["rounds"] or ROUNDS,
        "seed": 0,
    }
    console = make_console()
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    degrees_told = ", ".join(str(setting.tp) for setting in argument["settings"])
    console.say(f"{world} x {card}: forward and backward of {layers} block{'s' * (layers > 1)} at tp {degrees_told}")
    fits: list[Fit] = []
    rows: list[dict[str, Any]] = []

    def on_event(name: str, payload: Any) -> None:
        if name == "start":
            console.say(f"  {payload}")
        elif name == "rows":
            fits.extend(fits_of(payload))
        else:
            setting, us, overlapped = payload
            predicted = _predicted(shape, replace(setting, overlap=overlapped), us, fits) * layers
            alone = {part.label: round(time, 2) for part, time in us.items() if part != BLOCKS}
            rows.append(checked_row(setting.tp, predicted, us[BLOCKS], overlapped) | {"alone_us": alone})

    code = run_on_ranks("plan", check, argument, None, world, on_event)
    tolerance = options["tolerance"]
    if rows:
        show_checked(console, f"forward and backward, {step.tokens} tokens, ms", rows, tolerance)
    off = [row for row in rows if abs(row["error"]) * 100 > tolerance]
    for row in off:
        console.say(f"tp {row['tp']}: the prediction is off by {row['error']:+.1%}, beyond {tolerance:g} %")
    if options["json"]:
        measured = measured_on(card, world)
        meta = {"card": card, "gpus": world, **measured["versions"], "commit": measured["commit"]}
        meta |= {"date": measured["date"], "settings": settings(), "complete": code == 0, "shape": asdict(shape)}
        meta |= {"step": asdict(step), "layers": layers, "fits": [asdict(each) for each in fits]}
        write_json(options["json"], meta, rows)
        console.say(f"wrote {options['json']}")
    return code or int(bool(off))


def _predicted(shape: Shape, setting: Setting, us: Mapping[Any, float], fits: list[Fit]) -> Time:
    """A block's time, from those of its parts."""
    measured = {part: time for part, time in us.items() if not isinstance(part, Pass) and part != BLOCKS}
    # Of the matmuls and of attention all are measured: there is no need of a rate.
    rates = Rates(math.inf, math.inf, math.inf, **pass_rates(us), fits=tuple(fits), measured=measured)
    forward, backward = forward_and_backward(block(shape, setting), rates, setting.tp, setting.overlap)
    return forward + backward
