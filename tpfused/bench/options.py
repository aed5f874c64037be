"""What the benchmarks' command lines share: which cases to measure, how, where the results go, and the report."""

import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpfused.bench.results import Row, write_csv, write_json
from tpfused.cli.errors import UserError
from tpfused.cli.outputs import check_named, check_writable
from tpfused.provenance import measured_on
from tpfused.workers import Worker, WorkerFailed, run_workers

# What changes the numbers of several GPUs and is set outside. The first and the last forbid multicast through NVSwitch.
SETTINGS = (
    "NCCL_NVLS_ENABLE NCCL_ALGO NCCL_PROTO CUDA_DEVICE_MAX_CONNECTIONS TPFUSED_TIER TORCH_SYMM_MEM_DISABLE_MULTICAST"
).split()


def select(known: Sequence[str], cases: Callable[[str], list], options: Mapping[str, Any]) -> list:
    """The cases that --op, --quick and --case leave of those of the `known` operations."""
    operations = options["op"] or known
    for name in operations:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(known)}"
            raise UserError(f"unknown operation {name!r}: {hint}")
    chosen = [case for name in known if name in operations for case in cases(name)]
    if options["quick"]:
        chosen = [case for case in chosen if case.quick]
    if options["case"]:
        chosen = [case for case in chosen if options["case"].casefold() in case.name.casefold()]
        if not chosen:
            quick = "quick " if options["quick"] else ""
            raise UserError(f"no {quick}case has {options['case']!r} in its name: --list shows them")
    return chosen


def check_options(options: Mapping[str, Any], dtypes: Sequence[str], worker: Worker | None = None) -> None:
    """Find out before the measurements what would spoil their report, which the first rank alone writes.

    `worker`: of torchrun's, or None.
    """
    if options["dtype"] not in dtypes:
        raise UserError(f"unknown dtype {options['dtype']!r}: choose {', '.join(dtypes)}")
    if options["rounds"] is not None and options["rounds"] < 1:
        raise UserError(f"--rounds must be at least 1, not {options['rounds']}")
    if options.get("gpus") is not None and options["gpus"] < 1:
        raise UserError(f"--gpus must be at least 1, not {options['gpus']}")
    if worker is not None and options["gpus"] not in (None, worker.world):
        raise UserError(f"--gpus {options['gpus']}: torchrun has started {worker.world} workers")
    if worker is not None and worker.rank != 0:
        return
    for option in ("json", "csv"):
        if options[option] is not None:
            check_writable(option, options[option])
    if options["json"] and options["csv"] and os.path.realpath(options["json"]) == os.path.realpath(options["csv"]):
        raise UserError(f"--json and --csv are one file, {options['json']}")
    check_named("plot", options["plot"])
    if options["plot"] is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError('--plot needs matplotlib: pip install "tpfused[bench]"')
        try:
            Path(options["plot"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--plot {options['plot']}: {error.strerror}") from error
        if not os.access(options["plot"], os.W_OK):
            raise UserError(f"--plot {options['plot']} cannot be written")


def check_gpus(least: int, ranks: int, here: int, found: int, without: str) -> None:
    """Refuse fewer than `least` ranks in all, and more on this host, `here`, than the GPUs that are `found` on it.

    `without`: what can be done without GPUs, to be told where there is none.
    """
    if ranks >= least and here <= found:
        return
    needed = "a GPU" if least == 1 else f"at least {least} GPUs"
    asked = "" if ranks == found else f"{ranks} were asked for where "
    told = f"{found} here" if found else f"none here ({without})"
    raise UserError(f"this needs {needed}, and {asked}torch finds {told}")


def rounds_and_seed(options: Mapping[str, Any], rounds: int, quick_rounds: int) -> tuple[int, int]:
    seed = torch.seed() % 2**31 if options["seed"] is None else options["seed"]
    return options["rounds"] or (quick_rounds if options["quick"] else rounds), seed


def describe_run(card: str, gpus: int, options: Mapping[str, Any], rounds: int, seed: int) -> dict[str, Any]:
    """Where the numbers come from: the card, versions, commit, and how much of the benchmark they are."""
    found = measured_on(card, gpus)
    return {
        "card": card,
        "gpus": gpus,
        **found["versions"],
        "commit": found["commit"],
        "date": found["date"],
        "rounds": rounds,
        "quick": options["quick"],
        "case": options["case"],
        "seed": seed,
    }


def settings() -> dict[str, str]:
    """Those of `SETTINGS` that are set."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def run_on_ranks(
    command: str, function: Callable, argument: Any, worker: Worker | None, world: int, on_event: Callable
) -> int:
    """Run `function(argument, worker)` as the first of torchrun's workers, or (`worker` None) in `world` new ones.

    Returns the exit code, 0 where all went well; what did not is told on stderr.
    """
    try:
        if worker is None:
            run_workers(function, argument, world, on_event)
        else:
            function(argument, replace(worker, emit=on_event))
    except WorkerFailed as failure:
        print(f"tpfused {command}: {failure}\n{failure.details}".rstrip(), file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        print(f"tpfused {command}: interrupted", file=sys.stderr)
        return 130
    return 0


def keep(options: Mapping[str, Any], meta: Mapping[str, Any], rows: list) -> None:
    """Write what is done so far. A full disk does not end the measurements: `conclude` tells of it, after tables."""
    with suppress(UserError):
        write(options, meta, rows)


def write(options: Mapping[str, Any], meta: Mapping[str, Any], rows: list) -> None:
    """The files that --json and --csv ask for."""
    if options["json"]:
        write_json(options["json"], meta, rows)
    if options["csv"]:
        write_csv(options["csv"], rows)


def conclude(
    console, options: Mapping[str, Any], meta: dict[str, Any], rows: list, code: int, is_bad: Callable[[Row], bool],
    draw: Callable[[], list[str]], notes: Sequence[str] = (),
) -> int:  # fmt: skip
    """The files, the report and its `notes` and, by `draw`, the plots of a run that ended with `code`; returns the exit
    code."""
    meta["complete"] = code == 0
    bad = list(filter(is_bad, rows))
    try:
        write(options, meta, rows)
    finally:  # what was measured is shown also where it cannot be written
        report(console, options, rows, bad)
        for note in notes:
            console.say(note)
    for option in ("json", "csv"):
        if options[option]:
            console.say(f"wrote {options[option]}")
    if options["plot"] and rows:
        for path in draw():
            console.say(f"wrote {path}")
    return code or int(bool(bad))


def report(console, options: Mapping[str, Any], rows: Sequence[Row], bad: Sequence[Row]) -> None:
    """The tables, and what is wrong."""
    for name in dict.fromkeys(row["op"] for row in rows):
        console.table(f"{name}, {options['dtype']}", [row for row in rows if row["op"] == name])
    if bad:
        told = "; ".join(f"{row['op']} {row['case']} {row['pass']}: {row['variant']}" for row in bad)
        console.say(f"wrong or failed: {told}")
