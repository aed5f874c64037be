"""What the user sees: a bar on a terminal or a line a case elsewhere, then a table an operation. Plain without rich."""

from collections.abc import Container, Sequence
from contextlib import contextmanager
from typing import Any

from tpfused.bench.results import NUMBERS, Row, by_case, cells, header, headline

Line = tuple[Sequence[str], str | None]  # cells, and a style


def make_console() -> "PlainConsole":
    try:
        return RichConsole()
    except ImportError:
        return PlainConsole()


class PlainConsole:
    def say(self, line: str) -> None:
        print(line, flush=True)

    @contextmanager
    def progress(self, total: int):
        """Gives what takes each case: called with its label before, and its rows after."""
        yield _Lines(self.say, total)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        lines = cells(rows)
        groups = [[(next(lines), _style(row)) for row in variants] for variants in by_case(rows)]
        self.grid(title, header(rows), groups, NUMBERS)

    def grid(self, title: str, names: Sequence[str], groups: Sequence[Sequence[Line]], numbers: Container[str]) -> None:
        """Lines of cells below their `names`, those in `numbers` on the right; a rule after each group."""
        lines = [names, *(line for group in groups for line, _ in group)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.say(f"\n{title}")
        for line in lines:
            aligned = [
                cell.rjust(width) if name in numbers else cell.ljust(width)
                for name, cell, width in zip(names, line, widths, strict=True)
            ]
            self.say("  ".join(aligned).rstrip())


class RichConsole(PlainConsole):
    def __init__(self):
        from rich.console import Console

        self.console = Console(highlight=False, markup=False)

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    @contextmanager
    def progress(self, total: int):
        if not self.console.is_terminal:
            yield _Lines(self.say, total)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield _Bar(progress, progress.add_task("", total=total))

    def grid(self, title: str, names: Sequence[str], groups: Sequence[Sequence[Line]], numbers: Container[str]) -> None:
        if not self.console.is_terminal:
            super().grid(title, names, groups, numbers)  # a log keeps its lines whole, however wide
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for name in names:
            table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers)
        for group in groups:
            for line, style in group:
                table.add_row(*line, style=style)
            table.add_section()
        self.console.print(table)


def _style(row: Row) -> str | None:
    if row["correct"] is False or row["error"]:
        return "red"
    return "bold" if row["variant"] == "ours" else None


class _Lines:
    def __init__(self, say, total: int):
        self.say, self.total, self.number = say, total, 0

    def start(self, label: str) -> None:
        self.label = label

    def done(self, rows: Sequence[Row], told: str | None = None) -> None:
        """`told`: instead of their headline."""
        self.number += 1
        self.say(f"{self.number}/{self.total}  {self.label}: {told or headline(rows)}")


class _Bar:
    def __init__(self, progress: Any, task: Any):
        self.progress, self.task = progress, task

    def start(self, label: str) -> None:
        self.progress.update(self.task, description=label)

    def done(self, rows: Sequence[Row], told: str | None = None) -> None:
        self.progress.advance(self.task)
