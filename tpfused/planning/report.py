"""The tables of `tpfused plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpfused.planning.layouts import DEGREES, Plan
from tpfused.planning.memory import USABLE
from tpfused.planning.rates import ATTENTION, ATTENTION_BACKWARD, MATMUL, OTHER, PARALLEL_MATMUL, Rates
from tpfused.planning.time import Time

GIB = 2**30
TIMES = (*DEGREES, "step ms", "tokens/s each", "exposed ms", "bubble", "GiB", "recompute", "")
# Three tables, for one would be wider than most terminals.
PARTS = (*DEGREES, "weights", "gradients", "AdamW", "activations", "tp sent", "dp sent", "pp sent")
# Of --check: the plan's own prediction, which counts, and another that shows where an error comes from.
PREDICTIONS = {"by_rates": "by rates", "by_parts": "by parts"}
CHECKED = ("tp", "measured ms", "IQR", "by rates ms", "error", "by parts ms", "error", "ran")
PART_NAMES = ("matmul", "attention", "elementwise", "communication", "hidden", "host")
CHECKED_PARTS = ("tp", "how", "matmul", "attention", "elementwise", "collectives", "hidden", "host")
CALL_NAMES = {MATMUL: "matmul", PARALLEL_MATMUL: "matmul on several ranks", OTHER: "any other call"}
WORDS = {"recompute", "", "ran", "how"}


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


def counted(gpus: int, cpu: bool = False) -> str:
    """4 -> "4 GPUs"; of a CPU "4 ranks"."""
    return f"{gpus} {'rank' if cpu else 'GPU'}{'s' * (gpus > 1)}"


def tell_rates(rates: Rates) -> str:
    """All but the collectives', in a line."""

    def flops(kind: str, rate: float) -> str:
        latency = rates.latency_us.get(kind)
        return f"{_rate(rate)} TFLOP/s" + (f" and {latency:,.1f} us" if latency else "")

    backward = flops(ATTENTION_BACKWARD, rates.attention_backward_tflops)
    passes = " and ".join(f"{_rate(rate)} ({kind})" for kind, rate in rates.pass_rates.items())
    told = [
        f"matmul {flops(MATMUL, rates.matmul_tflops)}",
        f"attention {flops(ATTENTION, rates.attention_tflops)}, backward {backward}",
        f"memory {_rate(rates.memory_gbps)} GB/s",
        f"passes {passes} billion elements a second",
    ]
    if rates.hidden is not None:
        told.append(f"{rates.hidden:.0%} hidden of a collective beside a matmul")
    if rates.host_us:
        told.append("host " + ", ".join(f"{us:,.0f} us ({CALL_NAMES[kind]})" for kind, us in rates.host_us.items()))
    return ", ".join(told)


def _rate(rate: float) -> str:
    """Three digits, or all that are before the point, and no power of ten."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def tell_best(entries: Sequence[Entry], memory_bytes: float, cpu: bool = False) -> str:
    """Of `entries`, the fastest that fit first: the first one; where none fits, the one that needs least."""
    each = "rank" if cpu else "GPU"
    best = entries[0] if entries[0].fits else min(entries, key=lambda entry: entry.plan.memory.total)
    layout = ", ".join(f"{name} {getattr(best.plan.layout, name)}" for name in DEGREES)
    needed = f"{best.plan.memory.total / GIB:,.1f} GiB a {each}" + ", blocks recomputed" * best.recomputed
    if best.fits:
        return f"fastest that fits: {layout}: {best.plan.step_us / 1e3:,.1f} ms a step, {needed}"
    return f"none fits in {USABLE * 100:.0f} % of {memory_bytes / GIB:,.1f} GiB: {layout} needs least: {needed}"


def show_plans(console, title: str, entries: Sequence[Entry], tokens: int, gpus: int, cpu: bool = False) -> None:
    """`tokens` of a step."""
    each = "rank" if cpu else "GPU"
    names = tuple(entries[0].activations)
    for heading, columns, lines in (
        (title, TIMES, [_times(entry, tokens / gpus) for entry in entries]),
        (f"GiB a {each}, held and sent in a step", PARTS, [_parts(entry.plan) for entry in entries]),
        (
            f"GiB of activations a {each}, by what is done about them",
            (*DEGREES, *names),
            [_activations(entry) for entry in entries],
        ),
    ):
        styles = [None if entry.fits else "dim" for entry in entries]
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
        ", ".join(["does not fit"] * (not entry.fits) + ["waits for its host"] * (plan.work.host > plan.work.device)),
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


def checked_row(
    tp: int, by_rates: Time, by_parts: Time, measured_us: float, iqr_us: float, overlapped: bool
) -> dict[str, Any]:
    """One degree of --check: both predictions, each with its parts and its error relative to what was measured."""

    def prediction(time: Time) -> dict[str, Any]:
        parts = {name: round(us, 1) for name, us in vars(time).items()}
        error = round(time.total / measured_us - 1, 4)
        return {"predicted_us": round(time.total, 1), "error": error, "parts_us": parts}

    return {
        "tp": tp,
        "measured_us": round(measured_us, 1),
        "measured_us_iqr": round(iqr_us, 1),
        "by_rates": prediction(by_rates),
        "by_parts": prediction(by_parts),
        "overlapped": overlapped,
    }


def show_checked(console, title: str, rows: Sequence[Mapping[str, Any]], tolerance: float) -> None:
    lines = [(_checked_line(row), "red" if is_off(row, tolerance) else None) for row in rows]
    console.grid(title, CHECKED, [lines], set(CHECKED) - WORDS)
    parts = [([str(row["tp"]), how, *_parts_of(row[key])], None) for row in rows for key, how in PREDICTIONS.items()]
    console.grid("what they are made of, ms", CHECKED_PARTS, [parts], set(CHECKED_PARTS) - WORDS)


def is_off(row: Mapping[str, Any], tolerance: float) -> bool:
    """Whether the prediction by rates, the plan's, is further off than so many per cent."""
    return abs(row["by_rates"]["error"]) * 100 > tolerance


def _checked_line(row: Mapping[str, Any]) -> list[str]:
    ran = "overlapped" if row["overlapped"] else "one after the other"
    cells = [str(row["tp"]), *(f"{row[name] / 1e3:,.2f}" for name in ("measured_us", "measured_us_iqr"))]
    for key in PREDICTIONS:
        cells += [f"{row[key]['predicted_us'] / 1e3:,.2f}", f"{row[key]['error']:+.1%}"]
    return [*cells, ran if row["tp"] > 1 else ""]


def _parts_of(prediction: Mapping[str, Any]) -> list[str]:
    parts = prediction["parts_us"]
    return [f"{parts[name] / 1e3:,.2f}" if parts[name] else "" for name in PART_NAMES]
