"""`tpfused bench overlap`: what it refuses and lists, a whole run of small cases on the CPU, what becomes of times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpfused import cli
from tpfused.bench.console import PlainConsole
from tpfused.bench.measure import Uncapturable
from tpfused.bench.overlap import cases, job, worker, works
from tpfused.bench.overlap.cases import OPERATIONS, Case
from tpfused.bench.overlap.worker import Sampled
from tpfused.bench.overlap.works import Place, Work
from tpfused.bench.results import headline

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "op": None, "case": None, "sweep": False, "quick": False, "list": False, "dtype": "bf16", "gpus": 2, "rounds": 2,
    "seed": 1, "json": None, "csv": None, "plot": None,
}  # fmt: skip
HERE = Place(1, torch.device("cpu"), torch.bfloat16)
CASE = Case("matmul_all_reduce", "shape", "fwd", 2, 3, 4)


def test_help_teaches():
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    for words in ("usage: tpfused bench overlap", "hidden", "examples:", "Exit codes:", *OPERATIONS):
        assert words in done.stdout, words
    for name in OPTIONS:
        assert f"--{name}" in done.stdout


def test_lists_without_a_gpu(capsys):
    assert cli.main(["bench", "overlap", "--list", "--sweep"]) == 0
    told = capsys.readouterr().out
    assert "all_gather_matmul 70B fc1 fwd: M8192 K8192 N28672" in told and "mlp GPT-3 fwd+bwd" in told
    assert "matmul_all_reduce decode M64 fwd: M64 K14336 N8192 in a CUDA graph" in told
    for op in OPERATIONS[:4]:
        assert told.count(f"{op} sweep M") == 15 and f"{op} sweep M16384 fwd" in told
    assert "mlp sweep" not in told


def test_quick_has_a_case_of_each_operation(capsys):
    assert cli.main(["bench", "overlap", "--list", "--quick"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in told} == set(OPERATIONS) and len(told) == 6


@pytest.mark.parametrize(
    "options, told",
    [
        (["--op", "matmul"], "unknown operation 'matmul'"),
        (["--case", "405B"], "no case has '405B'"),
        (["--case", "sweep"], "no case has 'sweep'"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--gpus", "1"], "this needs at least 2 GPUs, and "),
    ],
)
def test_refuses(options, told, capsys):
    assert cli.main(["bench", "overlap", *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_what_can_be_done_without_a_gpu(capsys):
    assert cli.main(["bench", "overlap", "--quick"]) == 2
    told = capsys.readouterr().err
    assert "this needs at least 2 GPUs, and torch finds none here (" in told and "tpfused bench comm --cpu" in told


def test_sizes_on_some_ranks():
    """Tokens that are split are rounded up; a decode case's input features are each rank's."""
    shape = "sweep", "fwd", 5, 8, 16
    assert Case("all_gather_matmul", *shape).on(4).m == Case("matmul_reduce_scatter", *shape).on(4).m == 8
    assert Case("matmul_all_reduce", *shape).on(4).m == Case("matmul_all_gather", *shape).on(4).m == 5
    assert Case("matmul_all_reduce", *shape, decode=True).on(4).k == 32


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    """Two gloo workers; the operations take their plain path, but every row must be there and right."""
    for name, shape in (("FC1", (8, 16, 24)), ("FC2", (8, 24, 16)), ("MLP", (8, 16, 24))):
        monkeypatch.setattr(cases, name, {"8B": shape})
    monkeypatch.setattr(cases, "GATHERED", ("8B",))
    monkeypatch.setattr(cases, "DECODE", {"decode M1": (1, 12, 16)})
    monkeypatch.setattr(cases, "SWEEP", [1, 4])
    path = tmp_path / "run.json"
    files = {"json": str(path), "csv": str(tmp_path / "run.csv"), "plot": str(tmp_path / "plots")}
    assert job.execute(OPTIONS | files | {"sweep": True}, device="cpu") == 0, capsys.readouterr()
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["gpus"] == 2 and found["meta"]["quick"] is False
    measured = {}
    for row in found["rows"]:
        measured.setdefault((row["op"], row["case"]), []).append(row["variant"])
        assert row["us"] > 0 and row["ratio"] > 0 and row["host_us"] > 0 and row["error"] is None
        assert row["rounds"] == 2 and row["calls"] >= 2 and row["graph"] is None
        part = row["variant"] in ("matmul", "collective")
        assert row["correct"] is (None if part else True) and (row["hidden"] is None) is part
        alone = row["op"] == "mlp" or "decode" in row["case"]
        assert row["floor"] == ("matmul" if alone else "max(matmul, collective)")
    simple = ["matmul", "collective", "nccl_then_cublas", "ours"]
    expected = {(op, name): simple for op in OPERATIONS[:4] for name in ("8B", "sweep M1", "sweep M4")}
    expected["matmul_all_reduce", "decode M1"] = simple
    expected["mlp", "8B"] = ["matmul", "collective", "megatron_style", "ours"]
    assert measured == expected
    sizes = {(row["op"], row["case"]): (row["m"], row["k"], row["n"]) for row in found["rows"]}
    assert sizes["all_gather_matmul", "sweep M1"] == (2, 16, 24)
    assert sizes["matmul_all_reduce", "decode M1"] == (1, 24, 16)
    told = capsys.readouterr().out
    assert "mlp 8B fwd+bwd" in told and "host us" in told
    assert "extra MiB" not in told and "unchecked" not in told
    pictures = {f"overlap-{op}.png" for op in OPERATIONS} | {f"overlap-{op}-sweep.png" for op in OPERATIONS[:4]}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == pictures


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fails():
    raise NotImplementedError("not here\nand more about it")


def ones():
    return torch.ones(3)


@pytest.fixture
def measure(alone, monkeypatch):
    """Rows, by variant, of a case that is these variants beside `ones`."""

    def run(timer=None, decode=False, **variants):
        variants = {"matmul": ones, "collective": ones, "nccl_then_cublas": ones} | variants
        work = Work(variants, ("matmul", "collective"), "nccl_then_cublas", 1e6, {"half": "no bias"})
        monkeypatch.setattr(worker, "build", lambda case, place: work)
        case = Case("matmul_all_reduce", "shape", "fwd", 2, 3, 4, decode)
        rows = worker.measure(case, HERE, timer, rounds=2)
        keys = {tuple(row) for row in rows}
        assert len(keys) == 1
        return {row["variant"]: row for row in rows}

    return run


def test_a_wrong_result_is_found(measure):
    rows = measure(ours=lambda: ones() * 1.1, ours_p2p=lambda: ones()[:2], half=lambda: ones() / 2, torch_symm_mem=ones)
    assert {name: row["correct"] for name, row in rows.items() if row["comparable"]} == {
        "nccl_then_cublas": True, "torch_symm_mem": True, "ours_p2p": False, "ours": False,
    }  # fmt: skip
    assert rows["half"]["correct"] is None and rows["half"]["note"] == "no bias" and rows["half"]["us"] > 0
    assert [name for name, row in rows.items() if job.is_bad(row)] == ["ours", "ours_p2p"]


def test_what_fails_leaves_the_others(measure, capsys):
    rows = measure(torch_symm_mem=fails, ours_p2p=fails, ours=ones)
    assert rows["torch_symm_mem"]["error"] == rows["ours_p2p"]["error"] == "NotImplementedError: not here"
    assert rows["ours"]["correct"] is True and rows["ours"]["ratio"] > 0
    assert [name for name, row in rows.items() if job.is_bad(row)] == ["ours_p2p"]
    PlainConsole().table("some", list(rows.values()))
    assert capsys.readouterr().out.count("failed: NotImplementedError: not here") == 2


def test_without_its_floor_or_what_is_right_a_case_has_times(measure):
    rows = measure(collective=fails, nccl_then_cublas=fails, ours=ones)
    ours = rows["ours"]
    assert ours["us"] > 0 and ours["ratio"] is ours["floor"] is ours["hidden"] is ours["correct"] is None
    assert not job.is_bad(ours) and headline(list(rows.values())) == f"{ours['us']:.1f} us"
    PlainConsole().table("some", list(rows.values()))
    everything = dict.fromkeys(("matmul", "collective", "nccl_then_cublas", "ours"), fails)
    assert all(row["us"] is None for row in measure(**everything).values())


def test_a_case_that_cannot_be_built_is_ours_that_failed(alone, monkeypatch):
    monkeypatch.setattr(worker, "build", lambda case, place: fails())
    (row,) = worker.measure(CASE, HERE, None, rounds=2)
    assert row["error"] == "NotImplementedError: not here" and job.is_bad(row)


def test_a_decode_case_is_captured(measure):
    """And what cannot be captured is told."""

    class Timer:
        capturing = False

        def capture(self, call, calls):
            self.capturing = True
            try:
                call()
            except RuntimeError as error:
                raise Uncapturable(f"no CUDA graph can hold it: {error}") from error
            finally:
                self.capturing = False
            return lambda: [call() for _ in range(calls)]

    timer, counted = Timer(), []

    def ours():
        counted.append(1)
        return ones()

    def eager_only():
        if timer.capturing:
            raise RuntimeError("stream is capturing")
        return ones()

    rows = measure(timer, decode=True, ours_nccl=eager_only, ours=ours)
    assert rows["ours"]["graph"] is True and rows["ours"]["correct"] is True
    assert rows["ours"]["calls"] % worker.GRAPH_CALLS == 0 and len(counted) > 2 * worker.GRAPH_CALLS
    assert rows["ours_nccl"]["error"] == "Uncapturable: no CUDA graph can hold it: stream is capturing"
    assert job.is_bad(rows["ours_nccl"])
    assert measure(timer, ours=eager_only)["ours"]["graph"] is None


def test_figures():
    samples = {
        "matmul": Sampled([100.0, 110.0, 120.0], 5.0, 10),
        "collective": Sampled([40.0, 40.0, 40.0], 5.0, 10),
        "nccl_then_cublas": Sampled([140.0, 150.0, 160.0], 5.0, 10),
        "ours": Sampled([110.0, 120.0, 130.0], 5.0, 10),
    }

    def figures(name, floor=("matmul", "collective")):
        return worker._figures(name, Work({}, floor, "nccl_then_cublas", 11e8), samples)

    ours = figures("ours")
    assert (ours["us"], ours["floor_us"], ours["exposed_us"], ours["hidden"]) == (120.0, 110.0, 10.0, 0.75)
    assert ours["ratio"] == pytest.approx(120 / 110, abs=1e-4) and ours["rate"] == round(11e8 / 120 / 1e6, 1)
    assert figures("nccl_then_cublas")["hidden"] == 0 and "hidden" not in figures("matmul")
    assert figures("collective")["ratio"] == pytest.approx(40 / 110, abs=1e-4)
    assert figures("ours", ("matmul",))["floor"] == "matmul"
    assert "ratio" not in figures("ours", ("matmul", "another"))


def test_torchs_operators_are_found_where_torch_has_them(monkeypatch):
    """They are registered by a module that nothing else imports."""
    found = works._torch_operator("fused_all_gather_matmul", Place(2, torch.device("cuda"), torch.bfloat16))
    assert found is torch.ops.symm_mem.fused_all_gather_matmul
    assert works._torch_operator("no_such_operator", Place(2, torch.device("cuda"), torch.bfloat16)) is None
    assert works._torch_operator("fused_all_gather_matmul", HERE) is None


@pytest.mark.gpu
def test_on_gpus(tmp_path, capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "run.json"
    options = ["--quick", "--gpus", "2", "--op", "matmul_all_reduce", "--json", str(path)]
    assert cli.main(["bench", "overlap", *options]) == 0, capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["card"] == torch.cuda.get_device_name()
    for row in found["rows"]:
        assert row["error"] is None and row["us"] > 0 and row["host_us"] > 0 and row["correct"] is not False, row
        assert row["graph"] is (True if row["case"] == "decode M8" else None)
        if row["variant"] == "nccl_then_cublas":
            assert row["ratio"] > 0.9 and row["hidden"] < 0.5  # how slow it is, others on these GPUs decide, too
