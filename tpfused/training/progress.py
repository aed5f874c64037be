"""A run's progress as it happens: a bar on a terminal, a few lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINES = 10


class _Lines:
    def __init__(self, console: Console, title: str, first: int, last: int):
        self.console, self.title, self.first, self.last = console, title, first, last
        self.every = max(1, (last - first) // LINES)

    def step(self, step: int, loss: float, grad_norm: float, ms: float) -> None:
        if step % self.every == 0 or step in (self.first + 1, self.last):
            facts = f"loss {loss:.5f}  gradient norm {grad_norm:.4f}  {ms:.0f} ms"
            self.console.print(f"{self.title}: step {step}/{self.last}  {facts}", soft_wrap=True)

    def status(self, text: str) -> None:
        pass


class _Bar:
    def __init__(self, progress: Progress, task: TaskID):
        self.progress, self.task = progress, task

    def step(self, step: int, loss: float, grad_norm: float, ms: float) -> None:
        self.progress.update(self.task, completed=step, facts=f"loss {loss:.4f}  {ms:.0f} ms")

    def status(self, text: str) -> None:
        """What goes on where no step is counted."""
        self.progress.update(self.task, facts=text)


@contextmanager
def show_progress(console: Console, title: str, first: int, last: int) -> Iterator[_Lines | _Bar]:
    """From step `first` to step `last`; call what this gives, for each step and status."""
    if not console.is_terminal:
        yield _Lines(console, title, first, last)
        return
    columns = (
        TextColumn("{task.description:<15}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, progress.add_task(title, total=last, completed=first, facts="starting"))
