"""What the command line of `tpfused plan` asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpfused.cli.errors import UserError
from tpfused.cli.outputs import check_named, check_writable
from tpfused.planning.communication import OPERATIONS, Fit, bus_factor
from tpfused.planning.layouts import Step
from tpfused.planning.rates import Rates, lacking, missing_of
from tpfused.planning.shape import BYTES, PRESETS, SEQUENCE, Shape
from tpfused.planning.work import JOINED, STRIDED

ELEMENT_BYTES = 8  # that a copy moves while a pass does one element that is not beside the last
USED_BY_LAYERS = ("all_reduce", "all_gather", "reduce_scatter")
USED = (*USED_BY_LAYERS, "broadcast")  # and from stage to stage
SPEEDS = ("tflops", "memory_gbps", "bus_gbps")  # which together do for a file
# What says of a machine or a layout what --check finds out or does not look at.
NOT_CHECKED = ("from", *SPEEDS, "attention_tflops", "latency_us", "memory_gib", "dp", "pp")
CPU_NUMBERS = 2**25  # in the weights and the features of what --check runs on a CPU: some GiB, and minutes


@dataclass(frozen=True)
class Machine:
    """Its rates, the memory of a GPU, and where these numbers come from. `cpu`: it has none, and its ranks are
    processes. `measured`: how many ranks' links the collectives were measured on; 0: none, their speed was given."""

    rates: Rates
    memory_bytes: float
    source: str
    cpu: bool = False
    measured: int = 0


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is out of its range, before anything is measured."""
    for name in ("gpus", "tp", "dp", "pp", "sequence", "batch", "micro_batch", "layers", "rounds"):
        if options[name] is not None and options[name] < 1:
            raise UserError(f"{option(name)} must be at least 1, not {options[name]}")
    for name in (*SPEEDS, "attention_tflops", "latency_us", "memory_gib", "tolerance"):
        value = options[name]
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{option(name)} must be above 0, not {value:g}")
    if options["latency_us"] is not None and options["bus_gbps"] is None:
        raise UserError("--latency-us goes with --bus-gbps")
    unused = [option(name) for name in NOT_CHECKED if options["check"] and options[name] is not None]
    if unused:
        raise UserError(f"--check measures blocks here, and takes no {', '.join(unused)}")
    if options["dtype"] not in BYTES:
        raise UserError(f"unknown dtype {options['dtype']!r}: choose {', '.join(BYTES)}")
    if options["json"] is not None:
        check_writable("json", options["json"])
    check_named("from", options["from"])


def check_small(shape: Shape, step: Step, layers: int) -> None:
    """Refuse blocks that are too large to be run on a CPU."""
    parameters, tokens, features = layers * shape.block_parameters(), step.tokens * step.micro_batch, layers * shape.ffn
    if parameters + tokens * features > CPU_NUMBERS:
        raise UserError(
            f"--check on a CPU is for small shapes: {parameters:,} parameters and {tokens:,} tokens of {features:,} "
            f"features are more than {CPU_NUMBERS:,} numbers"
        )


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def instead_of_a_file(gpus: int) -> list[str]:
    """The options that together do for --from."""
    return ["tflops", "memory_gbps", "memory_gib"] + ["bus_gbps"] * (gpus > 1)


def shape_of(options: Mapping[str, Any]) -> Shape:
    """The preset of --model with what else is given, or a shape of its own.

    Raises:
        UserError: sizes that are missing, or make no model.
    """
    name = options["model"]
    if name is not None and name not in PRESETS:
        raise UserError(f"unknown model {name!r}: choose {', '.join(PRESETS)}, or give the sizes")
    known = {field.name: options[field.name] for field in fields(Shape) if options.get(field.name) is not None}
    try:
        if name is not None:
            return replace(PRESETS[name], **known)
        missing = [each for each in ("hidden", "ffn", "layers", "heads", "vocab") if each not in known]
        if missing:
            raise UserError(f"give --model ({', '.join(PRESETS)}), or --{', --'.join(missing)} as well")
        positions = (options["sequence"] or 0) if known.get("style") == "gpt" else 0
        return Shape(**{"kv_heads": known["heads"], "positions": positions} | known)
    except ValueError as error:
        raise UserError(str(error)) from error


def step_of(options: Mapping[str, Any], shape: Shape, gpus: int) -> Step:
    """The step, its blocks not computed again."""
    tokens = options["sequence"] or SEQUENCE.get(options["model"])
    if tokens is None:
        raise UserError("give --sequence, the tokens of a sequence")
    if shape.positions and tokens > shape.positions:
        raise UserError(f"--sequence {tokens} is more than the model's {shape.positions} positions")
    return Step(
        batch=options["batch"] or gpus * options["micro_batch"],
        micro_batch=options["micro_batch"],
        tokens=tokens,
        bytes=BYTES[options["dtype"]],
        sequence_parallel=options["sequence_parallel"],
        checkpointed=False,
        overlap=options["overlap"],
    )


def machine_of(options: Mapping[str, Any], gpus: int) -> Machine | None:
    """What --from and the options say of the machine; None where they say too little, and it must be measured.

    Raises:
        UserError: a file that cannot be read, or is not of `tpfused bench comm`.
    """
    machine = None if options["from"] is None else _from_file(options["from"], options["dtype"])
    if machine is None:
        if all(options[name] is None for name in SPEEDS):
            return None
        missing = [option(name) for name in instead_of_a_file(gpus) if options[name] is None]
        if missing:
            raise UserError(f"give {', '.join(missing)} as well, or --from FILE")
        speed, gbps = options["tflops"], options["memory_gbps"]
        rates = Rates(speed, speed / 2, speed / 2, gbps, {})
        machine = Machine(rates, 0.0, "the command line")
    machine = overridden(machine, options)
    unknown = [op for op in USED if op not in {each.op for each in machine.rates.fits}]
    if gpus > 1 and unknown:
        raise UserError(f"{machine.source} says nothing of {', '.join(unknown)}, which tpfused bench comm measures")
    return machine


def overridden(machine: Machine, options: Mapping[str, Any]) -> Machine:
    """With the options' numbers in the place of its own."""
    rates, memory = machine.rates, machine.memory_bytes
    if options["tflops"] is not None:
        rates = replace(rates, matmul_tflops=options["tflops"])
    if options["attention_tflops"] is not None:
        speed = options["attention_tflops"]
        rates = replace(rates, attention_tflops=speed, attention_backward_tflops=speed)
    if options["memory_gbps"] is not None:
        gbps = options["memory_gbps"]
        rates = replace(rates, memory_gbps=gbps, pass_rates=dict.fromkeys((STRIDED, JOINED), gbps / ELEMENT_BYTES))
    if options["bus_gbps"] is not None:
        latency = options["latency_us"] or 0.0
        fits = [Fit(op, "all", 2, latency, bus_factor(op, 2) / options["bus_gbps"] / 1e3) for op in OPERATIONS]
        machine = replace(machine, measured=0)
        rates = replace(rates, fits=tuple(fits))
    if options["memory_gib"] is not None:
        memory = options["memory_gib"] * 2**30
    return replace(machine, rates=rates, memory_bytes=memory)


def _from_file(path: str, dtype: str) -> Machine:
    try:
        meta = _meta_of(path)
        rates, memory = Rates.from_dict(meta["rates"]), meta["memory_bytes"]
        if not isinstance(memory, int | float) or not 0 < memory < math.inf:
            raise ValueError(f"meta.memory_bytes must be a number above 0, not {memory!r}")
        if not isinstance(meta["gpus"], int) or meta["gpus"] < 1:
            raise ValueError(f"meta.gpus must be how many there were, not {meta['gpus']!r}")
    except OSError as error:
        raise UserError(f"--from {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"--from {path} is not what a whole run of tpfused bench comm --json writes: {error}"
        ) from error
    if meta["dtype"] != dtype:
        raise UserError(f"--from {path} was measured in {meta['dtype']}, and --dtype is {dtype}")
    source = f"{path}: {meta['gpus']} x {meta['card']}, {dtype}"
    return Machine(rates, float(memory), source, meta.get("device") == "cpu", meta["gpus"])


def _meta_of(path: str) -> Mapping[str, Any]:
    """What the file says of its run, with all that is needed of it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no whole JSON; or it is, and things are missing: names them all.
    """
    try:
        found = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        told = (
            f"breaks off, or is wrong, at line {error.lineno}, column {error.colno}"
            if error.doc.strip()
            else "is empty"
        )
        raise ValueError(f"it {told}") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is no text") from error
    except RecursionError as error:
        raise ValueError("its tables or lists are nested too deeply") from error
    meta = found.get("meta") if isinstance(found, Mapping) else None
    missing = lacking("meta", meta, ("card", "gpus", "dtype", "memory_bytes", "rates"))
    if isinstance(meta, Mapping) and meta.get("rates") is not None:
        missing += [f"meta.{name}" for name in missing_of(meta["rates"])]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    return meta
