"""The tables of `tpfused plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpfused.planning.layouts import Plan
from tpfused.planning.memory import Memory
from tpfused.planning.time import Time

GIB = 2**30
NAMES = (
    "tp", "dp", "pp", "recompute", "step ms", "tokens/s/GPU", "exposed ms", "bubble", "memory GiB", "weights",
    "gradients", "AdamW", "activations", "tp GiB", "dp GiB", "pp GiB", "",
)  # fmt: skip
CHECKED = (
    "tp", "predicted ms", "measured ms", "error", "matmul", "attention", "elementwise", "collectives", "hidden", "ran",
)  # fmt: skip
WORDS = {"recompute", "", "ran"}


def show_plans(console, title: str, plans: Sequence[tuple[Plan, bool, bool]], tokens: int, gpus: int) -> None:
    """`plans`: each with whether its blocks are computed again, and whether it fits; `tokens` of a step."""
    lines = [(_line(plan, again, fits, tokens / gpus), None if fits else "dim") for plan, again, fits in plans]
    console.grid(title, NAMES, [lines], set(NAMES) - WORDS)


def _line(plan: Plan, again: bool, fits: bool, tokens: float) -> list[str]:
    layout, memory = plan.layout, plan.memory
    return [
        *(str(degree) for degree in (layout.tp, layout.dp, layout.pp)),
        "yes" if again else "",
        f"{plan.step_us / 1e3:,.1f}",
        f"{tokens / plan.step_us * 1e6:,.0f}",
        f"{plan.exposed_us / 1e3:,.1f}",
        f"{plan.bubble:.0%}" if plan.bubble else "",
        *(f"{held / GIB:,.1f}" for held in (memory.total, *_parts(memory))),
        *(f"{plan.sent[kind] / GIB:,.2f}" if plan.sent[kind] else "" for kind in ("tp", "dp", "pp")),
        "" if fits else "does not fit",
    ]


def _parts(memory: Memory) -> tuple[float, ...]:
    return memory.parameters, memory.gradients, memory.optimizer, memory.activations


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
