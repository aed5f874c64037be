"""The `--plot` pictures: tokens a second of each variant, and what ours holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tpfused.bench.plot import COLORS, OTHER, finish
from tpfused.bench.results import Row, by_case

BAR = 0.25  # inches
GAP = 1  # bars between cases


def plot(meta: Mapping[str, Any], rows: Sequence[Row], folder: str) -> list[str]:
    """Write ``model-<operation>.png`` for each operation that was measured, and return their paths."""
    paths = []
    measured = [row for row in rows if row["us"] is not None]
    for name in dict.fromkeys(row["op"] for row in measured):
        paths.append(str(Path(folder) / f"model-{name}.png"))
        _draw(meta, [row for row in measured if row["op"] == name], paths[-1])
    return paths


def _draw(meta: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """A column a pass: tokens a second, on a logarithmic axis where batches are far apart."""
    passes: dict[str, list[list[Row]]] = {}
    for group in by_case(rows):
        passes.setdefault(group[0]["pass"], []).append(group)
    bars = max(sum(len(group) + GAP for group in groups) for groups in passes.values())
    figure = Figure(figsize=(6.5 * len(passes), 1.6 + BAR * bars), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (direction, groups) in zip(
        figure.subplots(1, len(passes), squeeze=False)[0], passes.items(), strict=True
    ):
        place, ticks = 0, []
        for group in groups:
            ticks.append((place + (len(group) - 1) / 2, group[0]["case"]))
            for row in group:
                color = COLORS.get(row["variant"], OTHER)
                handles[row["variant"]] = axes.barh(place, row["tokens_per_s"], height=0.9, color=color)
                axes.text(row["tokens_per_s"], place, f" {row['tokens_per_s']:,.0f}", va="center", fontsize=7)
                place += 1
            place += GAP
        axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
        axes.set_ylim(bars - GAP - 0.4, -0.6)
        if rows[0]["op"] == "decode":
            axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_xlabel("tokens/s", fontsize=9)
        axes.set_title(direction, fontsize=10)
    finish(figure, handles, meta, rows[0], path)
