"""The rows as they are kept and shown: JSON, CSV, cells of a table."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

# What a user of this package gets, and a back end that was forced.
OURS = ("ours", "triton")

Row = Mapping[str, Any]


def write_json(path: str, meta: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """One row a line: a file of results is read in a diff, too."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    Path(path).write_text(f'{{\n "meta": {json.dumps(meta, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')


def write_csv(path: str, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def by_case(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The variants of each case and pass, in their order."""
    for _, variants in groupby(rows, key=lambda row: (row["op"], row["case"], row["pass"], row["dtype"])):
        yield list(variants)


def ours_of(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row["variant"] == "ours"), None)


def best_other(rows: Sequence[Row]) -> Row | None:
    """The fastest variant that is not ours, does all of the work, and is not wrong."""
    others = [
        row
        for row in rows
        if row["variant"] not in OURS and row["comparable"] and row["correct"] is not False and row["us"] is not None
    ]
    return min(others, key=lambda row: row["us"], default=None)


def headline(rows: Sequence[Row]) -> str:
    """What one case has shown, in a line."""
    ours, other = ours_of(rows), best_other(rows)
    if ours is None or ours["us"] is None:
        return f"failed: {ours['error']}" if ours else "nothing measured"
    told = f"{ours['us']:.1f} us, {ours['ratio']:.3f} x {ours['floor']}"
    if other is not None:
        told += f"; {other['variant']} {other['ratio']:.3f} x"
    wrong = [row["variant"] for row in rows if row["correct"] is False]
    return told + (f"; WRONG: {', '.join(wrong)}" if wrong else "")


def header(rows: Sequence[Row]) -> list[str]:
    waits = ["eager us"] if _has_waits(rows) else []
    return ["case", "pass", "variant", "us (IQR)", *waits, "floor us", "ratio (IQR)", "rate", "extra MiB", ""]


def cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line of the table for each row; what the line above says already is left out."""
    waits = _has_waits(rows)
    for variants in by_case(rows):
        for number, row in enumerate(variants):
            first = [row["case"], row["pass"]] if number == 0 else ["", ""]
            yield [*first, row["variant"], *_numbers(row, waits), _remarks(row)]


def _has_waits(rows: Sequence[Row]) -> bool:
    return any(row["eager_us"] is not None for row in rows)


def _numbers(row: Row, waits: bool) -> list[str]:
    if row["us"] is None:
        return [""] * (6 if waits else 5)
    extra = row["extra_bytes"]
    return [
        f"{row['us']:.1f} ({row['us_iqr']:.1f})",
        *([f"{row['eager_us']:.1f}" if row["eager_us"] is not None else ""] if waits else []),
        f"{row['floor_us']:.1f}",
        f"{row['ratio']:.3f} ({row['ratio_iqr']:.3f})",
        f"{row['rate']:,.0f} {row['unit']}",
        "" if extra is None else f"{extra / 2**20:,.1f}",
    ]


def _remarks(row: Row) -> str:
    remarks = [
        "WRONG" if row["correct"] is False else "",
        "unchecked" if row["correct"] is None and row["error"] is None else "",
        "no graph" if row["graph"] is False else "",
        "without autograd" if not row["autograd"] else "",
        row["note"],
        f"failed: {row['error']}" if row["error"] else "",
    ]
    return ", ".join(filter(None, remarks))
