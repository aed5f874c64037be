"""The `--plot` pictures: how much of the floor's speed each variant reaches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tpfused.bench.results import Row, by_case
from tpfused.cli.outputs import writing

COLORS = {
    "ours": "tab:blue",
    "triton": "lightskyblue",
    "eager": "tab:gray",
    "compile": "tab:orange",
    "cublaslt": "tab:green",
    "torch.softmax": "tan",
    "liger": "tab:purple",
    "ours_p2p": "lightskyblue",
    "ours_nccl": "mediumaquamarine",
    "nccl_then_cublas": "tab:gray",
    "megatron_style": "tab:gray",
    "torch_symm_mem": "tab:orange",
    "ours_reference": "lightskyblue",
    "ours_sequential": "mediumaquamarine",
    "dtensor": "tan",
    "dtensor_compiled": "tab:orange",
    "megatron": "tab:gray",
    "matmul": "black",
    "collective": "tab:red",
}
OTHER = "tab:pink"
BAR = 0.2  # inches
GAP = 1  # bars between cases
WIDEST = 150  # per cent: a cache may be several times as fast as memory


def plot(meta: Mapping[str, Any], rows: Sequence[Row], folder: str, area: str = "kernels") -> list[str]:
    """Write ``<area>-<operation>.png`` for each operation that was measured, and return their paths."""
    paths = []
    for name in dict.fromkeys(row["op"] for row in rows if row["us"] is not None):
        path = str(Path(folder) / f"{area}-{name}.png")
        _draw(meta, [row for row in rows if row["op"] == name and row["us"] is not None], path)
        paths.append(path)
    return paths


def _draw(meta: Mapping[str, Any], rows: Sequence[Row], path: str) -> None:
    """A column a pass."""
    passes = {row["pass"]: [] for row in rows}
    for group in by_case(rows):
        passes[group[0]["pass"]].append(group)
    bars = max(sum(len(group) + GAP for group in groups) for groups in passes.values())
    figure = Figure(figsize=(6.5 * len(passes), 1.6 + BAR * bars), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (direction, groups) in zip(
        figure.subplots(1, len(passes), squeeze=False)[0], passes.items(), strict=True
    ):
        _column(axes, groups, bars)
        axes.set_title(direction, fontsize=10)
        for bar, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, bar)
    finish(figure, handles, meta, rows[0], path)


def finish(figure: Figure, handles: Mapping[str, Any], meta: Mapping[str, Any], row: Row, path: str) -> None:
    """The legend, a title that says what was measured on what, and the file."""
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    commit = f", commit {meta['commit']}" if meta.get("commit") else ""
    gpus = f"{meta['gpus']} x " if meta["gpus"] > 1 else ""
    figure.suptitle(f"{row['op']}, {row['dtype']}\n{gpus}{meta['card']}, torch {meta['torch']}{commit}", fontsize=10)
    with writing("plot", path):
        figure.savefig(path, dpi=120)


def _column(axes, groups: Sequence[Sequence[Row]], bars: int) -> None:
    place, ticks = 0, []
    for group in groups:
        ticks.append((place + (len(group) - 1) / 2, group[0]["case"]))
        for row in group:
            _bar(axes, place, row)
            place += 1
        place += GAP
    axes.axvline(100, color="black", linewidth=1, zorder=0)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylim(bars - GAP - 0.4, -0.6)
    axes.set_xlim(0, WIDEST)
    axes.set_xlabel("% of the floor's speed", fontsize=9)


def _bar(axes, place: float, row: Row) -> None:
    share = 100 / row["ratio"]
    # The quartiles of the ratio, about its median: close enough for a whisker.
    spread = share * row["ratio_iqr"] / row["ratio"] / 2
    axes.barh(
        place,
        share,
        height=0.9,
        xerr=spread,
        color=COLORS.get(row["variant"], OTHER),
        hatch=None if row["comparable"] else "///",
        edgecolor="white",
        error_kw={"elinewidth": 0.8},
        label=row["variant"] + ("" if row["comparable"] else f" ({row['note']})"),
    )
    wrong = row["correct"] is False
    told = f"{row['us']:,.1f} us" + (", no graph" if row["graph"] is False else "") + (", WRONG" if wrong else "")
    told += f", {share:.0f} %" if share > WIDEST else ""
    axes.text(
        min(share + spread, 0.75 * WIDEST) + 1,
        place,
        told,
        va="center",
        fontsize=7,
        color="red" if wrong else "black",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
    )
