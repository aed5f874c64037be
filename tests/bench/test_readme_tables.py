"""README's performance tables, from files of results that are made up."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "readme_tables.py"
SPEC = importlib.util.spec_from_file_location("readme_tables", SCRIPT)
readme_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_tables)

META = {
    "card": "Some GPU",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "copy_gbps": 3005.4,
    "complete": True,
    "quick": False,
}


def row(op="softmax", variant="ours", us=100.0, **other):
    known = {"op": op, "case": "2x3 masked", "pass": "fwd", "dtype": "bf16", "variant": variant, "us": us}
    known |= {"ratio": us / 80, "ratio_iqr": 0.01, "floor": "copy", "correct": True, "comparable": True, "error": None}
    return known | other


@pytest.fixture
def place(tmp_path):
    """A README with markers, and a folder of results."""

    class Place:
        readme, results = tmp_path / "README.md", tmp_path / "results"

        def record(self, name, rows, **meta):
            (self.results / name).write_text(json.dumps({"meta": META | meta, "rows": rows}))

        def run(self, *options):
            command = [sys.executable, SCRIPT, "--readme", self.readme, "--results", self.results, *options]
            return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)

        def section(self):
            return readme_tables.section(self.results)

    Place.results.mkdir()
    Place.readme.write_text(f"# Title\n\n{readme_tables.BEGIN}\nold\n{readme_tables.END}\nafter\n")
    return Place()


def test_writes_and_checks(place):
    place.record("kernels-1xGPU.json", [row(), row(variant="compile", us=120.0), row(variant="eager", us=400.0)])
    done = place.run("--check")
    assert done.returncode == 1 and "differs" in done.stderr and "old" in place.readme.read_text()
    assert place.run().returncode == 0
    text = place.readme.read_text()
    assert text.startswith("# Title\n\n<!--") and text.endswith("-->\nafter\n") and "old" not in text
    assert "**Some GPU**, driver 580.1, torch 2.11.0, Triton 3.6.0, commit abc, 2026-01-02" in text
    assert "| 2x3 masked | fwd | 100.0 | 1.25 (0.01) of copy | compile: 1.50 |" in text
    assert place.run("--check").returncode == 0
    place.record("kernels-1xGPU.json", [row(us=90.0)])
    assert place.run("--check").returncode == 1


def test_readme_here_is_what_would_be_written():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_recorded(place):
    place.record("kernels-quick.json", [row()], quick=True)
    place.record("kernels-part.json", [row()], complete=False)
    place.record("train-2xGPU.json", [row()])
    assert place.section() == readme_tables.NOTHING


def test_newest_of_each_card_and_operation(place):
    place.record("kernels-a.json", [row(us=1.0), row("embedding", us=2.0)], date="2026-01-01T00:00:00+00:00")
    place.record("kernels-b.json", [row(us=3.0)], date="2026-01-03T00:00:00+00:00", commit=None)
    place.record("kernels-c.json", [row(us=4.0)], card="Another GPU")
    text = place.section()
    assert text.index("Another GPU") < text.index("Some GPU")
    assert "| 1.0 |" not in text and "| 2.0 |" in text and "| 3.0 |" in text and "| 4.0 |" in text
    assert "embedding: **Some GPU**" in text and "softmax: **Some GPU**" in text and "no commit, 2026-01-03" in text


def test_wrong_and_failed_are_said(place):
    rows = [row(correct=False), row(**{"pass": "bwd"}, us=80.0), row(case="other", us=80.0)]
    rows[2] |= {"us": None, "error": "OutOfMemoryError: x"}
    place.record("kernels-a.json", rows)
    lines = place.section().splitlines()
    assert "| 2x3 masked | fwd | wrong |  |  |" in lines and "| other | fwd | failed |  |  |" in lines


def test_without_markers(place):
    place.readme.write_text("nothing")
    done = place.run()
    assert done.returncode == 2 and "must hold" in done.stderr
