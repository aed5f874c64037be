"""`tpfused bench kernels`: the cases that were asked for, one after the other, then tables, files and plots."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpfused.bench import OPERATIONS
from tpfused.bench.case import OPTIONAL, Case, Setting
from tpfused.bench.console import make_console
from tpfused.bench.measure import GpuTimer
from tpfused.bench.operations import cases, summary
from tpfused.bench.options import check_options, conclude, describe_run, keep, rounds_and_seed, select
from tpfused.bench.runner import DTYPES, Row, is_bad, run_case
from tpfused.cli.errors import UserError

ROUNDS, QUICK_ROUNDS = 21, 7


def execute(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; returns the exit code: 1 where something was wrong."""
    chosen = select(OPERATIONS, cases, options)
    _check(options)
    if options["list"]:
        print(listing(chosen))
        return 0
    if not torch.cuda.is_available():
        raise UserError("this needs a CUDA GPU, and torch finds none here (--list and --help need none)")
    return measure(chosen, options, GpuTimer())


def listing(chosen: list[Case]) -> str:
    """What `--list` prints: each operation, its cases and their variants."""
    lines = []
    for name in dict.fromkeys(case.op for case in chosen):
        lines += ["", f"{name}: {summary(name)}"]
        passes: dict[tuple, list[str]] = {}
        for case in chosen:
            if case.op == name:
                passes.setdefault((case.name, case.variants, case.quick), []).append(case.direction)
        width = max(len(case_name) for case_name, *_ in passes)
        for (case_name, variants, quick), directions in passes.items():
            told = ", ".join(variant + "*" * (variant in OPTIONAL) for variant in variants)
            lines.append(f"  {case_name:<{width}}  {', '.join(directions):<12}  {told}{'  (quick)' * quick}")
    return "\n".join([*lines[1:], "", "* where its package is installed; (quick): also with --quick"])


def measure(chosen: list[Case], options: Mapping[str, Any], timer, device: str = "cuda") -> int:
    """Run the cases and report; returns the exit code. What is done is in the files even if the rest is interrupted."""
    console = make_console()
    rounds, seed = rounds_and_seed(options, ROUNDS, QUICK_ROUNDS)
    torch.manual_seed(seed)
    setting = Setting(torch.device(device), DTYPES[options["dtype"]], _compile)
    meta = describe(options, rounds, seed) | {"copy_gbps": round(timer.copy_gbps(), 1), "complete": False}
    console.say(f"{meta['card']}, copying {meta['copy_gbps']:,.0f} GB/s: {len(chosen)} cases, {rounds} rounds each")
    rows: list[Row] = []
    with console.progress(len(chosen)) as progress:
        for case in chosen:
            progress.start(case.label)
            found = run_case(case, setting, timer, rounds, options["eager_time"], options["without"] or ())
            progress.done(found)
            rows += found
            keep(options, meta, rows)

    def draw() -> list[str]:
        from tpfused.bench.plot import plot  # which needs matplotlib

        return plot(meta, rows, options["plot"])

    return conclude(console, options, meta, rows, 0, is_bad, draw)


def describe(options: Mapping[str, Any], rounds: int, seed: int) -> dict[str, Any]:
    """Where the numbers come from, the card in more detail."""
    properties = torch.cuda.get_device_properties()
    return describe_run(properties.name, 1, options, rounds, seed) | {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _check(options: Mapping[str, Any]) -> None:
    """Find out before the measurements what would spoil their report."""
    check_options(options, list(DTYPES))
    known = {variant for name in OPERATIONS for case in cases(name) for variant in case.variants} - {"ours", "eager"}
    for name in options["without"] or ():
        if name not in known:
            raise UserError(f"--without {name}: choose {', '.join(sorted(known))} (ours and eager stay)")


def _compile(function: Callable) -> Callable:
    from torch._functorch import config

    config.donated_buffer = False  # a backward that may overwrite what its forward saved could not be repeated
    return torch.compile(function, dynamic=False)
