"""One case: is each variant right, what does it hold, how long does it take, and what is that to the floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpfused.bench.case import Case, Outputs, Setting, Variant, Work, outputs_of
from tpfused.bench.measure import median_and_iqr
from tpfused.bench.results import error_line, is_ours, new_row, rounded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FLOOR = "the floor"  # no variant's name

Row = dict[str, Any]


def name_of(dtype: torch.dtype) -> str:
    """What --dtype calls it."""
    return next(name for name, known in DTYPES.items() if known == dtype)


@dataclass(frozen=True)
class Checked:
    """One variant after its first call.

    Attributes:
        errors: of each output, the largest error and the largest right value; None where they are not known.
        failure: why it did not run.
    """

    errors: list[tuple[float, float]] | None = None
    failure: str | None = None


def run_case(
    case: Case, setting: Setting, timer, rounds: int, eager_time: bool = False, without: Sequence[str] = ()
) -> list[Row]:
    """Rows, one a variant, those that failed included. `timer` is a `GpuTimer`; `without`: variants to leave out."""
    try:
        with timer.session():
            return _rows(case, setting, timer, rounds, eager_time, without)
    except Exception as error:  # the other cases still have a chance: out of memory, say
        timer.recover()
        return [_row(case, setting, "ours", error=error_line(error))]


def is_bad(row: Row) -> bool:
    """Wrong, or ours and not measured: what the exit code tells."""
    return row["correct"] is False or (is_ours(row) and row["us"] is None)


def within_rule(errors: Sequence[tuple[float, float]], twin: Sequence[tuple[float, float]], dtype: torch.dtype) -> bool:
    """max|out - ref| <= 2 max|torch - ref| + 2 eps max|ref|, for each output; `twin` is torch's error in that dtype."""
    if len(errors) != len(twin):
        return False
    eps = torch.finfo(dtype).eps
    return all(error <= 2 * other + 2 * eps * top for (error, top), (other, _) in zip(errors, twin, strict=True))


def largest_errors(outputs: Sequence[Tensor], exact: Sequence[Tensor]) -> list[tuple[float, float]]:
    """(largest error, largest right value) of each output; an error is infinite where the shapes differ."""
    if len(outputs) != len(exact):
        return [(torch.inf, 0.0)] * len(exact)
    return [
        ((x.double() - right).abs().max().item(), right.abs().max().item())
        if x.shape == right.shape
        else (torch.inf, 0.0)
        for x, right in zip(outputs, exact, strict=True)
    ]


def _rows(case: Case, setting: Setting, timer, rounds: int, eager_time: bool, without: Sequence[str]) -> list[Row]:
    work = case.build(setting)
    for name in without:
        work.variants.pop(name, None)
    checked = _check(work, timer)
    facts: dict[str, Row] = {name: {"error": checked[name].failure} for name in work.variants}
    timed = {_FLOOR: timer.prepare(work.floor.call)}
    calls: dict[str, Callable] = {}
    for name, variant in work.variants.items():
        if checked[name].failure is not None:
            continue
        try:
            facts[name] = _prepare(variant, timer, timed, name)
            calls[name] = variant.call
        except Exception as error:
            timer.recover()
            facts[name] = {"error": error_line(error)}
        facts[name]["correct"] = _verdict(variant, checked, name, setting.dtype)
    times = timer.interleave(timed, rounds)
    waits = timer.waits(calls, rounds) if eager_time else {}

    floor_us = [us * work.floor.factor for us in times[_FLOOR]]
    rows = []
    for name, variant in work.variants.items():
        measured = _measured(work, times[name], floor_us) if name in times else {}
        if name in waits:
            measured["eager_us"], measured["eager_us_iqr"] = rounded(*median_and_iqr(waits[name]))
        rows.append(
            _row(case, setting, name, comparable=variant.comparable, note=variant.note, **facts[name], **measured)
        )
    return rows


def _check(work: Work, timer) -> dict[str, Checked]:
    """Each variant's first call, compared with the exact result."""
    shared: Outputs | None = None
    checked = {}
    for name, variant in work.variants.items():
        try:
            outputs = outputs_of(variant.call())
        except Exception as error:
            timer.recover()
            checked[name] = Checked(failure=error_line(error))
            continue
        try:
            if variant.exact is not None:
                checked[name] = Checked(largest_errors(outputs, outputs_of(variant.exact(outputs))))
            else:
                shared = outputs_of(work.exact()) if shared is None else shared
                checked[name] = Checked(largest_errors(outputs, shared))
        except torch.OutOfMemoryError:  # of the float64 result: that need not fit where the work does
            timer.recover()
            checked[name] = Checked()
    return checked


def _verdict(variant: Variant, checked: dict[str, Checked], name: str, dtype: torch.dtype) -> bool | None:
    """None where there is nothing to hold it to."""
    errors, twin = checked[name].errors, checked[variant.twin].errors
    return None if errors is None or twin is None else within_rule(errors, twin, dtype)


def _prepare(variant: Variant, timer, timed: dict, name: str) -> Row:
    """Puts the variant among those to be timed."""
    facts: Row = {"extra_bytes": timer.extra_bytes(variant.call)}
    prepared = timer.prepare(variant.call)
    if not prepared.graph and variant.fallback is not None:
        variant.fallback()
        instead = timer.prepare(variant.fallback)
        if instead.graph:
            prepared, facts["autograd"] = instead, False
    timed[name] = prepared
    return facts | {"graph": prepared.graph, "calls": prepared.calls}


def _measured(work: Work, us: list[float], floor_us: list[float]) -> Row:
    median, iqr = median_and_iqr(us)
    ratio, ratio_iqr = median_and_iqr([one / floor for one, floor in zip(us, floor_us, strict=True)])
    row: Row = {"floor": work.floor.name, "unit": work.unit}
    row["us"], row["us_iqr"] = rounded(median, iqr)
    row["floor_us"], row["floor_us_iqr"] = rounded(*median_and_iqr(floor_us))
    row["ratio"], row["ratio_iqr"] = rounded(ratio, ratio_iqr, digits=4)
    row["rate"] = round(work.amount / median / (1e3 if work.unit == "GB/s" else 1e6), 1)
    return row | {"amount": work.amount, "rounds": len(us)}


def _row(case: Case, setting: Setting, variant: str, **known) -> Row:
    return new_row(case.op, case.name, case.direction, name_of(setting.dtype), variant, **known)
