"""`tpfused bench model`: what it refuses and lists, a whole run of a tiny model on the CPU, its arithmetic."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Workers
from tpfused import cli
from tpfused.bench.model import accuracy, job, plain, worker
from tpfused.bench.model.accuracy import deviations
from tpfused.bench.model.cases import SIZES, Case, Degree, cases, degrees_of
from tpfused.bench.model.decode import step_of
from tpfused.bench.model.programs import Program, build, build_all, build_peer, place_of
from tpfused.bench.model.worker import MATMUL, Plan, Programs
from tpfused.bench.options import check_options
from tpfused.bench.sampling import Sampled
from tpfused.cli.errors import UserError
from tpfused.layers.cache import KVCache
from tpfused.training.model import WithLoss
from tpfused.workers import Worker

ROOT = Path(__file__).resolve().parents[2]
TINY = SIZES["tiny"]
OPTIONS = {
    "op": None, "case": None, "quick": False, "list": False, "dtype": "bf16", "gpus": 2, "rounds": 2, "seed": 1,
    "json": None, "csv": None, "plot": None, "tp": None, "sequence": None, "layers": None, "size": "tiny",
    "no_peers": False, "decode": True,
}  # fmt: skip


def test_help_teaches():
    command = [sys.executable, str(ROOT / "benchmarks" / "model.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    for words in ("usage: tpfused bench model", "dtensor_compiled", "x ours", "examples:", "Exit codes:"):
        assert words in done.stdout, words
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_under_torchrun(tmp_path):
    """All ranks have one model, though none was given a seed; its FSDP2 shards, too."""
    bench = "bench model --size tiny --op train --tp 2 --sequence 64 --rounds 1 --json run.json".split()
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 4 -m tpfused".split(), *bench]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert {(row["dp"], row["pass"]) for row in rows} == {(dp, way) for dp in (1, 2) for way in ("fwd", "fwd+bwd")}
    for row in rows:
        assert row["correct"], row
        assert row["deviation_tokens"] == 64 and 0 < row["deviation"] < 2 * row["dense_deviation"], row


def test_only_the_first_rank_looks_at_files(tmp_path):
    """Another host may lack the folder, and its ranks write nothing."""
    path = tmp_path / "missing" / "run.json"
    given = {"dtype": "bf16", "rounds": None, "json": str(path), "csv": None, "plot": str(path), "gpus": None}
    ranks = [Worker(rank, 2, rank, 2, None, None) for rank in range(2)]
    check_options(given, ["bf16"], ranks[1])
    for writer in (None, ranks[0]):
        with pytest.raises(UserError, match="there is no folder"):
            check_options(given, ["bf16"], writer)
    for each in ranks:
        with pytest.raises(UserError, match="--gpus 4: torchrun has started 2 workers"):
            check_options(given | {"gpus": 4}, ["bf16"], each)


def test_lists_without_a_gpu(capsys, monkeypatch):
    assert cli.main(["bench", "model", "--list", "--gpus", "4"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 * 2 * 5 + 3 * 3 and "train 2048 tokens TP 2 x FSDP 2 fwd" in told
    assert "train 8192 tokens TP 2 x FSDP 2 fwd+bwd  (quick)" in told and "train 2048 tokens TP 4 fwd" in told
    assert "decode batch 64 TP 4 fwd" in told and not [line for line in told if "decode" in line and "FSDP" in line]
    assert cli.main(["bench", "model", "--list", "--gpus", "2", "--quick", "--no-decode"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [f"train 8192 tokens {degree} fwd+bwd  (quick)" for degree in ("TP 1", "TP 2", "TP 1 x FSDP 2")]
    assert cli.main(["bench", "model", "--list", "--gpus", "2", "--tp", "2", "--sequence", "64", "--op", "train"]) == 0
    assert capsys.readouterr().out.splitlines() == ["train 64 tokens TP 2 fwd", "train 64 tokens TP 2 fwd+bwd  (quick)"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["bench", "model", "--list", "--tp", "2,4", "--op", "train", "--quick"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [f"train 8192 tokens {tp} fwd+bwd  (quick)" for tp in ("TP 2", "TP 4", "TP 2 x FSDP 2")]


@pytest.mark.parametrize(
    "options, told",
    [
        (["--tp", "2"], "--tp 2 does not divide 1 GPUs"),
        (["--gpus", "16", "--tp", "16"], "--tp 16 does not divide the model's 8 key-value heads"),
        (["--tp", "1,x"], "--tp takes different positive numbers"),
        (["--sequence", "64,64"], "--sequence takes different positive numbers"),
        (["--sequence", "0"], "--sequence takes different positive numbers"),
        (["--gpus", "2", "--sequence", "2047"], "--sequence 2047 is not a multiple of --tp 2"),
        (["--layers", "33"], "--layers must be from 1 to the model's 32, not 33"),
        (["--size", "70B"], "unknown size '70B'"),
        (["--op", "trian"], "did you mean 'train'?"),
        (["--no-decode", "--op", "decode"], "unknown operation 'decode'"),
        (["--case", "TP 3"], "no case has 'TP 3'"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--dtype", "fp32"], "unknown dtype 'fp32'"),
    ],
)
def test_refuses(options, told, capsys):
    options = options if "--gpus" in options else [*options, "--gpus", "1"]
    assert cli.main(["bench", "model", *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(capsys):
    assert cli.main(["bench", "model", "--gpus", "1"]) == 2
    assert "this needs a GPU, and 1 were asked for where torch finds none here (" in capsys.readouterr().err
    assert cli.main(["bench", "model", "--quick"]) == 2
    assert "this needs a GPU, and torch finds none here (--size tiny runs on a CPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_whole_run(tmp_path, capsys):
    """On two processes of the CPU."""
    path = tmp_path / "run.json"
    files = {"json": str(path), "csv": str(tmp_path / "run.csv"), "plot": str(tmp_path / "plots")}
    assert job.execute(OPTIONS | files | {"sequence": "16,32"}) == 0, capsys.readouterr()
    found = json.loads(path.read_text())
    meta = found["meta"]
    assert meta["complete"] and meta["gpus"] == 2 and (meta["size"], meta["layers"]) == ("tiny", 2)
    measured = {}
    for row in found["rows"]:
        measured.setdefault((row["op"], row["case"], row["pass"]), []).append(row["variant"])
        assert row["us"] > 0 and row["error"] is None and row["correct"] is True, row
        assert row["rounds"] == 2 and row["peak_bytes"] is None and row["graph"] is None
        tokens = row["dp"] * row["batch"] * (row["tokens"] if row["op"] == "train" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["us"] * 1e6, abs=2e-3)
        assert (row["times_ours"] is None) is (row["variant"] == "ours")
        alone, others = (row["tp"], row["dp"]) == (1, 1), ("ours_reference", "ours_sequential")
        assert (row["scaling"] is None) is (alone or row["variant"] in others)
        if row["op"] == "train":
            assert row["deviation_tokens"] == row["tokens"]
            assert 0 < row["deviation"] < 2 * row["dense_deviation"] < 2e-2 and row["peak_share"] >= 0
        else:
            assert row["deviation"] is None
    several = ["ours", "dtensor", "ours_reference"]
    expected = {}
    for tokens, direction in product((16, 32), ("fwd", "fwd+bwd")):
        expected["train", f"{tokens} tokens TP 1", direction] = ["ours", "dtensor"]
        expected["train", f"{tokens} tokens TP 2", direction] = several
        expected["train", f"{tokens} tokens TP 1 x FSDP 2", direction] = ["ours", "dtensor"]
    for batch in (1, 8, 64):
        expected["decode", f"batch {batch} TP 1", "fwd"] = ["ours"]
        expected["decode", f"batch {batch} TP 2", "fwd"] = ["ours_reference", "ours_sequential", "ours"]
    assert measured == expected
    # Two measurements, for what each sequence is measured with.
    errors = {
        (row["tokens"], row["pass"]): row["deviation"]
        for row in found["rows"]
        if row["op"] == "train" and row["variant"] == "ours" and row["tp"] == 2
    }
    assert len(set(errors.values())) == 4
    told = capsys.readouterr().out
    assert "decode batch 8 TP 2 fwd" in told and "tokens/s" in told and "unchecked" not in told
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"model-train.png", "model-decode.png"}


def test_work():
    """Counted from the plain model's parameters."""
    with torch.device("meta"):
        model = plain.Plain(TINY, layers=3)
    linear = [part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert TINY.multiplied(3) == sum(linear)
    assert (
        SIZES["8B"].multiplied(32) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    )  # without the embedding and the norms
    # Each of 4 queries is multiplied with half of the 4 keys and values, of 32 features.
    attention = 3 * 2 * 2 * 4 * (4 / 2) * 32
    assert TINY.flops(3, 4, "fwd") == 2 * 4 * sum(linear) + attention
    assert TINY.flops(3, 4, "fwd+bwd") == 3 * TINY.flops(3, 4, "fwd")
    cached = 3 * 5 * TINY.context * 2 * TINY.kv_heads * TINY.head_dim
    assert TINY.decode_bytes(3, 5, 2) == 2 * (sum(linear) + cached)


def test_degrees():
    assert degrees_of([1, 2, 4], 4) == [Degree(1), Degree(2), Degree(4), Degree(1, 4), Degree(2, 2)]
    assert degrees_of([1, 2], 2) == [Degree(1), Degree(2), Degree(1, 2)] and degrees_of([1], 1) == [Degree(1)]
    assert [str(degree) for degree in degrees_of([2], 8)] == ["TP 2", "TP 2 x FSDP 4"]


def plan_of(*chosen: Case, **other) -> Plan:
    known = {"device": "cpu", "dtype": "bf16", "size": TINY, "layers": 2, "variants": ("ours", "dtensor")}
    return Plan(**known | {"rounds": 3, "seed": 1} | other, cases=chosen)


def test_figures():
    samples = {
        (Degree(1), "ours"): Sampled([100.0, 110.0, 120.0], 5.0, 2),
        (Degree(1), "dtensor"): Sampled([110.0, 110.0, 110.0], 5.0, 2),
        (Degree(2), "ours"): Sampled([50.0, 55.0, 80.0], 5.0, 2),
        (Degree(2), "dtensor"): Sampled([60.0, 66.0, 88.0], 50.0, 2),
        (Degree(2, 2), "ours"): Sampled([50.0, 50.0, 60.0], 5.0, 2),
    }

    def figures(degree):
        case = next(case for case in cases("train", TINY, [degree], [16]) if case.direction == "fwd+bwd")
        return worker._figures(case, samples, [1e6, 2e6, 3e6], plan_of())

    flops = TINY.flops(2, 16, "fwd+bwd")
    alone, several, sharded = (figures(degree) for degree in (Degree(1), Degree(2), Degree(2, 2)))
    assert alone["ours"]["us"] == 110 and alone["ours"]["tokens_per_s"] == round(16 / 110e-6, 3)
    assert alone["ours"]["peak_share"] == round(flops / 110 / 2e6, 4)
    assert "scaling" not in alone["ours"] and "times_ours" not in alone["ours"]
    assert alone["dtensor"]["times_ours"] == 1.0 and alone["dtensor"]["times_ours_iqr"] == pytest.approx(
        0.0917, abs=1e-3
    )
    assert several["ours"]["scaling"] == 2.0 and several["ours"]["amount"] == flops / 2
    assert several["dtensor"]["times_ours"] == 1.2 and several["dtensor"]["host_us"] == 50
    assert several["dtensor"]["scaling"] == round(110 / 66, 4)
    assert sharded["ours"]["scaling"] == 4.0 and sharded["ours"]["tokens_per_s"] == round(2 * 16 / 50e-6, 3)


def test_memory_is_compared_with_one_rank():
    rows = [
        [{"tp": tp, "dp": dp, "variant": name, "peak_bytes": used} for name, used in each.items()]
        for tp, dp, each in (
            (1, 1, {"ours": 100, "dtensor": None}),
            (2, 1, {"ours": 53, "dtensor": 60, "ours_reference": 70}),
            (2, 2, {"ours": 40}),
        )
    ]
    worker._compare_memory(rows)
    shares = [row.get("memory_share") for each in rows for row in each]
    assert shares == [None, None, 0.53, None, None, 0.4]


@pytest.mark.parametrize("variant, kept", [("ours", 10), ("dtensor", 0)])
def test_what_a_group_keeps_counts_as_ours(variant, kept, monkeypatch):
    monkeypatch.setattr(worker, "kept_bytes", {"group": 10}.get)
    assert worker._kept_bytes(variant, SimpleNamespace(tp=SimpleNamespace(get_group=lambda: "group"))) == kept


@pytest.fixture
def place():
    """On this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield place_of(Degree(1), 1, torch.device("cpu"), torch.bfloat16)
    dist.destroy_process_group()


def test_errors_where_some_model_fails(place, monkeypatch):
    """For want of memory, say: of ours alone, and of the float32 model, without which there are none."""
    names = "ours", "dtensor"
    dense, found = deviations(TINY, 16, place, [place], names, 1)
    assert found.keys() == {(Degree(1), name) for name in names} and 0 < dense.logits < 1e-2
    gradients = Program.gradients

    def fail(dtype, kind):
        def fails(self):
            mine = gradients(self)
            if isinstance(self.module, kind) and next(iter(mine.values())).dtype == dtype:
                raise torch.OutOfMemoryError("not here")
            return mine

        monkeypatch.setattr(Program, "gradients", fails)
        return deviations(TINY, 16, place, [place], names, 1)

    again, others = fail(torch.bfloat16, WithLoss)
    assert again == dense and others == {(Degree(1), "dtensor"): found[Degree(1), "dtensor"]}
    assert fail(torch.float32, plain.Plain) == fail(torch.bfloat16, plain.Plain) == (None, {})


@pytest.mark.parametrize("shape, dim", [((1, 5000, 6), 2), ((2600, 6), 0), ((6, 2600), 1), ((7,), None)])
def test_parts_are_compared_with_their_own(shape, dim):
    """By blocks of rows; what each rank has whole counts once."""
    right, wrong = torch.randn(shape), torch.randn(shape)
    sums = 0
    for rank in range(2):
        at = SimpleNamespace(degree=Degree(2), rank=rank)
        part = wrong if dim is None else wrong.chunk(2, dim)[rank]
        sums = sums + accuracy._squares(part, right, at)
    expected = [(wrong - right).norm() ** 2, right.norm() ** 2]
    torch.testing.assert_close(sums, torch.stack(expected).double(), rtol=1e-5, atol=0)


def test_wrong_and_failed_peers_are_told(place, monkeypatch):
    chosen = cases("train", TINY, [Degree(1)], [16])
    plan = plan_of(*chosen, rounds=1, variants=("ours", "dtensor", "megatron", "dtensor_compiled"))

    def programs(*arguments):
        for name, program, error in build_all(("ours", "dtensor"), *arguments[1:]):
            yield name, program, error
            if name == "dtensor":
                with torch.no_grad():
                    program.module.head.weight.mul_(1.2)
                yield "megatron", program, None
        yield "dtensor_compiled", None, "NotImplementedError: not here"

    monkeypatch.setattr(worker, "build_all", programs)
    found = worker.prepare(plan, {Degree(1): place})
    (rows,) = worker.measure(chosen[:1], found, {Degree(1): place}, plan, (None, {}))
    by_name = {row["variant"]: row for row in rows}
    assert {name: row["correct"] for name, row in by_name.items()} == {
        "ours": True, "dtensor": True, "megatron": False, "dtensor_compiled": None,
    }  # fmt: skip
    assert by_name["dtensor_compiled"]["error"] == "NotImplementedError: not here"
    assert [name for name, row in by_name.items() if job.is_bad(row)] == ["megatron"]
    assert len({tuple(row) for row in rows}) == 1


def test_a_step_that_fails_is_told(place):
    """One that gave logits, and then cannot be differentiated, say."""
    (case,) = (case for case in cases("train", TINY, [Degree(1)], [16]) if case.direction == "fwd+bwd")
    plan = plan_of(case, rounds=1)
    program, _ = build(TINY, 2, 16, place, 1)
    ready = {(Degree(1), "ours"): program, (Degree(1), "dtensor"): program}
    ready[Degree(1), "dtensor"] = type(program)(program.module, program.logits, lambda ids, labels: labels, dict)
    found = Programs(ready, {key: {"error": None} for key in ready})
    (rows,) = worker.measure([case], found, {Degree(1): place}, plan, (None, {}))
    assert [row["us"] is None for row in rows] == [False, True] and "RuntimeError" in rows[1]["error"]
    assert all(parameter.grad is None for parameter in program.module.parameters())
    assert MATMUL not in {row["variant"] for row in rows}


def test_a_decoding_step_is_the_same_each_time(place):
    """Eager, and as it would be captured."""
    model = build(TINY, 2, TINY.context, place, 1)[0].module.model
    step, ids, cache = step_of(model, batch=3, context=TINY.context)
    first = step().clone()
    assert first.shape == (3, TINY.vocabulary) and torch.equal(ids[:, 0], first.argmax(-1))
    ids.zero_()
    assert torch.equal(step(), first)
    for captured in (False, True):
        cache.fixed = True
        with patch.object(KVCache, "captured", lambda self, captured=captured: captured):
            ids.zero_()
            torch.testing.assert_close(step(), first, rtol=2e-2, atol=2e-2)
        assert cache.length == TINY.context - 1
    ids.fill_(1)
    assert not torch.equal(step(), first)


def check_peer(ctx, tp, name):
    """Loss, logits and all gradients in float32, each by the plain model's name."""
    place = place_of(Degree(tp), ctx.world, ctx.device, torch.float32)
    ours, weights = build(TINY, 2, 16, place, 1)
    ids = torch.arange(0, TINY.vocabulary, TINY.vocabulary // 16, device=ctx.device).unsqueeze(0)
    results = []
    for program in (ours, build_peer(name, TINY, 2, 16, place, weights)):
        loss = program.step(ids, ids + 1).detach()
        with torch.no_grad(), program.inside():
            results.append({"loss": loss, "logits": program.logits(ids)} | program.gradients())
    expected, found = results
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, (name, error)


def check_megatron(ctx, tp):
    """It expects a GPU, and compiles one function."""
    with pytest.MonkeyPatch.context() as monkeypatch, torch.compiler.set_stance("force_eager"):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        check_peer(ctx, tp, "megatron")


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_megatrons_layers_are_the_same_model():
    with Workers("cpu", 2) as workers:
        for tp in (1, 2):
            workers.run(check_megatron, tp)


def test_torchs_parallel_model_is_the_same():
    with Workers("cpu", 2) as workers:
        workers.run(check_peer, 2, "dtensor")


@pytest.mark.gpu
def test_on_gpus(tmp_path, capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = tmp_path / "run.json"
    options = ["--quick", "--gpus", "2", "--size", "tiny", "--json", str(path)]
    assert cli.main(["bench", "model", *options]) == 0, capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["card"] == torch.cuda.get_device_name()
    for row in found["rows"]:
        if row["variant"].startswith("ours"):
            assert row["error"] is None and row["us"] > 0 and row["correct"] is True, row
        assert row["graph"] is (True if row["op"] == "decode" else None)
        assert (row["peak_bytes"] is not None) is (row["op"] == "train" and row["error"] is None)
