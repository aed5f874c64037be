"""The `--plot` pictures: a collective's time and bus bandwidth over its size, with the fitted model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tpfused.bench import plot as bars
from tpfused.bench.results import Row
from tpfused.planning.communication import Fit, bandwidths

COLORS = {"all": "tab:blue", "tp": "tab:blue", "dp": "tab:orange"}


def plot(meta: Mapping[str, Any], rows: Sequence[Row], fits: Sequence[Fit], folder: str) -> list[str]:
    """Write ``comm-<operation>.png`` for each, and return their paths."""
    paths = []
    for op in dict.fromkeys(row["op"] for row in rows):
        paths.append(str(Path(folder) / f"comm-{op}.png"))
        _draw(meta, [row for row in rows if row["op"] == op], [each for each in fits if each.op == op], paths[-1])
    return paths


def _draw(meta: Mapping[str, Any], rows: Sequence[Row], fits: Sequence[Fit], path: str) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    handles: dict[str, Any] = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [row for row in rows if row["variant"] == name]
        sizes, color = [row["amount"] for row in points], COLORS[points[0]["group"]]
        (handles[name],) = times.plot(sizes, [row["us"] for row in points], "o-", color=color, markersize=4)
        speeds.plot(sizes, [row["bus_gbps"] for row in points], "o-", color=color, markersize=4)
        for model in (each for each in fits if each.group == points[0]["group"]):
            us = [model.us(size) for size in sizes]
            bus = [bandwidths(model.op, model.ranks, size, one)[1] for size, one in zip(sizes, us, strict=True)]
            (handles[f"{name}, fitted"],) = times.plot(sizes, us, ":", color=color)
            speeds.plot(sizes, bus, ":", color=color)
    times.set_yscale("log")
    times.set_ylabel("us")
    speeds.set_ylabel("bus GB/s")
    for axes in (times, speeds):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("bytes")
        axes.grid(alpha=0.3)
    bars.finish(figure, handles, meta, rows[0], path)
