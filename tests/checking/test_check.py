"""`tpfused check`: what it refuses, a whole run on the CPU, and that it sees what is wrong."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tpfused
from tpfused import cli, reference
from tpfused.checking import cases, job, worker
from tpfused.checking.cases import ARGMAX, LAYERS, MANY_TOKENS, OPERATIONS, Case
from tpfused.checking.rule import Verdict, judge
from tpfused.cli.check import EXAMPLES
from tpfused.group import TPGroup
from tpfused.kernels.decode import decode_attention
from tpfused.layers import cache, mlp
from tpfused.layers.cache import KVCache, LayerCache
from tpfused.overlap.tiers import wanted
from tpfused.workers import Worker, take_gpu

ALONE = TPGroup(None, 0, 1)
CPU = torch.device("cpu")


def test_help_teaches_and_needs_no_torch():
    code = "import sys; from tpfused.cli import main; sys.modules['torch'] = None; main(['check', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for words in ("usage: tpfused check", "examples:", "Exit codes:", "--case", "--gpus", "--json", "--seed"):
        assert words in done.stdout, words


def test_lists_every_operation_and_layer(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.main(["check", "--list"]) == 0
    told = capsys.readouterr().out
    for name in (*OPERATIONS, *LAYERS, ARGMAX):
        assert f"{name} " in told, name
    for line in ("ParallelMLP bf16 tp2", "ParallelMLP by sequential bf16 tp2", "column_matmul by nccl fp16 1x64x3 tp2"):
        assert f"\n{line}\n" in told, line
    assert "sequential bf16 tp1" not in told and "matmul by sequential" not in told


def test_a_case_in_other_letters(capsys):
    for text in ("ParallelMLP fp64", "parallelmlp FP64"):
        assert cli.main(["check", "--list", "--gpus", "2", "--cpu", "--case", text]) == 0
        assert capsys.readouterr().out.startswith("ParallelMLP fp64 ")


def test_degrees():
    assert [job.degrees_of(world) for world in (1, 2, 3, 4)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4)]
    assert job.degrees_of(6) == (1, 2, 3, 4, 6) and job.degrees_of(8) == (1, 2, 4, 8)


def test_a_rank_that_is_left_over_waits(tmp_path, capfd):
    path = tmp_path / "check.json"
    assert cli.main(["check", "--cpu", "--gpus", "3", "--case", "all_", "--json", str(path)]) == 0
    assert {row["tp"] for row in json.loads(path.read_text())["rows"]} == {2, 3}
    assert " 0 wrong of 18 in" in capfd.readouterr().out


def test_more_ranks_than_key_value_heads(capfd):
    """Where keys and values are projections of their own."""
    assert cli.main(["check", "--cpu", "--gpus", "4", "--case", "sequence_parallel fp64 tp4"]) == 0
    assert cli.main(["check", "--cpu", "--gpus", "4", "--case", "ParallelAttention fp64 tp4"]) == 0
    assert " 0 wrong" in capfd.readouterr().out


@pytest.mark.parametrize(
    "options, told",
    [
        (["--case", "no such layer"], "no case has 'no such layer'"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--gpus", "99"], "99"),
        (["--gpus", "-1"], "--gpus -1: at least one"),
        (["--cpu", "--gpus", "0"], "--gpus 0: at least one is needed\n"),
        (["--gpus", "3"], "finds 2 here: --ranks lets several ranks share one\n"),
        (["--ranks", "0"], "--ranks 0: at least one is needed, and torch finds 2 here\n"),
    ],
)
def test_wrong_use_is_one_line(options, told, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.main(["check", *options]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_whole_run(tmp_path, capfd):
    path = tmp_path / "check.json"
    assert cli.main(["check", "--cpu", "--seed", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and found["meta"]["gpus"] == 2 and found["meta"]["seed"] == 3
    names = {row["name"] for row in found["rows"]}
    small = {name for name, layer in LAYERS.items() if layer.tokens < MANY_TOKENS}
    assert names == {*OPERATIONS, *small, ARGMAX} and {row["tp"] for row in found["rows"]} == {1, 2}
    assert all(row["ok"] and row["ratio"] <= 1 and not row["error"] for row in found["rows"])
    told = capfd.readouterr().out
    seconds = found["meta"]["seconds"]
    assert seconds > 0
    assert f"\n{len(found['rows'])} right, 0 wrong of {len(found['rows'])} in {seconds:.0f} s\n" in told


def test_tokens_that_do_not_divide_by_the_ranks(capfd):
    assert cli.main(["check", "--cpu", "--gpus", "5", "--case", "sequence_parallel fp64 tp5"]) == 0
    assert "\n3 right, 0 wrong of 3 in" in capfd.readouterr().out


@pytest.mark.parametrize(
    "options",
    [["--cpu"], ["--cpu", "--gpus", "16", "--seed", "5"], ["--gpus", "2"], ["--ranks", "4"], ["--ranks", "1"]],
)
def test_tells_how_to_see_a_wrong_line_alone(options, capsys, monkeypatch):
    runs = []

    def run_workers(work, argument, world, on_event):
        runs.append((argument["seed"], world, argument["device"], argument["cases"]))
        for case in argument["cases"]:
            on_event("answer", worker.Answer(0.5 if case.tp > 1 else 2.0, "result"))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(job, "run_workers", run_workers)
    assert cli.main(["check", *options]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    program, *again = shlex.split(told.partition(": ")[2])
    assert program == "tpfused" and cli.main(again) == 1
    *place, cases_of_all = runs[0]
    *place_again, (alone,) = runs[1]
    assert place == place_again and alone == next(case for case in cases_of_all if case.tp == 1)


def test_ranks_share_gpus(tmp_path, capsys, monkeypatch):
    path = tmp_path / "check.json"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(job, "run_workers", lambda work, argument, world, on_event: None)
    for ranks, told in ((4, "4 ranks on 2 x Some GPU: "), (2, "2 x Some GPU: "), (1, "1 x Some GPU: ")):
        cli.main(["check", "--ranks", str(ranks), "--json", str(path)])
        assert capsys.readouterr().out.startswith(told)
        meta = json.loads(path.read_text())["meta"]
        assert (meta["ranks"], meta["gpus"]) == (ranks, min(ranks, 2))


def test_the_gpu_of_a_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    assert [take_gpu(rank, 2).index for rank in range(2)] == [0, 1] and "NCCL_HOSTID" not in os.environ
    places = set()
    for rank, gpu in enumerate((0, 1, 0, 1)):
        assert take_gpu(rank, 4) == torch.device("cuda", gpu)
        places.add((os.environ["NCCL_HOSTID"], gpu))
    assert len(places) == 4 and len({host for host, _ in places}) == 2 and os.environ["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_file_that_cannot_be_written_loses_no_result(ratio, capsys, monkeypatch):
    def run_workers(work, argument, world, on_event):
        for _ in argument["cases"]:
            on_event("answer", worker.Answer(ratio, "result"))

    monkeypatch.setattr(job, "run_workers", run_workers)
    assert cli.main(["check", "--cpu", "--case", "ParallelMLP fp64 tp1", "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert f"{int(ratio < 1)} right, {int(ratio > 1)} wrong of 1" in out
    assert err == "tpfused check: --json /dev/full cannot be written: No space left on device\n"


def test_the_examples_name_cases(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    examples = [line for line in EXAMPLES.splitlines() if "--seed" in line]
    assert len(examples) == 2
    for line in examples:
        assert cli.main([*shlex.split(line)[1:], "--list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("rank, group", [(0, 0), (2, 1), (3, 1)])
def test_a_case_alone_gets_the_data_of_the_full_run(rank, group, monkeypatch):
    seen = {}
    monkeypatch.setattr(worker, "run", lambda case, *place: seen.update({case: torch.initial_seed()}) or Verdict(0, ""))
    monkeypatch.setattr(worker, "_agreed", lambda mine: worker.Answer(0.0))
    monkeypatch.setattr(worker, "_group", lambda degree, of: ALONE)
    for name in ("join_group", "set_timeout"):
        monkeypatch.setattr(worker, name, lambda *arguments: None)
    monkeypatch.setattr(worker.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)

    def seeds(chosen, seed):
        seen.clear()
        argument = {"cases": chosen, "device": "cpu", "degrees": (2,), "seed": seed}
        worker.work(argument, Worker(rank, 4, rank, 4, None, lambda name, payload: None))
        return dict(seen)

    every = cases.cases((2,), ("reference",), on_gpu=True)
    full = seeds(every, 5)
    assert len(set(full.values())) == len({case.label for case in every}) == len(every)
    for case in (every[0], every[7], every[-1]):
        assert seeds([case], 5) == {case: full[case]} != seeds([case], 6)
        assert full[case] == worker.data_seed(5, case, group) != worker.data_seed(5, case, group + 1)


def test_sees_a_wrong_gradient(monkeypatch):
    case = Case("layer", "ParallelMLP", 1, "fp64")
    torch.manual_seed(0)
    assert cases.run(case, ALONE, CPU).ratio <= 1
    right = tpfused.ParallelMLP.forward

    def detached(self, x):  # the dense twin, which has no group of processes either, is built before
        return right(self, x) + (x.detach() * 1e-9).sum() if self.fc1.group is ALONE else right(self, x)

    monkeypatch.setattr(tpfused.ParallelMLP, "forward", detached)
    verdict = cases.run(case, ALONE, CPU)
    assert verdict.ratio > 1 and verdict.tensor == "result"


def test_a_kernel_is_not_compared_with_itself(monkeypatch):
    case = Case("layer", "ParallelGatedMLP", 1, "fp64")
    monkeypatch.setattr(mlp, "runs_kernels", lambda *arguments: wanted[-1] != "reference")
    monkeypatch.setattr(mlp, "gated_act", lambda x, activation: 2 * reference.gated_act(x, activation))
    torch.manual_seed(0)
    assert cases.run(case, ALONE, CPU).ratio > 1


DECODING = [name for name, layer in LAYERS.items() if layer.decodes]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", DECODING)
def test_decoding_is_right(name, dtype, seed):
    torch.manual_seed(seed)
    assert 0 < cases.run(Case("layer", name, 1, dtype), ALONE, CPU).ratio < 1


@pytest.mark.parametrize("wrong", ["single tokens", "fixed", "padding"])
@pytest.mark.parametrize("name", DECODING)
def test_sees_decoding_that_is_wrong(name, wrong, seed, monkeypatch):
    attend, extend = LayerCache.attend, KVCache.extend

    def attend_to_nothing(self, q, k, v, backend):
        is_wrong = wrong == "single tokens" or self.step.seen == self.keys.shape[2]
        return attend(self, q, k, v, backend) * (0 if is_wrong and q.shape[2] == 1 else 1)

    def see_padding(self, tokens):
        layers = extend(self, tokens)
        if self.padding is None:
            return layers
        return [replace(layer, step=replace(layer.step, padding=self.padding * 0)) for layer in layers]

    if wrong == "padding":
        monkeypatch.setattr(KVCache, "extend", see_padding)
    else:
        monkeypatch.setattr(LayerCache, "attend", attend_to_nothing)
    torch.manual_seed(seed)
    verdict = cases.run(Case("layer", name, 1, "fp16"), ALONE, CPU)
    assert verdict.ratio > 1
    assert wrong == "single tokens" or {"fixed": "fixed", "padding": "padded"}[wrong] in verdict.tensor


def test_single_tokens_run_the_kernel_where_it_can(seed, monkeypatch):
    """In Triton's interpreter, where there is no GPU; the dense model runs without it."""
    calls = []

    def kernel(*arguments):
        calls.append(wanted[-1])
        return decode_attention(*arguments)

    monkeypatch.setattr(cases, "CALLS", (38, 1, 1))
    monkeypatch.setattr(cache, "why_plain", lambda *arguments: "told" if wanted[-1] == "reference" else "")
    monkeypatch.setattr(cache, "decode_attention", kernel)
    torch.manual_seed(seed)
    assert cases.run(Case("layer", DECODING[-1], 1, "fp16"), ALONE, CPU).ratio < 1
    assert len(calls) == 4 * 2 * 2 and "reference" not in calls  # ways, single tokens, blocks


def test_the_rule():
    exact = {"y": torch.ones(4, dtype=torch.float64)}
    eager = {"y": torch.ones(4, dtype=torch.bfloat16)}

    def ratio(*values):
        return judge({"y": torch.tensor(values, dtype=torch.bfloat16)}, exact, eager, lambda name, x: x).ratio

    assert ratio(1, 1, 1, 1) == 0 and ratio(1, 1, 1.0078125, 1) < 1
    assert ratio(1, 1, 1.5, 1) > 1 and ratio(1, 1, float("nan"), 1) == float("inf")
    assert ratio(1, 1, 1) == float("inf")


def test_in_16_bits_norms_are_compared_too(seed):
    """Of all values and of the worst row, for entries may be far off where several roundings meet."""
    torch.manual_seed(seed)
    right, row = torch.randn(64, 64, dtype=torch.float64), (torch.arange(64) == 5)[:, None].double()

    def ratio(dtype, values, wrong):
        exact = right[:values, :values]
        actual = exact + 4 * torch.finfo(dtype).eps * exact.square().mean().sqrt() * wrong[:values]
        return judge(*({"y": x} for x in (actual.to(dtype), exact, exact.to(dtype))), lambda name, x: x).ratio

    for dtype in (torch.bfloat16, torch.float16):
        for wrong in (row, row * 0 + 1):
            assert ratio(dtype, 64, wrong) > 1 > ratio(dtype, 7, wrong), dtype
            assert ratio(torch.float32, 64, wrong) < 1


def test_a_single_operation_is_not_given_a_chains_tolerance():
    ones = {"y": torch.ones(4)}
    actual = {"y": ones["y"] + 5 * torch.finfo(torch.float32).eps}
    chain, single = (judge(actual, ones, ones, lambda name, x: x, of).ratio for of in ((), ("y",)))
    assert chain == pytest.approx(0.25) and single == pytest.approx(2.5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_only_results_without_a_sum_over_ranks_are_single(name, dtype, monkeypatch):
    judged = []
    monkeypatch.setattr(cases, "judge", lambda *arguments: judged.append(arguments[-1]))
    cases.run(Case("operation", name, 1, dtype, "reference", 2), ALONE, CPU)
    is_chain = name in ("matmul_reduce_scatter", "matmul_all_reduce") or dtype == "fp32"
    assert judged == [() if is_chain else ("result",)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [("actual", "eager"), ("eager",), ("actual", "eager", "exact"), ("actual",)])
def test_nothing_is_right_beside_what_is_not_finite(where, bad):
    values = {name: torch.ones(4, dtype=torch.float64) for name in ("actual", "exact", "eager")}
    for name in where:
        values[name][1] = bad
    told = judge(*({"y": values[name]} for name in ("actual", "exact", "eager")), lambda name, x: x)
    assert told.ratio == float("inf") and told.tensor.startswith("y") and "not finite" in told.tensor
    assert ("plain PyTorch" in told.tensor) == (where in (("actual", "eager"), ("eager",)))


def test_zeros_are_right_and_all_else_is_not_zero():
    zeros = {"y": torch.zeros(4)}
    assert judge(zeros, zeros, zeros, lambda name, x: x).ratio == 0
    assert judge({"y": zeros["y"] + 1e-30}, zeros, zeros, lambda name, x: x) == (float("inf"), "y")


@pytest.mark.parametrize("error", [ZeroDivisionError("a"), KeyError("a"), RuntimeError("a\nb")])
def test_what_a_case_raises_is_its_own(error, monkeypatch):
    def run(*arguments):
        raise error

    monkeypatch.setattr(worker, "run", run)
    verdict, told = worker._attempt(Case("layer", "ParallelMLP", 1, "fp64"), ALONE, CPU)
    assert verdict.ratio == float("inf") and told.startswith(type(error).__name__) and "a" in told and "b" not in told
