"""What the user sees: a header, live progress, one table, and the same in JSON and as a plot."""

import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpfused.cli.errors import UserError
from tpfused.training.presets import PRESETS, RunConfig

# Where there is no terminal to draw a bar on, a phase prints about this many lines.
PLAIN_LINES = 10


def check_outputs(options: dict[str, Any]) -> None:
    """Find out before the training what would spoil the report after it."""
    needed = {
        "rich": True,
        "matplotlib": options["plot"],
        "safetensors": options["save"] or options["resume"],
    }
    missing = [name for name, wanted in needed.items() if wanted and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'this needs {" and ".join(missing)}: pip install "tpfused[demo]"')
    for option in ("plot", "json"):
        if options[option] is None:
            continue
        path = Path(options[option])
        if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"--{option} {path} cannot be written")
    if options["plot"]:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if Path(options["plot"]).suffix[1:].lower() not in kinds:
            raise UserError(f"--plot {options['plot']} must end in one of {', '.join('.' + kind for kind in kinds)}")


class Report:
    """Collects both runs' results as they come and shows them."""

    def __init__(self, run: RunConfig):
        from rich.console import Console

        self.run = run
        self.console = Console(highlight=False, soft_wrap=True)
        run_on = f"{run.device} ({'NCCL' if run.device == 'cuda' else 'gloo'})"
        dp = f" x dp {run.dp} ({run.dp_mode.upper()})" if run.dp > 1 else ""
        self.console.print(
            f"[bold]{run.preset}[/bold]: {PRESETS[run.preset].summary}\n"
            f"tp {run.tp}{dp} on {run_on}, {run.dtype}, {run.optimizer} {run.lr:g}, "
            f"{run.batch_size} sequences of {run.seq_len} a step"
        )
        if run.resume:
            self.console.print(f"resuming {run.resume}")

    @contextmanager
    def phase(self, title: str) -> Iterator[tuple[Callable[[str, dict], None], dict]]:
        """Show one run's progress. Gives the function that takes its events, and what will be its result."""
        result: dict[str, Any] = {}
        with self._progress(title) as show:

            def on_event(name: str, payload: dict) -> None:
                if name == "step":
                    show(**payload)
                elif name == "result":
                    result.update(payload)
                else:
                    self.console.print(payload["text"])

            yield on_event, result

    @contextmanager
    def _progress(self, title: str):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        run = self.run
        if not self.console.is_terminal:
            every = max(1, (run.steps - run.first_step) // PLAIN_LINES)

            def show_line(step, loss, grad_norm, ms):
                if step % every == 0 or step in (run.first_step + 1, run.steps):
                    self.console.print(
                        f"{title}: step {step}/{run.steps}  loss {loss:.5f}  grad norm {grad_norm:.4f}  {ms:.0f} ms"
                    )

            yield show_line
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(f"{title:<15}", total=run.steps, completed=run.first_step, facts="starting")

            def show_bar(step, loss, grad_norm, ms):
                progress.update(task, completed=step, facts=f"loss {loss:.4f}  {ms:.0f} ms")

            yield show_bar

    def finish(self, parallel: dict, dense: dict | None, options: dict[str, Any]) -> None:
        """Print the table and the rest, and write the files that were asked for."""
        summary = summarise(self.run, parallel, dense)
        self._print(summary)
        if "sample" in parallel:
            self._print_sample(parallel["sample"])
        if options["json"]:
            Path(options["json"]).write_text(json.dumps(summary, indent=1) + "\n")
        if options["plot"]:
            plot(summary, options["plot"])
        for option in ("json", "plot"):
            if options[option]:
                self.console.print(f"wrote {options[option]}")

    def _print(self, summary: dict) -> None:
        from rich.table import Table

        parallel, dense, run = summary["parallel"], summary["dense"], self.run
        first, last = run.first_step + 1, run.steps
        kind = "peak memory a rank" if summary["memory"] == "allocator" else "memory a rank, counted*"
        table = Table()
        table.add_column("")
        dp = f" x dp {run.dp}" if run.dp > 1 else ""
        columns = [(parallel, f"tensor parallel (tp {run.tp}{dp})")]
        if dense:
            columns.insert(0, (dense, "dense twin"))
        for _, title in columns:
            table.add_column(title, justify="right")
        if dense:
            table.add_column("", justify="right")

        def row(name: str, show: Callable[[dict], str], comparison: str = "") -> None:
            table.add_row(name, *(show(result) for result, _ in columns), *([comparison] if dense else []))

        def ratio(key: str) -> str:
            return f"x {_largest(parallel, key) / _largest(dense, key):.2f}" if dense else ""

        row(f"loss, step {first}", lambda r: f"{r['loss'][0]:.5f}")
        row(f"loss, step {last}", lambda r: f"{r['loss'][-1]:.5f}")
        if "validation" in parallel:
            row("held-out loss", lambda r: f"{r['validation']['loss']:.5f}")
            row("held-out accuracy", lambda r: f"{r['validation']['accuracy']:.2%}")
        row("parameters a rank", lambda r: f"{_largest(r, 'params'):,}", ratio("params"))
        row(kind, lambda r: f"{_largest(r, 'peak_bytes') / 2**20:,.1f} MiB", ratio("peak_bytes"))
        row("step time", lambda r: f"{r['step_ms']:.1f} ms", ratio("step_ms"))
        row("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}")
        self.console.print(table)
        if summary["memory"] == "counted":
            self.console.print("* parameters, gradients and optimizer state; activations not included")
        if dense:
            self.console.print(
                f"largest relative difference to the dense twin over {len(dense['loss'])} steps: "
                f"loss {summary['max_rel_loss_diff']:.1e}, gradient norm {summary['max_rel_grad_norm_diff']:.1e}"
            )
        if "epoch_loss" in parallel:
            means = " ".join(f"{mean:.5f}" for mean in parallel["epoch_loss"])
            self.console.print(f"mean loss of each {PRESETS[run.preset].epoch} steps: {means}")
        phases = parallel["phases_ms"]
        self.console.print(
            f"a step: forward {phases['forward']:.1f} ms, backward {phases['backward']:.1f} ms, "
            f"optimizer {phases['optimizer']:.1f} ms; tensor-parallel communication, inside forward and backward: "
            f"{phases['communication']:.1f} ms"
        )

    def _print_sample(self, sample: dict[str, str]) -> None:
        from rich.panel import Panel
        from rich.text import Text

        text = Text(sample["prompt"], style="dim") + Text(sample["continuation"])
        self.console.print(Panel(text, title="held-out prompt (dim), and the model's continuation", title_align="left"))


def summarise(run: RunConfig, parallel: dict, dense: dict | None) -> dict[str, Any]:
    """Everything that was measured, as the JSON file has it."""
    import torch

    import tpfused

    summary = {
        "preset": run.preset,
        "tp": run.tp,
        "dp": run.dp,
        "steps": run.steps,
        "first_step": run.first_step,
        "dense": None,
        "parallel": _result(run, parallel),
        "max_rel_loss_diff": None,
        "max_rel_grad_norm_diff": None,
        "memory": "allocator" if run.device == "cuda" else "counted",
        "device": parallel["device_name"],
        "versions": {
            "tpfused": tpfused.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": run.as_dict(),
    }
    if dense is not None:
        result = _result(run, dense)
        for key in ("params", "peak_bytes"):
            (result[key],) = result.pop(f"{key}_per_rank")
        summary["dense"] = result
        for key in ("loss", "grad_norm"):
            summary[f"max_rel_{key}_diff"] = _largest_relative_difference(parallel[key], dense[key])
    return summary


def _result(run: RunConfig, result: dict) -> dict:
    times = dict(result["milliseconds"])
    step_ms = times.pop("step")
    shown = {key: result[key] for key in ("loss", "grad_norm", "params_per_rank", "peak_bytes_per_rank")}
    shown |= {
        "step_ms": step_ms,
        "tokens_per_s": run.batch_size * run.seq_len / step_ms * 1e3,
        "phases_ms": times,
    }
    epoch = PRESETS[run.preset].epoch
    if epoch:
        losses = result["loss"]
        epochs = [losses[start : start + epoch] for start in range(0, len(losses), epoch)]
        shown["epoch_loss"] = [sum(epoch) / len(epoch) for epoch in epochs]
    return shown | {key: result[key] for key in ("validation",) if key in result}


def _largest(result: dict, key: str) -> int | float:
    """Of one rank, or the largest of all ranks."""
    return result[key] if key in result else max(result[f"{key}_per_rank"])


def _largest_relative_difference(values: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(values, reference, strict=True))


def plot(summary: dict, path: str) -> None:
    """Both runs' losses, and below them how far apart they are."""
    from matplotlib.figure import Figure

    first = summary["first_step"] + 1
    losses = summary["parallel"]["loss"]
    steps = range(first, first + len(losses))
    figure = Figure(figsize=(8, 6), layout="constrained")
    if summary["dense"]:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        dense = summary["dense"]["loss"]
        top.plot(steps, dense, color="tab:gray", linewidth=4, alpha=0.5, label="dense twin")
        differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(losses, dense, strict=True)]
        bottom.semilogy(steps, [max(difference, 1e-17) for difference in differences], color="tab:red", linewidth=1)
        bottom.set_ylabel("relative difference")
        bottom.set_xlabel("step")
    else:
        top = figure.subplots()
        top.set_xlabel("step")
    top.plot(
        steps,
        losses,
        color="tab:blue",
        linewidth=1,
        label=f"tensor parallel, tp {summary['tp']} dp {summary['dp']}",
    )
    top.set_ylabel("loss")
    top.set_title(f"tpfused train, {summary['preset']} preset, {summary['config']['dtype']}")
    top.legend()
    figure.savefig(path, dpi=120)
