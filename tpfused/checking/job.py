"""`tpfused check`: starts a worker a GPU, shows a line a case, and tells at the end what was wrong."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

import torch

from tpfused.bench.results import write_json
from tpfused.checking.cases import Case, cases
from tpfused.checking.worker import work
from tpfused.cli.errors import UserError
from tpfused.cli.outputs import check_writable
from tpfused.provenance import measured_on
from tpfused.workers import WorkerFailed, run_workers, torchrun_worker

# Of the operations' cases; those by one that the GPUs do not have are skipped, so there is always the plain path, which
# "sequential" is as well: in layers it runs the kernels, and their cases have it.
TIERS = {"cuda": ("p2p", "nccl", "reference"), "cpu": ("reference",)}
CPU_WORLD = 2
TOLD = {True: "ok  ", False: "FAIL", None: "skip"}


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code."""
    if torchrun_worker(emit=lambda name, payload: None) is not None:
        raise UserError("it starts its own workers: run it without torchrun, on each host")
    found = torch.cuda.device_count()
    device = "cpu" if options["cpu"] or not found else "cuda"
    place = "ranks" if options["ranks"] is not None else "gpus"
    world = options[place]
    if world is None:
        world = found if device == "cuda" else CPU_WORLD
    beyond = device == "cuda" and place == "gpus" and world > found
    if world < 1 or beyond:
        here = f", and torch finds {found} here" if device == "cuda" else ""
        here += ": --ranks lets several ranks share one" if beyond else ""
        raise UserError(f"--{place} {world}: at least one is needed{here}")
    if options["json"] is not None:
        check_writable("json", options["json"])
    degrees = degrees_of(world)
    known = cases(degrees, TIERS[device], device == "cuda")
    wanted = options["case"].casefold()
    chosen = [case for case in known if case.label.casefold() == wanted]  # a line's name is no other's beginning
    chosen = chosen or [case for case in known if wanted in case.label.casefold()]
    if not chosen:
        raise UserError(f"no case has {options['case']!r} in its name: tpfused check --list shows them")
    if options["list"]:
        print(*(case.label for case in chosen), sep="\n")
        return 0
    return _check(chosen, device, world, degrees, options)


def degrees_of(world: int) -> tuple[int, ...]:
    """All that divide the ranks, and the powers of two, for which some ranks may be left over."""
    return tuple(degree for degree in range(1, world + 1) if world % degree == 0 or degree.bit_count() == 1)


def _check(chosen: list[Case], device: str, world: int, degrees: tuple[int, ...], options: Mapping[str, Any]) -> int:
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    gpus = min(world, torch.cuda.device_count()) if device == "cuda" else world
    on = f"{world} ranks on {gpus} x {card}" if world > gpus else f"{world} x {card}"
    seed = options["seed"] if options["seed"] is not None else torch.seed() % 2**31
    print(f"{on}: {len(chosen)} case{'s' * (len(chosen) != 1)}, --seed {seed}", flush=True)
    if device == "cpu":
        print("on the CPU, the layers and operations are checked on their plain path, in float64", flush=True)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    code = 0

    def on_event(name: str, payload: Any) -> None:
        if name != "answer":
            return
        case, answer = chosen[len(rows)], payload
        is_right = None if answer.skipped else answer.ratio <= 1
        row = asdict(case) | {"label": case.label, "ok": is_right} | answer._asdict()
        rows.append(row | {"ratio": round(answer.ratio, 4) if isfinite(answer.ratio) else None})
        why, *_ = (answer.skipped or answer.error or f"{answer.ratio:.2f} of the tolerance").splitlines()
        why += f", {answer.tensor}" if is_right is False and answer.tensor else ""
        print(f"{len(rows):>4}/{len(chosen)}  {TOLD[is_right]}  {case.label}: {why}", flush=True)

    argument = {"cases": chosen, "device": device, "degrees": degrees, "seed": seed}
    try:
        run_workers(work, argument, world, on_event)
    except WorkerFailed as failure:
        where = chosen[len(rows)].label if len(rows) < len(chosen) else "the end"
        print(f"tpfused check: {failure}, at {where}\n{failure.details}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("tpfused check: interrupted", file=sys.stderr)
        code = 130
    wrong, skipped = ([row for row in rows if row["ok"] is told] for told in (False, None))
    seconds = round(time.monotonic() - started, 1)
    counts = f"{len(rows) - len(wrong) - len(skipped)} right, {len(wrong)} wrong"
    counts += f", {len(skipped)} skipped" if skipped else ""
    print(f"{counts} of {len(chosen)} in {seconds:.0f} s")
    for (by, tp, why), count in Counter((row["tier"], row["tp"], row["skipped"]) for row in skipped).items():
        print(f"  skipped: {count} by {by} tp{tp}: {why}")
    for row in wrong:
        print(f"  wrong: {row['label']}: {row['error'] or row['tensor']}")
    if wrong:
        # All ranks: each group has data of its own.
        place = f"{'--cpu ' if device == 'cpu' else ''}--{'ranks' if world > gpus else 'gpus'} {world}"
        print(f'alone, on the same data: tpfused check {place} --seed {seed} --case "{wrong[0]["label"]}"')
    if options["json"] is not None:
        found = measured_on(card, gpus)
        meta = {"card": card, "gpus": gpus, "ranks": world, **found["versions"], "commit": found["commit"]}
        meta |= {"date": found["date"], "seed": seed, "seconds": seconds, "complete": len(rows) == len(chosen)}
        write_json(options["json"], meta, rows)
    return code or int(bool(wrong) or len(rows) < len(chosen))
