"""`tpfused plan --check`: predicts blocks as a plan does, and from their own parts, and runs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from tpfused.bench.comm.cases import SIZES, Case, split_groups
from tpfused.bench.comm.job import fits_of, rates_of
from tpfused.bench.comm.rates import pass_rates
from tpfused.bench.console import make_console
from tpfused.bench.options import run_on_ranks, settings
from tpfused.bench.results import write_json
from tpfused.cli.errors import UserError
from tpfused.planning import worker
from tpfused.planning.block import Setting, block
from tpfused.planning.communication import Fit
from tpfused.planning.layouts import Step
from tpfused.planning.options import USED_BY_LAYERS, check_small, step_of
from tpfused.planning.rates import Rates
from tpfused.planning.report import checked_row, is_off, show_checked, tell_rates
from tpfused.planning.shape import Shape
from tpfused.planning.time import Time, forward_and_backward
from tpfused.planning.work import Pass
from tpfused.planning.worker import BLOCKS
from tpfused.provenance import measured_on

ROUNDS = 21
EXPLAINED = """
by rates: what tpfused plan predicts, from rates measured here as tpfused bench comm does; this must be within {}.
by parts: the block's own matmuls and attention, each timed alone; where an error of the other comes from."""


def check(options: Mapping[str, Any], shape: Shape, device: str, found: int) -> int:
    """Do what the command line asks for; returns the exit code: 1 where the prediction by rates is too far off."""
    world = options["gpus"] or found
    if device == "cuda" and world > found:
        raise UserError(f"--gpus {world}: torch finds {found} here")
    if device == "cpu" and not options["cpu"]:
        raise UserError("--check runs blocks on GPUs, and torch finds none here; --cpu tries it, with a small shape")
    step = replace(step_of(options, shape, world), kernels=device == "cuda")
    degrees = [tp for tp in range(1, world + 1) if world % tp == 0 and options["tp"] in (None, tp) and shape.splits(tp)]
    if not degrees:
        tp = options["tp"]  # for 1 always does
        told = [f"tp {tp} does not divide {world} ranks"] * bool(world % tp) + [shape.why_unsplit(tp)]
        raise UserError(f"no block at --tp {tp}: {'; '.join(filter(None, told))}")
    layers = options["layers"] or 1
    if device == "cpu":
        check_small(shape, step, layers)
    argument = _argument(options, shape, step, world, degrees, layers) | {"device": device}
    console = make_console()
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    degrees_told = ", ".join(map(str, degrees))
    console.say(f"{world} x {card}: forward and backward of {layers} block{'s' * (layers > 1)} at tp {degrees_told}")
    fits: list[Fit] = []
    known: dict[str, Any] = {}  # of the machine
    rows: list[dict[str, Any]] = []

    def on_event(name: str, payload: Any) -> None:
        if name == "start":
            console.say(f"  {payload}")
        elif name == "rows":
            fits.extend(fits_of(payload))
        elif name == "rates":
            known.update(payload)
        else:
            setting, us, iqr, overlapped = payload
            setting = replace(setting, overlap=overlapped)
            predicted = [by_rates(shape, setting, rates_of(known, fits)[0]), by_parts(shape, setting, us, fits)]
            row = checked_row(setting.tp, *(time * layers for time in predicted), us[BLOCKS], iqr, overlapped)
            rows.append(row | {"alone_us": {part.label: round(us[part], 2) for part in us if part != BLOCKS}})

    code = run_on_ranks("plan", worker.check, argument, None, world, on_event)
    tolerance = options["tolerance"]
    if rows:
        title = f"forward and backward, {step.tokens} tokens, {options['dtype']}, {argument['rounds']} rounds"
        show_checked(console, title, rows, tolerance)
        console.say(EXPLAINED.format(f"{tolerance:g} %"))
        console.say(f"rates: {tell_rates(rates_of(known, fits)[0])}")
    off = [row for row in rows if is_off(row, tolerance)]
    for row in off:
        error = row["by_rates"]["error"]
        console.say(f"tp {row['tp']}: the prediction by rates is off by {error:+.1%}, beyond {tolerance:g} %")
    if options["json"]:
        meta = _describe(card, world) | {"complete": code == 0, "shape": asdict(shape), "step": asdict(step)}
        meta |= {name: argument[name] for name in ("layers", "dtype", "rounds", "device")}
        if known:
            rates, facts = rates_of(known, fits)
            meta |= facts | {"rates": rates.as_dict()}
        write_json(options["json"], meta, rows)
        console.say(f"wrote {options['json']}")
    return code or int(bool(off))


def _describe(card: str, world: int) -> dict[str, Any]:
    """What it ran on."""
    measured = measured_on(card, world)
    known = {"card": card, "gpus": world, **measured["versions"], "commit": measured["commit"]}
    return known | {"date": measured["date"], "settings": settings()}


def _argument(
    options: Mapping[str, Any], shape: Shape, step: Step, world: int, degrees: list[int], layers: int
) -> dict[str, Any]:
    """What the workers are told, but for their device."""
    largest = step.tokens * step.micro_batch * shape.hidden * step.bytes
    sizes = [size for size in SIZES if size < max(16 * largest, 2**16)]  # several, or nothing is fitted
    return {
        "shape": shape,
        "layers": layers,
        "settings": [step.setting(tp) for tp in degrees],
        "split": split_groups(world, degrees),
        "cases": [Case(op, size, True) for op in USED_BY_LAYERS for size in sizes],
        "dtype": options["dtype"],
        "rounds": options["rounds"] or ROUNDS,
        "seed": 0,
    }


def by_rates(shape: Shape, setting: Setting, rates: Rates) -> Time:
    """A block's time as `tpfused plan` predicts it."""
    forward, backward = forward_and_backward(block(shape, setting), rates, setting.tp, setting.overlap)
    return forward + backward


def by_parts(shape: Shape, setting: Setting, us: Mapping[Any, float], fits: list[Fit]) -> Time:
    """A block's time, from those of its parts: what its GPU does, and overlaps without loss."""
    measured = {part: time for part, time in us.items() if not isinstance(part, Pass) and part != BLOCKS}
    # Of the matmuls and of attention all are measured: there is no need of a rate.
    rates = Rates(math.inf, math.inf, math.inf, **pass_rates(us), fits=tuple(fits), measured=measured)
    return by_rates(shape, setting, rates)
