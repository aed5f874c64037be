"""What the user sees: a header, live progress, one table; and the files that were asked for."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpfused.cli.errors import UserError
from tpfused.cli.outputs import check_named, check_writable, writing
from tpfused.training.presets import PRESETS, RunConfig
from tpfused.training.summary import largest, provenance, summarise

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def check_outputs(options: Mapping[str, Any]) -> None:
    """Find out before the training what would spoil the report after it."""
    needed = {
        "rich": True,
        "matplotlib": options["plot"],
        "safetensors": options["save"] or options["resume"],
    }
    missing = [name for name, wanted in needed.items() if wanted and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'this needs {" and ".join(missing)}: pip install "tpfused[demo]"')
    for option in ("save", "resume", "text"):
        check_named(option, options[option])
    for option in ("plot", "json"):
        if options[option] is not None:
            _check_output(option, options)
    if options["plot"] and Path(options["plot"]).suffix.lower() not in PICTURES:
        raise UserError(f"--plot {options['plot']} must end in {', '.join(PICTURES)}")


def _check_output(option: str, options: Mapping[str, Any]) -> None:
    """Refuse a file that cannot be written, or that this run reads or writes something else to."""
    given = options[option]
    check_writable(option, given)
    path = Path(given).resolve()
    for other in ("text", "plot", "json"):
        if other != option and options[other] is not None and path == Path(options[other]).resolve():
            raise UserError(f"--{option} and --{other} are one file, {path}")
    for other in ("save", "resume"):
        if options[other] is not None and path.is_relative_to(Path(options[other]).resolve()):
            raise UserError(f"--{option} {given} is among the checkpoints of --{other} {options[other]}")


class Report:
    """Shows both runs as they go, and then side by side."""

    def __init__(self, run: RunConfig):
        from rich.console import Console

        self.run = run
        self.console = Console(highlight=False, markup=False)  # a path may hold [brackets]
        self.degrees = f"tp {run.tp}" + (f" x dp {run.dp}" if run.dp > 1 else "")
        backend = "NCCL" if run.device == "cuda" else "gloo"
        mode = f", {run.dp_mode}" if run.dp > 1 else ""
        self._say(f"{run.preset}: {PRESETS[run.preset].summary}")
        self._say(
            f"{self.degrees} on {run.device} ({backend}{mode}), {run.dtype}, {run.optimizer} {run.lr:g}, "
            f"{run.batch_size} sequences of {run.seq_len} a step"
        )
        if run.resume:
            self._say(f"resuming {run.resume}")

    @contextmanager
    def phase(self, title: str) -> Iterator[tuple[Callable[[str, dict], None], dict]]:
        """Show one run's progress. Gives the function that takes its events, and what will be its result."""
        from tpfused.training.progress import show_progress

        result: dict[str, Any] = {}
        with show_progress(self.console, title, self.run.first_step, self.run.steps) as progress:

            def on_event(name: str, payload: dict) -> None:
                if name == "step":
                    progress.step(**payload)
                elif name == "status":
                    progress.status(**payload)
                elif name == "saved":
                    self._say(f"saved {payload['path']}")
                elif name == "result":
                    result.update(payload)

            yield on_event, result

    def finish(self, parallel: dict, dense: dict | None, options: Mapping[str, Any]) -> None:
        """Print the table and the rest, and write the files that were asked for."""
        summary = summarise(self.run, parallel, dense)
        self._print_table(summary)
        self._print_notes(summary)
        if "sample" in parallel:
            self._print_sample(parallel["sample"])
        if options["json"]:
            whole = summary | provenance(self.run, parallel["device_name"])
            with writing("json", options["json"]):
                Path(options["json"]).write_text(json.dumps(whole, indent=1) + "\n")
            self._say(f"wrote {options['json']}")
        if options["plot"]:
            from tpfused.training.plot import plot

            plot(summary, f"{self.run.preset}, {self.degrees}, {self.run.dtype}", options["plot"])
            self._say(f"wrote {options['plot']}")

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)  # a log keeps its lines whole; panels and tables fit the width

    def _print_table(self, summary: dict) -> None:
        from rich.table import Table

        parallel, dense, run = summary["parallel"], summary["dense"], self.run
        table = Table(
            "", *(["dense twin"] if dense else []), f"tensor parallel\n{self.degrees}", *(["ratio"] if dense else [])
        )
        for column in table.columns[1:]:
            column.justify = "right"

        def row(name: str, show: Callable[[dict], str], compared: str | None = None) -> None:
            cells = [show(dense), show(parallel), ""] if dense else [show(parallel)]
            if dense and compared:
                cells[-1] = f"{largest(parallel, compared) / largest(dense, compared):.2f}"
            table.add_row(name, *cells)

        row(f"loss, step {run.first_step + 1}", lambda r: f"{r['loss'][0]:.5f}")
        row(f"loss, step {run.steps}", lambda r: f"{r['loss'][-1]:.5f}")
        if "validation" in parallel:
            row("held-out loss", lambda r: f"{r['validation']['loss']:.5f}")
            row("held-out accuracy", lambda r: f"{r['validation']['accuracy']:.2%}")
        row("parameters a rank", lambda r: f"{largest(r, 'params'):,}", "params")
        memory = "peak memory a rank" if summary["memory"] == "allocator" else "memory a rank, counted*"
        row(memory, lambda r: f"{largest(r, 'peak_bytes') / 2**20:,.1f} MiB", "peak_bytes")
        row("step time", lambda r: f"{r['step_ms']:.1f} ms", "step_ms")
        row("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}")
        if dense:
            table.add_section()
            for name, key in (("loss", "loss"), ("grad norm", "grad_norm")):
                table.add_row(f"largest {name} difference**", "", f"{summary[f'max_rel_{key}_diff']:.1e}", "")
        self.console.print(table)
        if summary["memory"] == "counted":
            self._say("*  parameters, gradients and optimizer state; activations are not included")
        if dense:
            self._say(f"** relative to the dense twin's, over {len(dense['loss'])} steps")

    def _print_notes(self, summary: dict) -> None:
        result, run = summary["parallel"], self.run
        if result.get("epoch_loss"):
            means = "  ".join(f"{mean:.5f}" for mean in result["epoch_loss"])
            self._say(f"mean loss of each epoch of {PRESETS[run.preset].epoch} steps: {means}")
        times = {name: f"{ms:.1f} ms" for name, ms in result["phases_ms"].items()}
        self._say(
            f"a tensor-parallel step: forward {times['forward']}, backward {times['backward']}, "
            f"optimizer {times['optimizer']};\n"
            f"  {times['communication']} of forward and backward are tensor-parallel communication, waiting included"
        )
        if run.device == "cpu" and run.world > 1:
            twin = "; so had the dense twin" if summary["dense"] else ""
            cores = len(os.sched_getaffinity(0))
            if run.world > cores:
                self._say(f"{run.world} ranks shared {cores} cores")
            else:
                self._say(f"each rank had {run.threads} of this CPU's cores{twin}")

    def _print_sample(self, sample: dict[str, str]) -> None:
        from rich.panel import Panel
        from rich.text import Text

        text = Text(sample["prompt"], style="dim") + Text(sample["continuation"])
        self.console.print(Panel(text, title="held-out prompt (dim), and the model's continuation", title_align="left"))
