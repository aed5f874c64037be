#!/usr/bin/env python3
"""Writes README's performance tables from the newest results of `tpfused bench` for each card.

    python benchmarks/readme_tables.py            rewrite what stands between README's pairs of markers
    python benchmarks/readme_tables.py --check    exit with 1 if it is not what would be written

They are of `results/kernels-*.json`, `results/overlap-*.json` and `results/model-*.json`. An operation's rows come from
the newest complete file that holds it, so that operations may be measured apart. Measurements of some cases (`--quick`,
`--case`, `--tp`, `--sequence`) are left out, and so are the points of a sweep. What `tpfused plan` predicts is of
`results/plan-check-*.json` and, of whole steps, of `model-*.json` by the rates of `comm-*.json`. Needs no torch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpfused.bench import OPERATIONS  # noqa: E402
from tpfused.bench.results import Row, best_other, by_case, is_ours, is_sweep, ours_of  # noqa: E402
from tpfused.planning.layouts import Layout, Step, predict  # noqa: E402
from tpfused.planning.rates import Rates  # noqa: E402
from tpfused.planning.shape import BYTES, PRESETS, Shape  # noqa: E402

PARTS = ("matmul", "collective")
SIZES = {"8B": "llama3-8b"}  # of `tpfused bench model`, among `tpfused plan`'s
LEFT = ("case", "pass", "best other: its ratio")  # columns of words
Columns = dict[str, Callable[[Sequence[Row]], str]]  # title -> the cell of a case's variants


@dataclass(frozen=True)
class Section:
    """What `tpfused bench AREA` has in README, between its markers.

    Attributes:
        facts: what a file's meta says beside card, driver, torch, commit and date: before the commit, and at the end.
        columns: those after case and pass, for an operation's rows.
    """

    area: str
    begin: str
    end: str
    facts: Callable[[Mapping], tuple[str, str]]
    columns: Callable[[Sequence[Row]], Columns]

    def text(self, folder: Path) -> str:
        return text_of(self, folder)


@dataclass(frozen=True)
class PlanSection:
    """What `tpfused plan` has in README: how far off it is of blocks and of steps."""

    begin: str
    end: str

    def text(self, folder: Path) -> str:
        found = [*checked_blocks(folder), *predicted_steps(folder)]
        return "\n\n".join(
            found or ["No results have been recorded yet: `tpfused plan --check` compares on your machine."]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if README differs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE", help="not README.md")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR", help="not benchmarks/results"
    )
    args = parser.parse_args()
    old = new = args.readme.read_text()
    for section in SECTIONS:
        begin, end = section.begin, section.end
        if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
            print(f"{args.readme} must hold, once and in this order: {begin} and {end}", file=sys.stderr)
            return 2
        before, after = new[: new.index(begin)], new[new.index(end) :]
        new = f"{before}{begin}\n\n{section.text(args.results)}\n\n{after}"
    if new == old:
        return 0
    if args.check:
        print(f"{args.readme} differs from {args.results}: run benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    args.readme.write_text(new)
    return 0


def text_of(section: Section, folder: Path) -> str:
    """What stands between the section's markers."""
    newest = newest_of_each_card(folder, section.area)
    if not newest:
        return f"No results have been recorded yet: `tpfused bench {section.area}` measures them on your machine."
    parts = []
    for operations in newest.values():
        sources: dict[str, list[str]] = {}
        for name, (file, _, _) in operations.items():
            sources.setdefault(file, []).append(name)
        whole = len(sources) == 1
        metas = {file: meta for file, meta, _ in operations.values()}
        parts += [provenance(section, metas[file], file, None if whole else names) for file, names in sources.items()]
        parts += [table(name, rows, section.columns(rows)) for name, (_, _, rows) in operations.items()]
    return "\n\n".join(parts)


def newest_of_each_card(folder: Path, area: str) -> dict[tuple[str, int], dict[str, tuple[str, dict, list[dict]]]]:
    """(card, how many) -> operation -> (file name, meta, rows of that operation)."""
    files = [(path.name, json.loads(path.read_text())) for path in folder.glob(f"{area}-*.json")]
    whole = [(name, found) for name, found in files if is_whole(found["meta"])]
    cards: dict[tuple[str, int], dict] = {}
    for file, found in sorted(whole, key=lambda each: (each[1]["meta"]["date"], each[0])):
        meta, rows = found["meta"], [row for row in found["rows"] if not is_sweep(row)]
        for name in dict.fromkeys(row["op"] for row in rows):
            operations = cards.setdefault((meta["card"], meta["gpus"]), {})
            operations[name] = (file, meta, [row for row in rows if row["op"] == name])
    if area == "kernels":  # in the benchmark's order, whenever each was measured
        cards = {card: {name: found[name] for name in OPERATIONS if name in found} for card, found in cards.items()}
    return dict(sorted(cards.items()))


def is_whole(meta: Mapping) -> bool:
    """Whether a file holds all cases of its operations."""
    return meta["complete"] and not any(meta.get(option) for option in ("quick", "case", "tp", "sequence"))


def provenance(section: Section, meta: Mapping, file: str, operations: list[str] | None) -> str:
    which = f"{', '.join(operations)}: " if operations else ""
    return which + measured_on(meta, file, *section.facts(meta))


def measured_on(meta: Mapping, file: str, library: str, more: str) -> str:
    """`more`: after the rounds."""
    card = f"{meta['gpus']} x {meta['card']}" if meta["gpus"] > 1 else meta["card"]
    commit = f"commit {meta['commit']}" if meta["commit"] else "no commit"
    rounds = f", {meta['rounds']} rounds" if "rounds" in meta else ""
    return (
        f"**{card}**, driver {meta['driver']}, torch {meta['torch']}, {library}, {commit}, {meta['date'][:10]}{rounds}"
        f"{more}. [{file}](benchmarks/results/{file})"
    )


def table(name: str, rows: Sequence[Row], columns: Columns) -> str:
    lines = [
        f"| {name} ({rows[0]['dtype']}) | pass | {' | '.join(columns)} |",
        "|---|---|" + "".join("---|" if title in LEFT else "--:|" for title in columns),
    ]
    for variants in by_case(rows):
        cells = [variants[0]["case"], variants[0]["pass"], *(cell(variants) for cell in columns.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def us_of(variants: Sequence[Row]) -> str:
    """Ours: its time, or why there is none."""
    ours = ours_of(variants)
    if ours is None or ours["us"] is None:
        return "failed"
    return "wrong" if ours["correct"] is False else f"{ours['us']:,.1f}"


def of_ours(key: str, cell: Callable[[Row], str]) -> Callable[[Sequence[Row]], str]:
    """A cell of ours; empty where it is failed or wrong, or has no such figure."""

    def found(variants: Sequence[Row]) -> str:
        row = ours_of(variants)
        return "" if us_of(variants) in ("failed", "wrong") or row[key] is None else cell(row)

    return found


def kernel_columns(rows: Sequence[Row]) -> Columns:
    def best(variants: Sequence[Row]) -> str:
        other = best_other(variants)
        return f"{other['variant']}: {other['ratio']:.2f}" if other else ""

    ratio = of_ours("ratio", lambda row: f"{row['ratio']:.2f} ({row['ratio_iqr']:.2f}) of {row['floor']}")
    return {"us": us_of, "ratio to floor (IQR)": ratio, "best other: its ratio": best}


def of(variant: str, key: str, form: str) -> Callable[[Sequence[Row]], str]:
    """A cell of that variant."""

    def cell(variants: Sequence[Row]) -> str:
        row = next((row for row in variants if row["variant"] == variant), None)
        if row is None or row[key] is None:
            return "failed" if row and row["us"] is None else ""
        return "wrong" if row["correct"] is False else format(row[key], form)

    return cell


def overlap_columns(rows: Sequence[Row]) -> Columns:
    """Both floors, ours, and the ratio of each baseline."""

    def ratio(row: Row) -> str:
        told = f"{row['ratio']:.2f} ({row['ratio_iqr']:.2f})"
        if row["case"].startswith("decode"):
            told += f", {row['exposed_us']:+.1f} us"
        return told

    variants = dict.fromkeys(row["variant"] for row in rows)
    mine = {*PARTS, *(row["variant"] for row in rows if is_ours(row))}
    parts = {f"{name} us": of(name, "us", ",.1f") for name in PARTS if name in variants}
    by_nccl = {"ours by NCCL, ratio": of("ours_nccl", "ratio", ".2f")} if "ours_nccl" in variants else {}
    others = {f"{name} ratio": of(name, "ratio", ".2f") for name in variants if name not in mine}
    return {
        **parts,
        "ours us": us_of,
        "ratio to floor (IQR)": of_ours("ratio", ratio),
        "hidden": of_ours("hidden", lambda row: f"{row['hidden']:.2f}"),
        **by_nccl,
        **others,
        "host us": of_ours("host_us", lambda row: f"{row['host_us']:,.0f}"),
    }


def model_columns(rows: Sequence[Row]) -> Columns:
    """Ours, and how much longer the others take."""

    def memory(row: Row) -> str:
        share = "" if row["memory_share"] is None else f" ({row['memory_share']:.3f})"
        return f"{row['peak_bytes'] / 2**30:.1f}{share}"

    others = dict.fromkeys(row["variant"] for row in rows if row["variant"] != "ours")
    found = {
        "us": us_of,
        "tokens/s": of_ours("tokens_per_s", lambda row: f"{row['tokens_per_s']:,.0f}"),
        "x TP 1 (IQR)": of_ours("scaling", lambda row: f"{row['scaling']:.2f} ({row['scaling_iqr']:.2f})"),
        "of peak": of_ours("peak_share", lambda row: f"{row['peak_share']:.2f}"),
        "GiB a rank (of TP 1's)": of_ours("peak_bytes", memory),
        **{f"{name} x ours": of(name, "times_ours", ".2f") for name in others},
        # Files of earlier versions have it of this many tokens, whatever the row's.
        f"error{'' if any('deviation_tokens' in row for row in rows) else ' at 256 tokens'} (dense bf16's)": of_ours(
            "deviation", lambda row: f"{row['deviation']:.3e} ({row['dense_deviation']:.3e})"
        ),
    }
    return {title: cell for title, cell in found.items() if any(cell(variants) for variants in by_case(rows))}


def checked_blocks(folder: Path) -> list[str]:
    """A table of each file that `tpfused plan --check` wrote; of the same blocks on as many of the same card, of the
    newest."""
    newest = {}
    for file, meta, rows in sorted(recorded(folder, "plan-check"), key=lambda each: (each[1]["date"], each[0])):
        step = {name: value for name, value in meta["step"].items() if name != "batch"}
        newest[str((meta["card"], meta["gpus"], meta["shape"], step, meta["layers"]))] = file, meta, rows
    parts = []
    for file, meta, rows in newest.values():
        parts.append(measured_on(meta, file, f"NCCL {meta['nccl']}", set_outside(meta)))
        blocks = f"{meta['layers']} of {name_of(Shape(**meta['shape']))}, {meta['step']['tokens']} tokens"
        title = f"| blocks, forward and backward ({dtype_of(meta)}) | TP | measured ms (IQR) "
        lines = [f"{title}| by rates ms | error | by parts ms | error |", "|---|--:|--:|--:|--:|--:|--:|"]
        for row in rows:
            # A file of before predictions by rates has the other one alone.
            by_rates = predicted_cells(row["by_rates"]) if "by_rates" in row else ["not recorded", ""]
            spread = f" ({row['measured_us_iqr'] / 1e3:,.2f})" if "measured_us_iqr" in row else ""
            cells = [blocks, str(row["tp"]), f"{row['measured_us'] / 1e3:,.2f}{spread}"]
            cells += [*by_rates, *predicted_cells(row.get("by_parts", row))]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return parts


def predicted_cells(prediction: Mapping) -> list[str]:
    return [f"{prediction['predicted_us'] / 1e3:,.2f}", f"{prediction['error']:+.1%}"]


def recorded(folder: Path, name: str) -> list[tuple[str, dict, list[dict]]]:
    """File name, meta and rows of each whole file of that name."""
    files = [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob(f"{name}-*.json"))]
    return [(file, found["meta"], found["rows"]) for file, found in files if is_whole(found["meta"])]


def name_of(shape: Shape) -> str:
    known = (name for name, preset in PRESETS.items() if replace(preset, layers=shape.layers) == shape)
    return next(known, f"a model of {shape.hidden} features")


def dtype_of(meta: Mapping) -> str:
    return meta.get("dtype") or {2: "16 bits", 4: "fp32"}[meta["step"]["bytes"]]


def predicted_steps(folder: Path) -> list[str]:
    """Training steps of `tpfused bench model` beside what the rates of the newest `tpfused bench comm` on as many of
    the same card say of them."""
    machines = {}
    for file, meta, _ in sorted(recorded(folder, "comm"), key=lambda each: (each[1]["date"], each[0])):
        rates = Rates.from_dict(meta["rates"])
        if not rates.unknown():  # a file of an earlier version: half a prediction is none
            machines[meta["card"], meta["gpus"], meta["dtype"]] = file, rates
    parts = []
    for card, operations in newest_of_each_card(folder, "model").items():
        file, meta, rows = operations.get("train", (None, {}, ()))
        rows = [
            row for row in rows if (row["variant"], row["pass"], row.get("dp")) == ("ours", "fwd+bwd", 1) and row["us"]
        ]
        if not rows or (*card, rows[0]["dtype"]) not in machines or meta["size"] not in SIZES:
            continue
        shape = replace(PRESETS[SIZES[meta["size"]]], layers=meta["layers"])
        source, rates = machines[*card, rows[0]["dtype"]]
        told = f"Training steps, {meta['layers']} layers, of [{file}](benchmarks/results/{file}), by the rates of "
        parts.append(f"{told}[{source}](benchmarks/results/{source}).")
        lines = [f"| train ({rows[0]['dtype']}) | measured ms | by rates ms | error |", "|---|--:|--:|--:|"]
        for row in rows:
            step = Step(row["batch"], row["batch"], row["tokens"], BYTES[row["dtype"]], True, False, rates.hidden != 0)
            us = predict(shape, step, Layout(row["tp"], 1, 1), rates).work.total  # without an optimizer
            cells = predicted_cells({"predicted_us": us, "error": us / row["us"] - 1})
            lines.append(f"| {row['case']} | {row['us'] / 1e3:,.2f} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return parts


def set_outside(meta: Mapping) -> str:
    return "".join(f", {name}={value}" for name, value in meta["settings"].items())


SECTIONS = (
    Section(
        "kernels",
        "<!-- kernel benchmarks: written by benchmarks/readme_tables.py, not by hand -->",
        "<!-- end of the kernel benchmarks -->",
        lambda meta: (f"Triton {meta['triton']}", f"; a copy moves {meta['copy_gbps']:,.0f} GB/s"),
        kernel_columns,
    ),
    Section(
        "overlap",
        "<!-- overlap benchmarks: written by benchmarks/readme_tables.py, not by hand -->",
        "<!-- end of the overlap benchmarks -->",
        lambda meta: (f"NCCL {meta['nccl']}", set_outside(meta)),
        overlap_columns,
    ),
    Section(
        "model",
        "<!-- model benchmarks: written by benchmarks/readme_tables.py, not by hand -->",
        "<!-- end of the model benchmarks -->",
        lambda meta: (f"NCCL {meta['nccl']}", f", {meta['layers']} layers of {meta['size']}{set_outside(meta)}"),
        model_columns,
    ),
    PlanSection(
        "<!-- predictions: written by benchmarks/readme_tables.py, not by hand -->", "<!-- end of the predictions -->"
    ),
)


if __name__ == "__main__":
    sys.exit(main())
