"""The `--plot` pictures: bars for the cases of the tables, and curves over the tokens for a sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tpfused.bench import plot as bars
from tpfused.bench.overlap.works import COLLECTIVE, MATMUL
from tpfused.bench.results import Row, is_sweep

HIGHEST = 4.0  # ratio: what is slower still leaves the picture


def plot(meta: Mapping[str, Any], rows: Sequence[Row], folder: str) -> list[str]:
    """Write ``overlap-<operation>.png`` and ``overlap-<operation>-sweep.png``, and return their paths."""
    shown = [row for row in rows if row["ratio"] is not None]
    table = [row for row in shown if not is_sweep(row) and row["variant"] not in (MATMUL, COLLECTIVE)]
    paths = bars.plot(meta, table, folder, "overlap")
    points = list(filter(is_sweep, shown))
    for name in dict.fromkeys(row["op"] for row in points):
        paths.append(str(Path(folder) / f"overlap-{name}-sweep.png"))
        _curves(meta, [row for row in points if row["op"] == name], paths[-1])
    return paths


def _curves(meta: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """Time on the left, its ratio to the floor on the right."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    handles: dict[str, Any] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = sorted((row["m"], row["us"], row["ratio"]) for row in rows if row["variant"] == variant)
        tokens, us, ratio = zip(*points, strict=True)
        alone = variant in (MATMUL, COLLECTIVE)
        style = dict(color=bars.COLORS.get(variant, bars.OTHER), linestyle=":" if alone else "-")
        style |= dict(linewidth=2.5, zorder=3) if variant == "ours" else dict(linewidth=1.2)
        (handles[variant],) = times.plot(tokens, us, ".", **style)
        if not alone:
            ratios.plot(tokens, ratio, ".", **style)
    times.set_yscale("log")
    times.set_ylabel("us")
    ratios.axhline(1, color="black", linewidth=1, zorder=0)
    ratios.set_ylim(0.9, HIGHEST)
    ratios.set_ylabel(f"time / {rows[0]['floor']}")
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"tokens; K {rows[0]['k']}, N {rows[0]['n']} over all ranks")
        axes.grid(alpha=0.3)
    bars.finish(figure, handles, meta, rows[0], path)
