"""The tables of `tpfused plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpfused.planning.layouts import Plan
from tpfused.planning.time import Time

GIB = 2**30
DEGREES = ("tp", "dp", "pp")
TIMES = (*DEGREES, "step ms", "tokens/s/GPU", "exposed ms", "bubble", "GiB", "recompute", "")
# Two tables, for one would be wider than most terminals.
PARTS = (*DEGREES, "weights", "gradients", "AdamW", "activations", "tp sent", "dp sent", "pp sent")
CHECKED = (
    "tp", "predicted ms", "measured ms", "error", "matmul", "attention", "elementwise", "collectives", "hidden", "ran",
)  # fmt: skip
WORDS = {"recompute", "", "ran"}


def show_plans(console, title: str, plans: Sequence[tuple[Plan, bool, bool]], tokens: int, gpus: int) -> None:
    """`plans`: each with whether its blocks are computed again, and whether it fits; `tokens` of a step."""
    styles = [None if fits else "dim" for _, _, fits in plans]
    times = [_times(plan, again, fits, tokens / gpus) for plan, again, fits in plans]
    console.grid(title, TIMES, [list(zip(times, styles, strict=True))], set(TIMES) - WORDS)
    parts = [_parts(plan) for plan, *_ in plans]
    console.grid("GiB a GPU, held and sent in a step", PARTS, [list(zip(parts, styles, strict=True))], set(PARTS))


def _times(plan: Plan, again: bool, fits: bool, tokens: float) -> list[str]:
    return [
        *_degrees(plan),
        f"{plan.step_us / 1e3:,.1f}",
        f"{tokens / plan.step_us * 1e6:,.0f}",
        f"{plan.exposed_us / 1e3:,.1f}",
        f"{plan.bubble:.0%}" if plan.bubble else "",
        f"{plan.memory.total / GIB:,.1f}",
        "yes" if again else "",
        "" if fits else "does not fit",
    ]


def _parts(plan: Plan) -> list[str]:
    memory = plan.memory
    held = (memory.parameters, memory.gradients, memory.optimizer, memory.activations)
    sent = (f"{plan.sent[kind] / GIB:,.2f}" if plan.sent[kind] else "" for kind in DEGREES)
    return [*_degrees(plan), *(f"{each / GIB:,.1f}" for each in held), *sent]


def _degrees(plan: Plan) -> list[str]:
    return [str(getattr(plan.layout, name)) for name in DEGREES]


def checked_row(tp: int, predicted: Time, measured_us: float, overlapped: bool) -> dict[str, Any]:
    """One degree of --check; the error is relative to what was measured."""
    parts = {name: round(us, 1) for name, us in vars(predicted).items()}
    error = predicted.total / measured_us - 1
    return {
        "tp": tp,
        "predicted_us": round(predicted.total, 1),
        "measured_us": round(measured_us, 1),
        "error": round(error, 4),
        "parts_us": parts,
        "overlapped": overlapped,
    }


def show_checked(console, title: str, rows: Sequence[Mapping[str, Any]], tolerance: float) -> None:
    lines = [(_checked_line(row), "red" if abs(row["error"]) * 100 > tolerance else None) for row in rows]
    console.grid(title, CHECKED, [lines], set(CHECKED) - WORDS)


def _checked_line(row: Mapping[str, Any]) -> list[str]:
    names = ("matmul", "attention", "elementwise", "communication", "hidden")
    parts = [f"{row['parts_us'][name] / 1e3:,.2f}" if row["parts_us"][name] else "" for name in names]
    error, ran = f"{row['error']:+.1%}", "overlapped" if row["overlapped"] else "one after the other"
    return [
        str(row["tp"]),
        f"{row['predicted_us'] / 1e3:,.2f}",
        f"{row['measured_us'] / 1e3:,.2f}",
        error,
        *parts,
        ran if row["tp"] > 1 else "",
    ]
