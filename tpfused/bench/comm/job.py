"""`tpfused bench comm`: workers on all GPUs (or two on a CPU), or torchrun's; then fits, tables and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from tpfused.bench.comm.cases import CPU_MOST, SIZES, Case, Grid, cases, grid, parse_sizes, split_groups, told
from tpfused.bench.comm.worker import run
from tpfused.bench.console import make_console
from tpfused.bench.options import (
    check_options,
    conclude,
    describe_run,
    keep,
    rounds_and_seed,
    run_on_ranks,
    select,
    settings,
)
from tpfused.bench.results import Row
from tpfused.bench.runner import DTYPES
from tpfused.cli.errors import UserError
from tpfused.planning.communication import OPERATIONS, Fit, fit
from tpfused.planning.rates import Rates
from tpfused.planning.report import tell_rates
from tpfused.workers import Worker, torchrun_worker

ROUNDS, QUICK_ROUNDS = 21, 5
CPU_WORLD = 2


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code: 1 where a collective was wrong."""
    worker = torchrun_worker(emit=lambda name, payload: None)
    check_options(options, list(DTYPES), worker)
    for name in ("tp", "dp"):
        if options[name] is not None and options[name] < 1:
            raise UserError(f"--{name} must be at least 1, not {options[name]}")
    device, found = find_device(options["cpu"])
    given = options["sizes"] is not None
    sizes = parse_sizes(options["sizes"]) if given else SIZES
    # A list without a GPU is of what there is for one, unless it is the CPU that was asked about.
    if device == "cpu" and not given and (options["cpu"] or not options["list"]):
        sizes = [size for size in sizes if size <= CPU_MOST]
    # Sizes that are given are all wanted: --quick then only means fewer rounds.
    chosen = select(OPERATIONS, partial(cases, sizes=sizes), options | {"quick": options["quick"] and not given})
    if options["list"]:
        for case in chosen:
            print(f"{case.label}{'  (quick)' * case.quick}")
        return 0
    world = count_ranks(options, worker, device, found)
    if device == "cpu":
        _check_memory(max(case.size for case in chosen), worker.local_world if worker else world)
    ranks = grid(world, options["tp"], options["dp"])
    rounds, seed = rounds_and_seed(options, ROUNDS, QUICK_ROUNDS)
    argument = {"cases": chosen, "device": device, "dtype": options["dtype"], "rounds": rounds, "seed": seed}
    argument["groups"] = ranks.groups()
    argument["split"] = split_groups(world, [ranks.tp])
    if worker is not None and worker.rank != 0:
        run(argument, worker)
        return 0
    return _measure(argument, ranks, worker, options)


def find_device(cpu: bool) -> tuple[str, int]:
    """Where to run, and for how many ranks there is room on this host."""
    found = torch.cuda.device_count()
    return ("cpu", CPU_WORLD) if cpu or not found else ("cuda", found)


def count_ranks(options: Mapping[str, Any], worker: Worker | None, device: str, found: int) -> int:
    """How many ranks the options, or torchrun, ask for.

    Raises:
        UserError: too few, or more than there are GPUs.
    """
    world = worker.world if worker else _product(options["tp"], options["dp"]) or found
    if worker is None and options["gpus"] is not None:
        world = options["gpus"]
    if world < 2:
        raise UserError(f"this needs at least two ranks, not {world}")
    if device == "cuda" and (worker.local_world if worker else world) > found:
        raise UserError(f"{world} GPUs were asked for, and torch finds {found} here")
    return world


def _check_memory(size: int, ranks: int) -> None:
    """Refuse what a host would end processes for, and not only ours; a GPU just says that there is no more."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * size * ranks > memory:
        raise UserError(
            f"two buffers of {told(size)} on each of {ranks} ranks are more than this host's {memory / 2**30:,.1f} GiB"
        )


def _product(tp: int | None, dp: int | None) -> int | None:
    return tp * dp if tp and dp else None


def is_bad(row: Row) -> bool:
    return row["correct"] is False


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """The model of each collective on each kind of group of which two sizes or more were measured."""
    points: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault((row["op"], row["group"], row["ranks"]), []).append((row["amount"], row["us"]))
    return [fit(*key, measured) for key, measured in points.items() if len(measured) > 1]


def rates_of(measured: Mapping[str, Any], fits: Sequence[Fit]) -> tuple[Rates, dict[str, Any]]:
    """Of what `measure_rates` gave: the rates, and the facts beside them."""
    facts = {name: measured[name] for name in ("memory_bytes", "measured_us")}
    return Rates(**{name: value for name, value in measured.items() if name not in facts}, fits=tuple(fits)), facts


def put_beside(fits: Sequence[Fit], rows: Sequence[Row]) -> None:
    """What the fits say, into the rows."""
    known = {(each.op, each.group, each.ranks): each for each in fits}
    for row in rows:
        model = known.get((row["op"], row["group"], row["ranks"]))
        if model is not None:
            row["fit_us"] = round(model.us(row["amount"]), 3)
            row["fit_error"] = round(row["fit_us"] / row["us"] - 1, 4)


def tell(model: Fit) -> str:
    """A fit in a line."""
    where = f"{model.op}, {model.group}, {model.ranks} ranks"
    speed = ""
    if model.us_per_byte:
        speed = f" + size / {1 / model.us_per_byte / 1e3:,.2f} GB/s (bus {model.bus_gbps:,.2f})"
    off = f"off by {model.rms_error:.0%} (rms), {model.max_error:.0%} at most, of {model.points} sizes"
    return f"{where}: {model.alpha_us:,.1f} us{speed}; {off}"


def _measure(argument: dict[str, Any], ranks: Grid, worker: Worker | None, options: Mapping[str, Any]) -> int:
    """Run and report; returns the exit code. What is done is in the files even if the rest is interrupted."""
    console = make_console()
    card = torch.cuda.get_device_name() if argument["device"] == "cuda" else "CPU"
    meta = describe_run(card, ranks.world, options, argument["rounds"], argument["seed"])
    meta |= {"device": argument["device"], "settings": settings(), "complete": False, "grid": asdict(ranks)}
    meta |= {"dtype": argument["dtype"], "fits": [], "rates": None, "memory_bytes": None, "measured_us": None}
    chosen: list[Case] = argument["cases"]
    operations = dict.fromkeys(case.op for case in chosen)
    console.say(f"{ranks.world} x {card}: {len(chosen)} cases, {argument['rounds']} rounds each")
    rows: list[Row] = []
    fits: list[Fit] = []
    with console.progress(len(operations) + 1) as progress:  # and the rates

        def on_event(name: str, payload: Any) -> None:
            if name == "start":
                progress.start(payload)
            elif name == "rows":
                found = fits_of(payload)
                put_beside(found, payload)
                fits.extend(found)
                rows.extend(payload)
                meta["fits"] = [asdict(each) for each in fits]
                best = max(row["bus_gbps"] for row in payload)
                progress.done(
                    payload, f"{payload[0]['us']:,.1f} us for {payload[0]['case']}, bus {best:,.2f} GB/s at best"
                )
                keep(options, meta, rows)
            else:
                rates, facts = rates_of(payload, fits)
                meta.update(facts, rates=rates.as_dict())
                progress.done([], tell_rates(rates))

        code = run_on_ranks("bench comm", run, argument, worker, ranks.world, on_event)

    def draw() -> list[str]:
        from tpfused.bench.comm.plot import plot  # which needs matplotlib

        return plot(meta, rows, fits, options["plot"])

    notes = ["\ntime = latency + size / bandwidth, fitted:"] * bool(fits) + [f"  {tell(each)}" for each in fits]
    return conclude(console, options, meta, rows, code, is_bad, draw, notes)
