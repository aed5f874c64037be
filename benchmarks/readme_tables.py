#!/usr/bin/env python3
"""Writes README's performance tables from the newest `results/kernels-*.json` of each card.

    python benchmarks/readme_tables.py            rewrite what stands between README's two markers
    python benchmarks/readme_tables.py --check    exit with 1 if it is not what would be written

An operation's rows come from the newest complete file that holds it, so that operations may be measured apart.
`--quick` measurements are left out. Needs no torch.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpfused.bench.results import best_other, by_case, ours_of  # noqa: E402

BEGIN = "<!-- kernel benchmarks: written by benchmarks/readme_tables.py, not by hand -->"
END = "<!-- end of the kernel benchmarks -->"
NOTHING = "No results have been recorded yet: `tpfused bench kernels` measures them on your machine."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if README differs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE", help="not README.md")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR", help="not benchmarks/results"
    )
    args = parser.parse_args()
    old = args.readme.read_text()
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        print(f"{args.readme} must hold, once and in this order: {BEGIN} and {END}", file=sys.stderr)
        return 2
    before, after = old[: old.index(BEGIN)], old[old.index(END) :]
    new = f"{before}{BEGIN}\n\n{section(args.results)}\n\n{after}"
    if new == old:
        return 0
    if args.check:
        print(f"{args.readme} differs from {args.results}: run benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    args.readme.write_text(new)
    return 0


def section(folder: Path) -> str:
    """What stands between the markers."""
    newest = newest_of_each_card(folder)
    if not newest:
        return NOTHING
    parts = []
    for operations in newest.values():
        sources: dict[str, list[str]] = {}
        for name, (file, _, _) in operations.items():
            sources.setdefault(file, []).append(name)
        whole = len(sources) == 1
        metas = {file: meta for file, meta, _ in operations.values()}
        parts += [provenance(metas[file], file, None if whole else names) for file, names in sources.items()]
        parts += [table(name, rows) for name, (_, _, rows) in operations.items()]
    return "\n\n".join(parts)


def newest_of_each_card(folder: Path) -> dict[str, dict[str, tuple[str, dict, list[dict]]]]:
    """card -> operation -> (file name, meta, rows of that operation)."""
    files = [(path, json.loads(path.read_text())) for path in folder.glob("kernels-*.json")]
    whole = [(path, found) for path, found in files if found["meta"]["complete"] and not found["meta"]["quick"]]
    cards: dict[str, dict] = {}
    for path, found in sorted(whole, key=lambda each: (each[1]["meta"]["date"], each[0].name)):
        operations = cards.setdefault(found["meta"]["card"], {})
        for name in dict.fromkeys(row["op"] for row in found["rows"]):
            operations.pop(name, None)
            operations[name] = (path.name, found["meta"], [row for row in found["rows"] if row["op"] == name])
    return dict(sorted(cards.items()))


def provenance(meta: dict, file: str, operations: list[str] | None) -> str:
    which = f"{', '.join(operations)}: " if operations else ""
    commit = f"commit {meta['commit']}" if meta["commit"] else "no commit"
    return (
        f"{which}**{meta['card']}**, driver {meta['driver']}, torch {meta['torch']}, Triton {meta['triton']}, "
        f"{commit}, {meta['date'][:10]}; a copy moves {meta['copy_gbps']:,.0f} GB/s. "
        f"[{file}](benchmarks/results/{file})"
    )


def table(name: str, rows: list[dict]) -> str:
    lines = [
        f"| {name} ({rows[0]['dtype']}) | pass | us | ratio to floor (IQR) | best other: its ratio |",
        "|---|---|--:|--:|---|",
    ]
    for variants in by_case(rows):
        ours, other = ours_of(variants), best_other(variants)
        told = f"{other['variant']}: {other['ratio']:.2f}" if other else ""
        cells = [variants[0]["case"], variants[0]["pass"], *_ours(ours), told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ours(row: dict | None) -> list[str]:
    if row is None or row["us"] is None:
        return ["failed", ""]
    if row["correct"] is False:
        return ["wrong", ""]
    return [f"{row['us']:,.1f}", f"{row['ratio']:.2f} ({row['ratio_iqr']:.2f}) of {row['floor']}"]


if __name__ == "__main__":
    sys.exit(main())
