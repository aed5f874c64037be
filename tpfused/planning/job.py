"""`tpfused plan`: predicts every layout, from measured rates (`--check` is in `check.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tpfused.bench.comm import worker as comm
from tpfused.bench.comm.cases import CPU_MOST, QUICK, Case, blocks, split_groups
from tpfused.bench.comm.job import find_device, fits_of, rates_of
from tpfused.bench.console import make_console
from tpfused.bench.options import run_on_ranks
from tpfused.bench.results import write_json
from tpfused.cli.errors import UserError
from tpfused.planning.check import check
from tpfused.planning.communication import Fit
from tpfused.planning.layouts import DEGREES, Layout, Plan, Step, layouts, predict, why_none
from tpfused.planning.options import (
    USED,
    Machine,
    check_options,
    instead_of_a_file,
    machine_of,
    option,
    overridden,
    shape_of,
    step_of,
)
from tpfused.planning.report import Entry, counted, show_plans, tell_best, tell_rates
from tpfused.planning.shape import Shape
from tpfused.provenance import commit
from tpfused.workers import torchrun_worker

ROUNDS = 11


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code."""
    if torchrun_worker(emit=lambda name, payload: None) is not None:
        raise UserError("it starts its own workers: run it without torchrun, on one host")
    check_options(options)
    shape = shape_of(options)
    device, found = find_device(options["cpu"])
    return (check if options["check"] else _plan)(options, shape, device, found)


def _plan(options: Mapping[str, Any], shape: Shape, device: str, found: int) -> int:
    gpus = options["gpus"] or found
    step = step_of(options, shape, gpus)
    machine = machine_of(options, gpus)
    cpu = device == "cpu" if machine is None else machine.cpu
    chosen = [layout for layout in layouts(shape, step, gpus) if _wanted(layout, options)]
    if not chosen:
        asked = {name: options[name] for name in DEGREES if options[name]}
        told = "".join(f", --{name} {degree}" for name, degree in asked.items())
        why = "; ".join(why_none(shape, step, gpus, asked, "ranks" if cpu else "GPUs"))
        raise UserError(f"no layout of {counted(gpus, cpu)}{told}: {why}")
    console = make_console()
    if machine is None:
        machine = _measured(options, console, device, gpus, found, {layout.tp for layout in chosen})
        if isinstance(machine, int):
            return machine
    # Where nothing overlaps, the layers are on the plain path.
    step = replace(step, kernels=not cpu, overlap=step.overlap and machine.rates.hidden != 0)
    entries = sorted(
        (_entry(shape, step, layout, machine, options["checkpoint_activations"]) for layout in chosen),
        key=lambda entry: (not entry.fits, entry.plan.step_us),
    )
    told = f"{options['model'] or 'a model'} of {shape.parameters() / 1e9:,.2f} B parameters on {counted(gpus, cpu)}"
    together = f"{step.batch} sequences of {step.tokens} tokens a step, {options['dtype']}"
    show_plans(console, f"{told}, {together}", entries, step.batch * step.tokens, gpus, cpu)
    console.say(f"rates: {tell_rates(machine.rates)}; {machine.memory_bytes / 2**30:,.0f} GiB; from {machine.source}")
    _say_extrapolated(console, machine, chosen, gpus, cpu)
    unknown = machine.rates.unknown()
    if unknown:
        console.say(
            f"{machine.source} does not tell {', '.join(unknown)}: counted as nothing, which makes steps too short, "
            f"the more the fewer tokens they have. tpfused bench comm measures it"
        )
    try:
        if options["json"]:
            about = {"gpus": gpus, "commit": commit(), "source": machine.source, "memory_bytes": machine.memory_bytes}
            about |= {"rates": machine.rates.as_dict(), "shape": asdict(shape), "step": asdict(step)}
            write_json(options["json"], about, [entry.as_dict() for entry in entries])
            console.say(f"wrote {options['json']}")
    finally:  # what was found is told also where it cannot be written
        console.say(f"\n{tell_best(entries, machine.memory_bytes, cpu)}")
    return 0


def _wanted(layout: Layout, options: Mapping[str, Any]) -> bool:
    return all(options[name] in (None, getattr(layout, name)) for name in DEGREES)


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


def _measured(
    options: Mapping[str, Any], console, device: str, gpus: int, found: int, tensor_parallel: set[int]
) -> Machine | int:
    """What a short run finds, for layouts of these degrees of tensor parallelism; or its exit code, if it fails."""
    there = found if device == "cuda" else 0
    if options["gpus"] and not options["cpu"] and gpus > there:
        *first, last = map(option, instead_of_a_file(gpus))
        raise UserError(
            f"{counted(gpus)} cannot be measured here, where torch finds {there or 'none'}: give --from FILE, written "
            f"by tpfused bench comm --json on a machine with GPUs, or the rates by {', '.join(first)} and {last}"
        )
    degrees = [degree for degree in range(2, gpus + 1) if gpus % degree == 0]
    sizes = [size for size in QUICK if device == "cuda" or size <= CPU_MOST]
    argument = {
        "cases": [Case(op, size, True) for op in USED for size in sizes] if degrees else [],
        "groups": {f"groups of {degree}": blocks(gpus, degree) for degree in degrees},
        "split": split_groups(gpus, tensor_parallel),
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
    found_rates, facts = rates_of(rates, fits)
    source = f"a short run on {gpus} x {card}"
    return overridden(Machine(found_rates, facts["memory_bytes"], source, device == "cpu", gpus), options)


def _say_extrapolated(console, machine: Machine, chosen: list[Layout], gpus: int, cpu: bool) -> None:
    """Where communication is priced by other links than a step would use."""
    if not machine.measured:
        if gpus > 1:
            console.say("communication is priced by --bus-gbps in groups of any size, within a host and across hosts")
        return
    if gpus > machine.measured:
        console.say(
            f"communication is priced as if all {counted(gpus, cpu)} shared the links of the {machine.measured} that "
            f"were measured. Unless those were on several hosts, no link between hosts was measured: real steps across "
            f"hosts are slower"
        )
    known = {each.ranks for each in machine.rates.fits}
    guessed = {layout.tp for layout in chosen} | {layout.dp for layout in chosen}
    guessed -= known | {1}
    if guessed:
        console.say(
            f"groups of {', '.join(map(str, sorted(guessed)))} were not measured: their collectives are taken to have "
            f"the bus bandwidth of groups of {', '.join(map(str, sorted(known)))}"
        )
