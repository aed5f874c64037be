"""`tpfused bench overlap`: what it refuses and lists, and a whole run of small cases on the CPU."""

import json

import pytest
import torch

from tpfused import cli
from tpfused.bench.overlap import cases, job, worker

OPTIONS = {
    "op": None, "case": None, "sweep": False, "quick": False, "list": False, "dtype": "bf16", "gpus": 2, "rounds": 2,
    "seed": 1, "json": None, "csv": None, "plot": None,
}  # fmt: skip


def test_lists_without_a_gpu(capsys):
    assert cli.main(["bench", "overlap", "--list", "--sweep"]) == 0
    told = capsys.readouterr().out
    assert "all_gather_matmul 70B fc1 fwd: M8192 K8192 N28672" in told and "mlp GPT-3 fwd+bwd" in told
    assert "matmul_reduce_scatter sweep M1 fwd" in told


@pytest.mark.parametrize(
    "options, told",
    [
        (["--op", "matmul"], "unknown operation 'matmul'"),
        (["--case", "405B"], "no case has '405B'"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--gpus", "1"], "at least two GPUs, and 1 were asked for"),
    ],
)
def test_refuses(options, told, capsys):
    assert cli.main(["bench", "overlap", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    """Two gloo workers; the operations take their plain path, but every row must be there and right."""
    for shapes in (cases.SHAPES, cases.MLP_SHAPES):
        monkeypatch.setattr(cases, "SHAPES" if shapes is cases.SHAPES else "MLP_SHAPES", {"8B": (8, 16, 24)})
    monkeypatch.setattr(cases, "FC2_SHAPES", ["8B"])
    path = tmp_path / "run.json"
    options = OPTIONS | {"json": str(path), "csv": str(tmp_path / "run.csv"), "plot": str(tmp_path / "plots")}
    assert job.execute(options, device="cpu") == 0, capsys.readouterr()
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["gpus"] == 2
    variants = {(row["op"], row["variant"]) for row in found["rows"]}
    both = {"matmul", "collective", "nccl_then_cublas", "ours"}
    assert variants == {(op, name) for op in ("all_gather_matmul", "matmul_reduce_scatter") for name in both} | {
        ("mlp", name) for name in ("matmul", "megatron_style", "ours")
    }
    for row in found["rows"]:
        assert row["us"] > 0 and row["ratio"] > 0 and row["host_us"] > 0 and row["error"] is None
        assert row["correct"] is (True if row["variant"] == "ours" else None)
    assert "mlp 8B fwd+bwd" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "overlap-all_gather_matmul.png", "overlap-matmul_reduce_scatter.png", "overlap-mlp.png",
    ]  # fmt: skip


def test_a_wrong_result_is_found(monkeypatch):
    variants = {"right": lambda: torch.ones(3), "ours": lambda: torch.ones(3) * 1.1}
    work = cases.Work(variants, ("right",), "right", ("ours",), 1)
    monkeypatch.setattr(worker, "_slowest", lambda values: values)
    assert not worker._agrees(work, "ours")
