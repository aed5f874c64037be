"""The rows as they are kept and shown: JSON, CSV, cells of a table."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tpfused.cli.outputs import writing

Row = Mapping[str, Any]


def new_row(op: str, case: str, direction: str, dtype: str, variant: str, **known: Any) -> dict[str, Any]:
    """Every key in every row, in one order; None where nothing was measured."""
    row: dict[str, Any] = {"op": op, "case": case, "pass": direction, "dtype": dtype, "variant": variant}
    row |= dict.fromkeys(
        "us us_iqr floor floor_us floor_us_iqr ratio ratio_iqr rate unit amount eager_us eager_us_iqr extra_bytes "
        "correct graph autograd calls rounds error".split()
    )
    return row | {"comparable": True, "note": "", "autograd": True} | known


def rounded(*values: float, digits: int = 3) -> list[float]:
    return [round(value, digits) for value in values]


def error_line(error: Exception) -> str:
    """The first line of what it says, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def write_json(path: str, meta: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """One row a line: a file of results is read in a diff, too."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    with writing("json", path):
        Path(path).write_text(f'{{\n "meta": {json.dumps(meta, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')


def write_csv(path: str, rows: Sequence[Row]) -> None:
    with writing("csv", path), open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def by_case(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The variants of each case and pass, in their order."""
    for _, variants in groupby(rows, key=lambda row: (row["op"], row["case"], row["pass"], row["dtype"])):
        yield list(variants)


def is_ours(row: Row) -> bool:
    """What a user of this package gets, or a back end of it that was forced."""
    return row["variant"] == "triton" or row["variant"].startswith("ours")


def is_sweep(row: Row) -> bool:
    """Whether it is a point of a curve over the number of tokens, and no case of a table."""
    return row["case"].startswith("sweep ")


def ours_of(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row["variant"] == "ours"), None)


def best_other(rows: Sequence[Row]) -> Row | None:
    """The fastest variant that is not ours, does all of the work, and is not wrong."""
    others = [
        row
        for row in rows
        if not is_ours(row) and row["comparable"] and row["correct"] is not False and row["us"] is not None
    ]
    return min(others, key=lambda row: row["us"], default=None)


def headline(rows: Sequence[Row]) -> str:
    """What one case has shown, in a line."""
    ours, other = ours_of(rows), best_other(rows)
    if ours is None or ours["us"] is None:
        return f"failed: {ours['error']}" if ours else "nothing measured"
    told = f"{ours['us']:.1f} us"
    if ours["ratio"] is not None:  # the floor was measured
        told += f", {ours['ratio']:.3f} x {ours['floor']}"
        told += f"; {other['variant']} {other['ratio']:.3f} x" if other else ""
    wrong = [row["variant"] for row in rows if row["correct"] is False]
    return told + (f"; WRONG: {', '.join(wrong)}" if wrong else "")


def _with_spread(row: Row, key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f} ({row[f'{key}_iqr']:.{digits}f})"


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else format(row[key] / scale, form)


# Title -> the cell of a row that was measured.
NUMBERS: dict[str, Callable[[Row], str]] = {
    "us (IQR)": lambda row: _with_spread(row, "us", 1),
    "host us": _number("host_us", ".1f"),
    "eager us": _number("eager_us", ".1f"),
    "floor us": _number("floor_us", ".1f"),
    "ratio (IQR)": lambda row: _with_spread(row, "ratio", 3) if row["ratio"] is not None else "",
    "exposed us": _number("exposed_us", ".1f"),
    "hidden": _number("hidden", ".2f"),
    "rate": lambda row: "" if row["rate"] is None else f"{row['rate']:,.0f} {row['unit']}",
    "algorithm GB/s": _number("algorithm_gbps", ",.2f"),
    "bus GB/s": _number("bus_gbps", ",.2f"),
    "fit us": _number("fit_us", ",.1f"),
    "fit error": _number("fit_error", "+.1%"),
    "extra MiB": _number("extra_bytes", ",.1f", 2**20),
    "tokens/s": _number("tokens_per_s", ",.0f"),
    "x ours (IQR)": lambda row: _with_spread(row, "times_ours", 3) if row.get("times_ours") is not None else "",
    "x TP 1 (IQR)": lambda row: _with_spread(row, "scaling", 3) if row.get("scaling") is not None else "",
    "of peak": _number("peak_share", ".3f"),
    "GiB": _number("peak_bytes", ",.2f", 2**30),
    "of TP 1's": _number("memory_share", ".3f"),
    "error": _number("deviation", ".2e"),
    "dense error": _number("dense_deviation", ".2e"),
}


def header(rows: Sequence[Row]) -> list[str]:
    return [*_named(rows), "variant", *_shown(rows), ""]


def cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line of the table for each row; what the line above says already is left out."""
    named, shown = _named(rows), _shown(rows)
    for variants in by_case(rows):
        for number, row in enumerate(variants):
            first = [row[name] if number == 0 else "" for name in named]
            yield [*first, row["variant"], *(_cell(title, row) for title in shown), _remarks(row)]


def _named(rows: Sequence[Row]) -> list[str]:
    """What names a case: collectives have no forward and backward."""
    return ["case", "pass"] if any(row["pass"] for row in rows) else ["case"]


def _shown(rows: Sequence[Row]) -> list[str]:
    """The columns in which any row has something to say."""
    return [title for title in NUMBERS if any(_cell(title, row) for row in rows)]


def _cell(title: str, row: Row) -> str:
    return "" if row["us"] is None else NUMBERS[title](row)


def _remarks(row: Row) -> str:
    unchecked = row["correct"] is None and row["error"] is None and row["comparable"]
    remarks = [
        "WRONG" if row["correct"] is False else "",
        "unchecked" if unchecked else "",
        "no graph" if row["graph"] is False else "",
        "without autograd" if not row["autograd"] else "",
        row["note"],
        f"failed: {row['error']}" if row["error"] else "",
    ]
    return ", ".join(filter(None, remarks))
