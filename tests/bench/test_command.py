"""`tpfused bench kernels`: options, the list, the files and tables of a measurement that is made up."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.fakes import FakeTimer
from tpfused import cli
from tpfused.bench import OPERATIONS, console, job, options
from tpfused.bench.case import Case, Floor, Variant, Work
from tpfused.bench.console import PlainConsole, RichConsole
from tpfused.bench.results import best_other, headline
from tpfused.cli.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "op": None,
    "case": None,
    "without": None,
    "quick": False,
    "list": False,
    "dtype": "bf16",
    "rounds": None,
    "eager_time": False,
    "seed": None,
    "json": None,
    "csv": None,
    "plot": None,
}
META = {
    "card": "Some GPU",
    "gpus": 1,
    "torch": "2.0",
    "triton": "3.0",
    "driver": "1.2",
    "commit": "abc",
    "quick": False,
}
META |= {"date": "2026-01-02T03:04:05+00:00"}

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def refused(capsys, *options, area: str = "kernels") -> str:
    """The one line on stderr of a wrong use."""
    try:
        code = cli.main(["bench", area, *options])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1, err
    return err


def test_help_teaches_and_needs_no_torch():
    code = "import sys; from tpfused.cli import main; sys.modules['torch'] = None; main(['bench', 'kernels', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    options = ["--" + name.replace("_", "-") for name in OPTIONS]
    for words in ("usage: tpfused bench kernels", "examples:", "Exit codes:", *OPERATIONS, *options):
        assert words in done.stdout, words


def test_script_lists_without_a_gpu():
    """And without an install, from any folder."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--list", "--quick", "--op", "softmax"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd="/", env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    assert "2x16x2048x2048 causal" in done.stdout and "gated_act" not in done.stdout


def test_list_shows_everything(capsys):
    assert cli.main(["bench", "kernels", "--list"]) == 0
    out = capsys.readouterr().out
    for words in (
        *OPERATIONS,
        "dgrad_act M8192 K8192 N7168 gelu",
        "training",
        "zipf",
        "8192x32064",
        "liger*",
        "cublaslt",
    ):
        assert words in out


def test_case_narrows_the_list(capsys):
    for text in ("zipf", "ZIPF"):
        assert cli.main(["bench", "kernels", "--list", "--case", text]) == 0
        assert capsys.readouterr().out.count("zipf") == 2


@no_gpu
def test_without_a_gpu(capsys):
    assert "needs a CUDA GPU" in refused(capsys)


@pytest.mark.parametrize(
    "options, told",
    [
        (["--op", "sofmax"], "did you mean 'softmax'?"),
        (["--op", "x"], "choose linear_act, gated_act"),
        (["--case", "nowhere"], "'nowhere'"),
        (["--without", "eager"], "choose compile, cublaslt"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--dtype", "int8"], "choose bf16, fp16, fp32"),
        (["--seed", "-1"], "--seed"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json cannot be written"),
        (["--csv", "/nowhere/x.csv"], "--csv /nowhere/x.csv cannot be written"),
        (["--plot", ""], "--plot needs a name, and '' is empty"),
        (["--csv", ""], "--csv needs a name, and '' is empty"),
        (["--plot", "/dev/null/plots"], "--plot /dev/null/plots"),
        (["--round", "x"], "--round"),
    ],
)
def test_wrong_use_is_one_line(capsys, options, told):
    assert told in refused(capsys, *options)


@pytest.mark.parametrize("area", ["kernels", "overlap", "comm", "model"])
def test_a_list_refuses_what_a_run_does(capsys, area):
    told = {"--rounds": "--rounds must be at least 1, not 0", "--dtype": "unknown dtype '0': choose bf16, "}
    if area == "kernels":
        told["--without"] = "--without 0: choose compile"
    else:
        told["--gpus"] = "--gpus must be at least 1, not 0"
    if area == "comm":
        told |= {option: f"{option} must be at least 1, not 0" for option in ("--tp", "--dp")}
    for option, reason in told.items():
        assert reason in refused(capsys, "--list", option, "0", area=area)


def test_one_file_for_both(capsys, tmp_path):
    assert "one file" in refused(capsys, "--json", str(tmp_path / "x"), "--csv", str(tmp_path / "x"))


def test_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "tpfused[bench]"' in refused(capsys, "--plot", "plots")


def made_up(op="gated_act", name="2x3 silu", direction="fwd", wrong=False):
    """A case whose "liger" is right but does less, and, if so asked, with a wrong kernel."""

    def build(setting):
        x = setting.random(4)
        variants = {
            "ours": Variant(lambda: x * 2 if wrong else x),
            "eager": Variant(lambda: x),
            "compile": Variant(lambda: x),
            "liger": Variant(lambda: x, comparable=False, note="half of the work"),
        }
        return Work(variants, lambda: x.double(), Floor("copy", lambda: None), 1e6)

    return Case(op, name, direction, ("ours", "eager", "compile", "liger"), build)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Measures cases with a timer that measures nothing: (exit code, folder with the files)."""
    monkeypatch.setattr(job, "describe", lambda options, rounds, seed: META | {"rounds": rounds, "seed": seed})
    monkeypatch.setattr(job, "_compile", lambda function: function)

    def run(chosen, **options):
        files = {"json": str(tmp_path / "run.json"), "csv": str(tmp_path / "run.csv"), "plot": str(tmp_path)}
        return job.measure(chosen, OPTIONS | files | options, FakeTimer(), device="cpu"), tmp_path

    return run


def test_a_variant_left_out(measure):
    code, folder = measure([made_up()], without=["compile", "liger"])
    assert code == 0
    assert [row["variant"] for row in json.loads((folder / "run.json").read_text())["rows"]] == ["ours", "eager"]


def test_files(measure):
    code, folder = measure([made_up(), made_up(direction="bwd"), made_up("softmax")], seed=7)
    assert code == 0
    found = json.loads((folder / "run.json").read_text())
    assert found["meta"]["complete"] is True and found["meta"]["copy_gbps"] == 3000.0
    assert (found["meta"]["rounds"], found["meta"]["seed"], found["meta"]["card"]) == (21, 7, "Some GPU")
    rows = found["rows"]
    assert [row["variant"] for row in rows[:4]] == ["ours", "eager", "compile", "liger"]
    assert [(row["op"], row["pass"]) for row in rows[::4]] == [
        ("gated_act", "fwd"),
        ("gated_act", "bwd"),
        ("softmax", "fwd"),
    ]
    assert rows[0]["ratio"] == 1.1 and rows[0]["correct"] is True
    with open(folder / "run.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["us"] for row in table] == [str(row["us"]) for row in rows]
    for name in ("gated_act", "softmax"):
        assert (folder / f"kernels-{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("option", ["json", "csv"])
def test_a_file_that_cannot_be_written_loses_no_result(measure, capsys, option):
    """Of any case."""
    with pytest.raises(UserError, match=f"--{option} /dev/full cannot be written: No space left on device"):
        measure([made_up(), made_up("softmax")], **{option: "/dev/full"})
    out = capsys.readouterr().out
    assert "gated_act, bf16" in out and "softmax, bf16" in out and "wrote /dev/full" not in out


def test_a_plot_that_cannot_be_drawn_is_one_line(measure, tmp_path, capsys):
    path = tmp_path / "kernels-gated_act.png"
    path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"^--plot {path} cannot be written: No space left on device$"):
        measure([made_up()])
    assert "gated_act, bf16" in capsys.readouterr().out


def test_a_wrong_variant_ends_with_1(measure, capsys):
    code, folder = measure([made_up(), made_up("softmax", wrong=True)])
    out = capsys.readouterr().out
    assert code == 1
    assert "wrong or failed: softmax 2x3 silu fwd: ours" in out and "WRONG" in out
    rows = json.loads((folder / "run.json").read_text())["rows"]
    assert [row["correct"] for row in rows if row["variant"] == "ours"] == [True, False]


def test_what_was_done_before_an_interruption_is_kept(measure, tmp_path):
    def interrupted(setting):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([made_up(), Case("softmax", "x", "fwd", ("ours",), interrupted)])
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["meta"]["complete"] is False and len(found["rows"]) == 4


def test_quick_takes_fewer_rounds(measure):
    _, folder = measure([made_up()], quick=True)
    assert json.loads((folder / "run.json").read_text())["rows"][0]["rounds"] == job.QUICK_ROUNDS
    _, folder = measure([made_up()], quick=True, rounds=5)
    assert json.loads((folder / "run.json").read_text())["rows"][0]["rounds"] == 5


@pytest.fixture
def rows(measure):
    _, folder = measure([made_up(), made_up(wrong=True, direction="bwd")], eager_time=True)
    return json.loads((folder / "run.json").read_text())["rows"]


def test_best_other_does_all_of_the_work(rows):
    assert best_other(rows[:4])["variant"] == "compile"
    rows[2]["correct"] = False
    assert best_other(rows[:4])["variant"] == "eager"
    assert best_other(rows[:1]) is None


def test_headline(rows):
    assert headline(rows[:4]) == "12.1 us, 1.100 x copy; compile 1.500 x"
    assert headline(rows[4:]).endswith("; WRONG: ours")
    assert (
        headline([rows[0] | {"us": None, "error": "OutOfMemoryError: too much"}])
        == "failed: OutOfMemoryError: too much"
    )


def test_plain_table(rows, capsys):
    rows[2] |= {"us": None, "error": "RuntimeError: no"}
    PlainConsole().table("gated_act, bf16", rows)
    title, heading, *lines = capsys.readouterr().out.strip("\n").splitlines()
    assert title == "gated_act, bf16"
    assert heading.split() == "case pass variant us (IQR) eager us floor us ratio (IQR) rate extra MiB".split()
    assert lines[0].split() == "2x3 silu fwd ours 12.1 (1.1) 100.0 11.0 1.100 (0.000) 83 GB/s 1.0".split()
    assert "failed: RuntimeError: no" in lines[2] and "half of the work" in lines[3] and "WRONG" in lines[4]


def test_rich_table(rows, monkeypatch, capsys):
    shown = RichConsole()
    monkeypatch.setattr(type(shown.console), "is_terminal", True)
    shown.console.width = 160
    rows[1] |= {"note": "[brackets]"}
    shown.table("gated_act", rows)
    with shown.progress(1) as progress:
        progress.start("a case")
        progress.done(rows[:4])
    out = capsys.readouterr().out
    assert "ratio (IQR)" in out and "[brackets]" in out and "WRONG" in out


def test_plain_without_rich(monkeypatch, measure, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(console.make_console()) is PlainConsole
    assert measure([made_up()])[0] == 0
    assert "1/1  gated_act 2x3 silu fwd: 12.1 us, 1.100 x copy; compile 1.500 x" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, capsys):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    path = tmp_path / "run.json"
    code = cli.main(["bench", "kernels", "--quick", "--op", "gated_act", "--json", str(path), "--eager-time"])
    assert code == 0, capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["card"] == torch.cuda.get_device_name()
    assert found["meta"]["copy_gbps"] > 0
    ours = [row for row in found["rows"] if row["variant"] == "ours"]
    assert [row["pass"] for row in ours] == ["fwd", "bwd"]
    for row in ours:
        assert row["correct"] and row["graph"] and row["autograd"]
        assert 0.5 < row["ratio"] < 10 and 0 < row["us"] <= row["eager_us"] * 1.2
        assert row["extra_bytes"] >= 8192 * 3584 * 2
