"""The tables of `tpfused plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpfused.planning.layouts import Plan
from tpfused.planning.time import Time

GIB = 2**30
DEGREES = ("tp", "dp", "pp")
TIMES = (*DEGREES, "step ms", "tokens/s/GPU", "exposed ms", "bubble", "GiB", "recompute", "")
# Three tables, for one would be wider than most terminals.
PARTS = (*DEGREES, "weights", "gradients", "AdamW", "activations", "tp sent", "dp sent", "pp sent")
CHECKED = (
    "tp", "predicted ms", "measured ms", "error", "matmul", "attention", "elementwise", "collectives", "hidden", "ran",
)  # fmt: skip
WORDS = {"recompute", "", "ran"}


@dataclass(frozen=True)
class Entry:
    """A layout as it is shown.

    Attributes:
        recomputed: its blocks are computed again in backward.
        fits: into the memory of a GPU.
        activations: bytes of them with and without sequence parallelism and recomputation, by name.
    """

    plan: Plan
    recomputed: bool
    fits: bool
    activations: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        known = {"recomputed": self.recomputed, "fits": self.fits, "activation_bytes": dict(self.activations)}
        return self.plan.as_dict() | known


def show_plans(console, title: str, entries: Sequence[Entry], tokens: int, gpus: int) -> None:
    """`tokens` of a step."""
    names = tuple(entries[0].activations)
    for heading, columns, lines in (
        (title, TIMES, [_times(each, tokens / gpus) for each in entries]),
        ("GiB a GPU, held and sent in a step", PARTS, [_parts(each.plan) for each in entries]),
        (
            "GiB of activations a GPU, by what is done about them",
            (*DEGREES, *names),
            [_activations(each) for each in entries],
        ),
    ):
        styles = [None if each.fits else "dim" for each in entries]
        console.grid(heading, columns, [list(zip(lines, styles, strict=True))], set(columns) - WORDS)


def _times(entry: Entry, tokens: float) -> list[str]:
    plan = entry.plan
    return [
        *_degrees(plan),
        f"{plan.step_us / 1e3:,.1f}",
        f"{tokens / plan.step_us * 1e6:,.0f}",
        f"{plan.exposed_us / 1e3:,.1f}",
        f"{plan.bubble:.0%}" if plan.bubble else "",
        f"{plan.memory.total / GIB:,.1f}",
        "yes" if entry.recomputed else "",
        "" if entry.fits else "does not fit",
    ]


def _activations(entry: Entry) -> list[str]:
    return [*_degrees(entry.plan), *(f"{held / GIB:,.1f}" for held in entry.activations.values())]


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
