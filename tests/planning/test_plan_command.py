"""`tpfused plan`: what it teaches and refuses, a plan from numbers, from a file, and blocks that are run."""

import argparse
import json
import re
from dataclasses import replace

import pytest
import torch

from tpfused import cli
from tpfused.bench.console import PlainConsole
from tpfused.cli.plan import add_arguments
from tpfused.planning import check, job, report
from tpfused.planning.block import block
from tpfused.planning.layouts import Step
from tpfused.planning.options import check_small, shape_of, step_of
from tpfused.planning.rates import CALLS, LATENCIES, Rates
from tpfused.planning.shape import Shape
from tpfused.planning.time import Time, time_of

NUMBERS = "--tflops 700 --memory-gbps 3000 --bus-gbps 330 --latency-us 15 --memory-gib 80".split()
TINY = "--hidden 32 --ffn 96 --heads 4 --kv-heads 2 --vocab 64 --layers 2 --sequence 32 --cpu".split()
SHAPE = Shape(32, 96, layers=2, heads=4, kv_heads=2, vocab=64)
STEP = Step(2, 1, 32, 4, sequence_parallel=True, checkpointed=False, overlap=False, kernels=False)
RATES = Rates(1.0, 1.0, 1.0, 1.0, {"strided": 1.0, "joined": 1.0})
TINY_OF_HELP = "--hidden 256 --ffn 1024 --layers 1 --heads 8 --vocab 1000 --sequence 128 --dtype fp32".split()
TINY_OF_HELP += ["--tolerance", "100"]  # no prediction that is too short, as a CPU's are, is further off


def plan(*options):
    return cli.main(["plan", *options])


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as end:
        plan("--help")
    told = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("examples:", "tpfused bench comm --json", "Exit codes:", "bubble", "--no-overlap", "llama3-70b"):
        assert words in told, words
    assert "by rates" in told and "by parts" in told and "passes are elementwise kernels" in told
    assert " ".join(["tpfused plan --check --cpu", *TINY_OF_HELP]) in " ".join(told.replace("\\", "").split())


def test_the_example_of_help_fits_a_cpu():
    options = vars(argparse_of_plan(["--check", "--cpu", *TINY_OF_HELP]))
    shape = shape_of(options)
    check_small(shape, step_of(options, shape, 2), 1)
    row = report.checked_row(1, Time(matmul=1.0), Time(matmul=1.0), 1000.0, 1.0, False)
    assert report.is_off(row, 15) and not report.is_off(row, options["tolerance"])


def argparse_of_plan(options):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    "options, told",
    [
        ([], "give --model (llama3-8b, llama3-70b, gpt2), or --hidden, --ffn"),
        (["--model", "llama4"], "unknown model 'llama4'"),
        (["--model", "gpt2", "--heads", "7"], "hidden 768 is no multiple of heads 7"),
        (["--model", "gpt2", "--sequence", "2048"], "--sequence 2048 is more than the model's 1024 positions"),
        (["--model", "gpt2", "--gpus", "0"], "--gpus must be at least 1, not 0"),
        (["--model", "gpt2", "--micro-batch", "-1"], "--micro-batch must be at least 1"),
        (["--model", "gpt2", "--tflops", "nan"], "--tflops must be above 0"),
        (["--model", "gpt2", "--gpus", "2", "--tflops", "1"], "give --memory-gbps, --memory-gib, --bus-gbps as well"),
        (["--model", "gpt2", "--gpus", "2", "--bus-gbps", "1"], "give --tflops, --memory-gbps, --memory-gib as well"),
        (["--model", "gpt2", "--latency-us", "1"], "--latency-us goes with --bus-gbps"),
        (["--model", "gpt2", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--model", "gpt2", "--style", "bert"], "'bert'"),
        (
            ["--model", "gpt2", "--gpus", "8", "--tp", "8", *NUMBERS],
            "of 8 GPUs, --tp 8: tp 8 does not divide 12 heads",
        ),
        (["--model", "gpt2", "--gpus", "4", "--tp", "3", *NUMBERS], ", --tp 3: tp 3 does not divide 4 GPUs\n"),
        (["--model", "gpt2", "--gpus", "4", "--batch", "3", "--dp", "4", *NUMBERS], "a batch of 3 is not whole"),
        (["--model", "gpt2", "--from", "/nowhere.json"], "--from /nowhere.json: No such file"),
        (["--model", "gpt2", "--gpus", str(10**13 + 1), "--tp", "2", *NUMBERS], "no layout of 10000000000001 GPUs"),
        (["--model", "gpt2", "--json", "/nowhere/x.json"], "there is no folder"),
        ([*TINY, "--check", "--tp", "3"], "--tp 3: tp 3 does not divide 2 ranks; tp 3 does not divide 4 heads"),
        ([*TINY, "--gpus", "2", "--tp", "3", "--pp", "2"], "of 2 ranks, --tp 3, --pp 2: tp 3 does not divide 2 ranks"),
        ([*TINY, "--check", "--from", "x.json"], "--check measures blocks here, and takes no --from"),
        ([*TINY, "--check", "--tflops", "1", "--dp", "2"], "takes no --tflops, --dp"),
        (["--model", "llama3-8b", "--check", "--cpu"], "218,112,000 parameters and 8,192 tokens of 14,336 features"),
        ([*TINY[:-3]], "give --sequence"),
    ],
)
def test_refuses(options, told, capsys):
    assert plan(*options) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_checks_on_a_cpu_only_if_told_to(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert plan(*TINY[:-1], "--check") == 2
    assert "--check runs blocks on GPUs, and torch finds none here" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_loses_no_result(capsys):
    assert plan("--model", "gpt2", "--gpus", "2", "--json", "/dev/full", *NUMBERS) == 2
    out, err = capsys.readouterr()
    assert "step ms" in out and "fastest" in out.splitlines()[-1] and "wrote" not in out
    assert err == "tpfused plan: --json /dev/full cannot be written: No space left on device\n"


def test_a_plan_from_numbers(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert plan("--model", "llama3-8b", "--gpus", "8", "--batch", "32", "--json", str(path), *NUMBERS) == 0
    out = capsys.readouterr().out
    assert "llama3-8b of 8.03 B parameters on 8 GPUs, 32 sequences of 8192 tokens a step, bf16" in out
    assert "priced by --bus-gbps in groups of any size" in out and "from the command line" in out
    assert "measured" not in out
    found = json.loads(path.read_text())
    rows = found["rows"]
    assert found["meta"]["shape"]["hidden"] == 4096 and found["meta"]["rates"]["matmul_tflops"] == 700
    assert all(row["tp"] * row["dp"] * row["pp"] == 8 for row in rows) and len(rows) == 10
    fit = [row["fits"] for row in rows]
    assert fit == sorted(fit, reverse=True) and fit[0] and not fit[-1]
    steps = [row["step_us"] for row in rows if row["fits"]]
    assert steps == sorted(steps)
    for row in rows:
        assert row["fits"] == (row["memory_bytes"]["total"] <= 0.9 * 80 * 2**30)
        assert row["recomputed"] or row["fits"]
        held = row["activation_bytes"]
        kept, again = (held[f"{what}, SP"] for what in ("kept", "recomputed"))
        assert row["memory_bytes"]["activations"] == (again if row["recomputed"] else kept) and again < kept
        whole = held["kept"]
        assert kept < whole if row["tp"] > 1 else kept == whole
    lines = [line for line in out.splitlines() if re.match(r" \d", line)]
    assert len(lines) == 3 * 10 and max(map(len, lines)) < 100
    assert lines[9].endswith("yes        does not fit") and "does not fit" not in lines[0]
    assert lines[10].split()[:3] == lines[0].split()[:3]
    tp, dp, pp, step = lines[0].split()[:4]
    last = f"fastest that fits: tp {tp}, dp {dp}, pp {pp}: {step} ms a step, "
    assert out.splitlines()[-1].startswith(last) and "memory 3,000 GB/s" in out


def test_where_nothing_fits_the_last_line_is_of_what_needs_least(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert plan("--model", "llama3-70b", "--gpus", "8", "--json", str(path), *NUMBERS) == 0
    least = min(json.loads(path.read_text())["rows"], key=lambda row: row["memory_bytes"]["total"])
    layout = ", ".join(f"{name} {least[name]}" for name in ("tp", "dp", "pp"))
    needed = f"{least['memory_bytes']['total'] / 2**30:,.1f} GiB a GPU, blocks recomputed"
    assert capsys.readouterr().out.endswith(f"\nnone fits in 90 % of 80.0 GiB: {layout} needs least: {needed}\n")


def test_rates_are_told_without_powers_of_ten():
    told = report.tell_rates(Rates(653.23, 99.96, 0.0123, 4245.2, {"strided": 331.8, "joined": 22.09}))
    assert told.startswith("matmul 653 TFLOP/s, attention 100 TFLOP/s, backward 0.0123 TFLOP/s, memory 4,245 GB/s, ")
    assert told.endswith("passes 332 (strided) and 22.1 (joined) billion elements a second")


def test_options_change_a_plan(tmp_path):
    usual_ones = ["--model", "llama3-8b", "--gpus", "2", "--tp", "2", *NUMBERS, "--memory-gib", "500"]

    def step_us(*options):
        path = tmp_path / "plan.json"
        assert plan(*usual_ones, "--json", str(path), *options) == 0
        (row,) = json.loads(path.read_text())["rows"]
        return row["step_us"]

    usual = step_us()
    assert step_us("--no-overlap") > usual and step_us("--checkpoint-activations") > usual
    assert step_us("--layers", "16") < usual and step_us("--attention-tflops", "700") < usual
    assert step_us("--bus-gbps", "100") > usual


@pytest.mark.parametrize("found, told", [(0, "none"), (2, "2")])
def test_what_is_not_here_is_not_measured(monkeypatch, capsys, found, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert plan("--model", "llama3-70b", "--gpus", "64") == 2
    out, err = capsys.readouterr()
    assert f"64 GPUs cannot be measured here, where torch finds {told}: give --from FILE, written by" in err
    assert err.endswith("by --tflops, --memory-gbps, --memory-gib and --bus-gbps\n") and not out


def test_a_short_run(tmp_path, capsys):
    """Two gloo workers measure what a plan needs."""
    path = tmp_path / "plan.json"
    assert plan(*TINY, "--gpus", "2", "--rounds", "1", "--memory-gib", "5", "--json", str(path)) == 0
    found = json.loads(path.read_text())
    rates = found["meta"]["rates"]
    assert found["meta"]["memory_bytes"] == 5 * 2**30
    assert rates["matmul_tflops"] > 0 and rates["pass_rates"].keys() == {"strided", "joined"}
    assert rates["latency_us"].keys() == set(LATENCIES) and rates["hidden"] == 0  # by gloo
    assert rates["host_us"].keys() == set(CALLS) and all(us > 0 for us in rates["host_us"].values())
    assert not found["meta"]["step"]["overlap"] and not found["meta"]["step"]["kernels"]
    assert {(fit["op"], fit["ranks"]) for fit in rates["fits"]} == {(op, 2) for op in job.USED}
    assert [row["fits"] for row in found["rows"]] == [True] * 3
    out = capsys.readouterr().out
    assert "from a short run on 2 x CPU" in out and "parameters on 2 ranks, " in out and "GiB a rank" in out
    assert "GPU" not in out and "does not tell" not in out
    assert "us (matmul), " in out and "us (matmul on several ranks), " in out and "us (any other call)" in out


@pytest.mark.parametrize("sequence", ["32", "1"])
def test_blocks_are_run(tmp_path, capsys, sequence):
    """On a CPU only the machinery can be looked at: a small block's time is that of Python."""
    path = tmp_path / "check.json"
    options = [*TINY, "--check", "--gpus", "2", "--rounds", "2", "--dtype", "fp32", "--json", str(path)]
    options += ["--sequence", sequence]
    assert plan(*options, "--tolerance", "1e6") == 0, capsys.readouterr()
    found = json.loads(path.read_text())
    assert [row["tp"] for row in found["rows"]] == [1, 2] and found["meta"]["complete"]
    meta = found["meta"]
    assert meta["rounds"] == 2 and meta["dtype"] == "fp32" and meta["measured_us"] and meta["rates"]["host_us"]
    for row in found["rows"]:
        assert row["measured_us"] > 0 and row["measured_us_iqr"] >= 0 and row["overlapped"] is False
        assert len(row["alone_us"]) == 12 + 2 + 3 and all(us > 0 for us in row["alone_us"].values())
        for how in ("by_rates", "by_parts"):
            predicted, parts = row[how]["predicted_us"], row[how]["parts_us"]
            for name in ("matmul", "attention", "elementwise"):
                # On a busy machine the rates of small sizes may come out as those of no time at all.
                assert parts[name] > 0 or (how == "by_rates" and parts[name] == 0), (how, name)
            assert parts["hidden"] == 0
            assert (parts["communication"] > 0) is (row["tp"] == 2)
            assert (parts["host"] > 0) is (how == "by_rates")
            host = parts.pop("host")
            assert predicted == pytest.approx(max(host, sum(parts.values())), rel=1e-3)
            assert row[how]["error"] == pytest.approx(predicted / row["measured_us"] - 1, abs=1e-3)
        # What a plan says of this block, from rates that a file keeps.
        setting = replace(STEP, tokens=int(sequence)).setting(row["tp"])
        work = block(SHAPE, replace(setting, overlap=False))
        time = time_of(work.forward + work.backward, Rates.from_dict(meta["rates"]), row["tp"], False)
        assert row["by_rates"]["predicted_us"] == pytest.approx(2 * time.total, abs=0.1)
    out = capsys.readouterr().out
    assert "one after the other" in out and "by rates: what tpfused plan predicts" in out and "fp32, 2 rounds" in out


def test_a_block_that_cannot_be_built_is_one_line(monkeypatch, capfd):
    """As one that is too large for its GPU: whatever is wrong, a worker says it, and no traceback."""
    monkeypatch.setattr(Shape, "__post_init__", lambda self: None)
    odd = "--hidden 30 --ffn 96 --heads 10 --vocab 64 --layers 1 --sequence 8 --cpu --check --gpus 1 --rounds 1".split()
    assert plan(*odd) == 2
    err = capfd.readouterr().err
    assert err.endswith("plan: a block at tp 1: ValueError: rotary positions need an even head_dim, not 3\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options, ranks", [([], 4), (["--heads", "6"], 2), (["--tp", "2"], 2), (["--tp", "1"], 4), (["--gpus", "1"], None)]
)
def test_a_check_measures_the_rates_that_a_plan_uses(monkeypatch, options, ranks):
    """Of layers that the same groups split: those of the largest tp that splits the heads, or was asked for."""
    asked = []

    def run(command, function, argument, worker, world, on_event):
        asked.append(argument["split"])
        return 3

    for module in (check, job):
        monkeypatch.setattr(module, "run_on_ranks", run)
    sizes = [*TINY, "--hidden", "48", "--gpus", "4", *options]
    assert plan(*sizes) == plan(*sizes, "--check") == 3
    assert asked == [None if ranks is None else [list(range(i, i + ranks)) for i in range(0, 4, ranks)]] * 2


def test_a_prediction_that_is_off_ends_with_1(monkeypatch, capsys):
    """By rates 16 % below what was measured, twice over; that by parts is right, and does not count."""
    asked = {}

    def run(command, function, argument, worker, world, on_event):
        asked.update(argument)
        on_event("rates", RATES.as_dict() | {"memory_bytes": 1, "measured_us": {}, "fits": None})
        for setting in argument["settings"]:
            on_event("start", "blocks")
            on_event("checked", (setting, {check.BLOCKS: 200.0}, 5.0, True))
        return 0

    monkeypatch.setattr(check, "run_on_ranks", run)
    monkeypatch.setattr(check, "rates_of", lambda known, fits: (RATES, {}))
    monkeypatch.setattr(check, "by_rates", lambda shape, setting, rates: Time(matmul=84.0))
    monkeypatch.setattr(check, "by_parts", lambda shape, setting, us, fits: Time(matmul=100.0))
    assert plan(*TINY, "--check", "--gpus", "1") == 1
    out = capsys.readouterr().out
    assert "tp 1: the prediction by rates is off by -16.0%, beyond 15 %" in out
    assert asked["rounds"] == 21 and "bf16, 21 rounds" in out
    assert plan(*TINY, "--check", "--gpus", "1", "--tolerance", "17") == 0


def test_checked_table(capsys):
    time = Time(matmul=8000.0, attention=2000.0, elementwise=1000.0, communication=900.0, hidden=400.0, host=7000.0)
    row = report.checked_row(2, time, replace(time, host=12600.0), 12000.0, 123.0, True)
    assert row["by_rates"]["predicted_us"] == 11500.0 and row["by_rates"]["error"] == -0.0417
    assert row["by_parts"]["predicted_us"] == 12600.0 and row["measured_us_iqr"] == 123.0
    report.show_checked(PlainConsole(), "ms", [row], 15)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert "2 12.00 0.12 11.50 -4.2% 12.60 +5.0% overlapped".split() in lines
    assert "2 by rates 8.00 2.00 1.00 0.90 0.40 7.00".split() in lines
    assert report.is_off(row, 4) and not report.is_off(row, 4.5)


@pytest.mark.gpu
def test_the_8b_block_on_gpus(tmp_path, capsys):
    """Within 15 % of the measured time, on one GPU and on two."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    path = tmp_path / "check.json"
    gpus = str(min(2, torch.cuda.device_count()))
    code = plan("--check", "--model", "llama3-8b", "--gpus", gpus, "--json", str(path))
    out = capsys.readouterr().out
    assert code == 0, out
    rows = json.loads(path.read_text())["rows"]
    assert [row["tp"] for row in rows] == [1, 2][: int(gpus)]
    assert all(abs(row["by_rates"]["error"]) <= 0.15 for row in rows)
