"""README's performance tables, from files of results that are made up."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tpfused.planning.layouts import Layout, Step, predict
from tpfused.planning.rates import CALLS, LATENCIES, Rates
from tpfused.planning.shape import PRESETS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "readme_tables.py"
SPEC = importlib.util.spec_from_file_location("readme_tables", SCRIPT)
readme_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme_tables)

KERNELS, OVERLAP, MODEL, PLAN = readme_tables.SECTIONS
META = {
    "card": "Some GPU",
    "gpus": 1,
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "nccl": "2.28.9",
    "settings": {"NCCL_NVLS_ENABLE": "0"},
    "size": "8B",
    "layers": 8,
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "rounds": 21,
    "copy_gbps": 3005.4,
    "complete": True,
    "quick": False,
}


def row(op="softmax", variant="ours", us=100.0, **other):
    known = {"op": op, "case": "2x3 masked", "pass": "fwd", "dtype": "bf16", "variant": variant, "us": us}
    known |= {"ratio": us and us / 80, "ratio_iqr": 0.01, "floor": "copy"}
    return known | {"correct": True, "comparable": True, "error": None} | other


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

        def section(self, section=KERNELS):
            return section.text(self.results)

    Place.results.mkdir()
    marked = (f"{section.begin}\nold\n{section.end}\nafter\n" for section in readme_tables.SECTIONS)
    Place.readme.write_text("# Title\n\n" + "".join(marked))
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
    place.record("overlap-narrow.json", [row()], case="8B")
    place.record("model-narrow.json", [row()], tp="2")
    place.record("model-short.json", [row()], sequence="64")
    place.record("overlap-sweep.json", [row(case="sweep M1")])
    place.record("kernels-part.json", [row()], complete=False)
    place.record("train-2xGPU.json", [row()])
    for section in readme_tables.SECTIONS:
        assert "No results have been recorded yet" in place.section(section)


def test_newest_of_each_card_and_operation(place):
    place.record("kernels-a.json", [row(us=1.0), row("embedding", us=2.0)], date="2026-01-01T00:00:00+00:00")
    place.record("kernels-b.json", [row(us=3.0)], date="2026-01-03T00:00:00+00:00", commit=None)
    place.record("kernels-c.json", [row(us=4.0)], card="Another GPU")
    text = place.section()
    assert text.index("Another GPU") < text.index("Some GPU")
    assert "| 1.0 |" not in text and "| 2.0 |" in text and "| 3.0 |" in text and "| 4.0 |" in text
    assert "embedding: **Some GPU**" in text and "softmax: **Some GPU**" in text and "no commit, 2026-01-03" in text
    assert text.rindex("| softmax (") < text.index("| embedding (")  # the newer one: in the benchmark's order


def test_wrong_and_failed_are_said(place):
    rows = [row(correct=False), row(**{"pass": "bwd"}, us=80.0), row(case="other", us=80.0)]
    rows[2] |= {"us": None, "error": "OutOfMemoryError: x"}
    place.record("kernels-a.json", rows)
    lines = place.section().splitlines()
    assert "| 2x3 masked | fwd | wrong |  |  |" in lines and "| other | fwd | failed |  |  |" in lines


@pytest.mark.parametrize("missing", [section.end for section in readme_tables.SECTIONS])
def test_without_markers(place, missing):
    place.readme.write_text(place.readme.read_text().replace(missing, ""))
    done = place.run()
    assert done.returncode == 2 and "must hold, once and in this order: " in done.stderr and missing in done.stderr


def overlap_row(variant, us, **other):
    known = {"op": "matmul_all_reduce", "case": "8B fc2", "floor": "max(matmul, collective)", "hidden": 0.5}
    known |= {"host_us": us and us / 2, "exposed_us": us and us - 80}
    return row(variant=variant, us=us, **known | other)


def test_overlap(place):
    rows = [overlap_row("matmul", 80.0), overlap_row("collective", 40.0), overlap_row("nccl_then_cublas", 120.0)]
    rows += [overlap_row("torch_symm_mem", None), overlap_row("ours_p2p", 88.0)]
    rows += [overlap_row("ours", 100.0)]
    rows += [each | {"case": "decode M1", "floor": "matmul"} for each in rows]
    rows += [overlap_row("ours", 7.0, case="sweep M1"), overlap_row("ours", 2000.0, op="mlp", **{"pass": "fwd+bwd"})]
    place.record("overlap-2xGPU.json", rows, gpus=2)
    place.record("overlap-4xGPU.json", [overlap_row("ours", 10.0)], gpus=4)
    lines = place.section(OVERLAP).splitlines()
    assert lines[0] == (
        "**2 x Some GPU**, driver 580.1, torch 2.11.0, NCCL 2.28.9, commit abc, 2026-01-02, 21 rounds, "
        "NCCL_NVLS_ENABLE=0. [overlap-2xGPU.json](benchmarks/results/overlap-2xGPU.json)"
    )
    assert lines[2:6] == [
        "| matmul_all_reduce (bf16) | pass | matmul us | collective us | ours us | ratio to floor (IQR) | hidden "
        "| nccl_then_cublas ratio | torch_symm_mem ratio | host us |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| 8B fc2 | fwd | 80.0 | 40.0 | 100.0 | 1.25 (0.01) | 0.50 | 1.50 | failed | 50 |",
        "| decode M1 | fwd | 80.0 | 40.0 | 100.0 | 1.25 (0.01), +20.0 us | 0.50 | 1.50 | failed | 50 |",
    ]
    assert "| 8B fc2 | fwd+bwd | 2,000.0 | 25.00 (0.01) | 0.50 | 1,000 |" in lines
    assert any("**4 x Some GPU**" in line for line in lines) and not any("sweep" in line for line in lines)


def model_row(variant, us, **other):
    known = {"op": "train", "case": "64 tokens TP 2", "pass": "fwd+bwd", "ratio": None, "tokens_per_s": us and 1e6 / us}
    known |= {"scaling": us and 1.9, "scaling_iqr": 0.01, "peak_share": 0.5}
    known |= {"times_ours": None if variant == "ours" else us}
    known |= {"peak_bytes": 2**30, "memory_share": 0.52, "deviation": 4e-3, "dense_deviation": 5e-3}
    return row(variant=variant, us=us, **known | other)


@pytest.mark.parametrize("own, title", [({"deviation_tokens": 64}, "error"), ({}, "error at 256 tokens")])
def test_model(own, title, place):
    """Older files have the error of other tokens than the rows'."""
    rows = [model_row("ours", 2.0), model_row("dtensor", 2.5), model_row("megatron", None, times_ours=None)]
    alone = {"case": "64 tokens TP 1", "scaling": None, "memory_share": None}
    rows += [model_row("ours", 4.0, **alone), model_row("dtensor", 4.5, **alone, correct=False)]
    nothing = dict.fromkeys(("peak_bytes", "memory_share", "peak_share", "deviation", "scaling"))
    rows += [model_row("ours", 1.0, op="decode", case="batch 1 TP 1", **nothing)]
    rows = [row | own for row in rows]
    place.record("model-2xGPU.json", rows, gpus=2)
    lines = place.section(MODEL).splitlines()
    assert lines[0] == (
        "**2 x Some GPU**, driver 580.1, torch 2.11.0, NCCL 2.28.9, commit abc, 2026-01-02, 21 rounds, 8 layers of 8B, "
        "NCCL_NVLS_ENABLE=0. [model-2xGPU.json](benchmarks/results/model-2xGPU.json)"
    )
    assert lines[2:6] == [
        "| train (bf16) | pass | us | tokens/s | x TP 1 (IQR) | of peak | GiB a rank (of TP 1's) | dtensor x ours "
        f"| megatron x ours | {title} (dense bf16's) |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| 64 tokens TP 2 | fwd+bwd | 2.0 | 500,000 | 1.90 (0.01) | 0.50 | 1.0 (0.520) | 2.50 | failed "
        "| 4.000e-03 (5.000e-03) |",
        "| 64 tokens TP 1 | fwd+bwd | 4.0 | 250,000 |  | 0.50 | 1.0 | wrong |  | 4.000e-03 (5.000e-03) |",
    ]
    assert lines[7:] == [
        "| decode (bf16) | pass | us | tokens/s |",
        "|---|---|--:|--:|",
        "| batch 1 TP 1 | fwd+bwd | 1.0 | 1,000,000 |",
    ]


SHAPE = asdict(PRESETS["llama3-8b"])
RATES = Rates(
    700.0, 400.0, 350.0, 3000.0, {"strided": 300.0, "joined": 200.0}, hidden=0.5,
    latency_us=dict.fromkeys(LATENCIES, 2.0), host_us=dict.fromkeys(CALLS, 50.0),
)  # fmt: skip


def checked(tp, **known):
    prediction = {"predicted_us": 9000.0, "error": -0.1, "parts_us": {}}
    return {"tp": tp, "measured_us": 10_000.0, "overlapped": tp > 1} | known | ({} if known else prediction)


def test_predicted_blocks(place):
    """Files of before predictions by rates, whose error is by parts; and newer ones, of other blocks beside them."""
    step = {"batch": 2, "tokens": 8192, "bytes": 2}
    place.record("plan-check-a.json", [checked(1), checked(2)], shape=SHAPE, step=step, layers=1, gpus=2)
    text = place.section(PLAN)
    assert "| 1 of llama3-8b, 8192 tokens | 1 | 10.00 | not recorded |  | 9.00 | -10.0% |" in text
    assert "forward and backward (16 bits)" in text and "by rates ms | error | by parts ms | error" in text
    assert "**2 x Some GPU**, driver 580.1, torch 2.11.0, NCCL 2.28.9, commit abc, 2026-01-02, 21 rounds, NCCL" in text

    by = {"by_rates": {"predicted_us": 10_500.0, "error": 0.05}, "by_parts": {"predicted_us": 8000.0, "error": -0.2}}
    newer = checked(2, measured_us_iqr=123.0, **by)
    facts = {"shape": SHAPE | {"layers": 3}, "gpus": 2, "dtype": "bf16"}
    place.record("plan-check-b.json", [newer], step=step, layers=8, **facts)
    text = place.section(PLAN)
    assert "| 8 of llama3-8b, 8192 tokens | 2 | 10.00 (0.12) | 10.50 | +5.0% | 8.00 | -20.0% |" in text
    assert "not recorded" in text and "(bf16)" in text
    place.record("plan-check-c.json", [newer], step=step, layers=1, shape=SHAPE, gpus=2, date="2026-01-03T00:00:00")
    assert "not recorded" not in place.section(PLAN)
    place.record("plan-check-d.json", [checked(1)], step=step, layers=4, complete=False, **facts)
    assert "4 of llama3-8b" not in place.section(PLAN)


def test_predicted_steps(place):
    """As a plan says, by the rates of the newest file of as many of that card that has all of them."""
    known = {"dp": 1, "batch": 1, "tokens": 64, "tp": 1, "pass": "fwd+bwd"}
    rows = [model_row("ours", 40_000.0, **known), model_row("dtensor", 50_000.0, **known)]
    rows += [model_row("ours", 1.0, **known | {"dp": 2}), model_row("ours", 3.0, **known | {"pass": "fwd"})]
    place.record("model-2xGPU.json", rows, gpus=2)
    assert "No results have been recorded yet: `tpfused plan --check`" in place.section(PLAN)
    for name, rates, gpus, date in (
        ("a", RATES, 2, 3),
        ("b", replace(RATES, matmul_tflops=1.0), 2, 1),
        ("older", replace(RATES, host_us={}), 2, 5),
        ("c", RATES, 4, 4),
    ):
        facts = {"dtype": "bf16", "rates": rates.as_dict(), "gpus": gpus, "date": f"2026-01-0{date}T00:00:00+00:00"}
        place.record(f"comm-{name}.json", [], **facts)
    text = place.section(PLAN)
    shape = replace(PRESETS["llama3-8b"], layers=8)
    us = predict(shape, Step(1, 1, 64, 2, True, False, True), Layout(1, 1, 1), RATES).work.total
    assert text.splitlines()[-1] == f"| 64 tokens TP 2 | 40.00 | {us / 1e3:,.2f} | {us / 40_000 - 1:+.1%} |"
    assert "comm-a.json" in text
