"""`tpfused plan --from`: plans from what `tpfused bench comm` wrote, and files that are none of that."""

import json
import operator
from functools import reduce
from pathlib import Path

import pytest

from tests.planning.test_plan_command import plan
from tpfused.planning.rates import CALLS, LATENCIES


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "it is empty"),
        ('{"meta": {"rates"', "it breaks off, or is wrong, at line 1, column 18"),
        ("[" * 100_000, "its tables or lists are nested too deeply"),
        ("[]", "it has no meta"),
        ("{}", "it has no meta"),
        ('{"meta": {"card": "a", "gpus": 2}}', "it has no meta.dtype, meta.memory_bytes, meta.rates"),
        (
            '{"meta": {"card": "a", "gpus": 2, "dtype": "bf16", "rates": null, "memory_bytes": 1}}',
            "it has no meta.rates",
        ),
        ('{"meta": {"gpus": 2, "dtype": "bf16", "rates": [], "memory_bytes": 1}}', "it has no meta.card, meta.rates"),
    ],
)
def test_refuses_a_file_of_something_else(text, told, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(text)
    refused = f"tpfused plan: --from {path} is not what a whole run of tpfused bench comm --json writes: {told}\n"
    assert plan("--model", "gpt2", "--from", str(path)) == 2
    assert capsys.readouterr().err == refused
    path.write_bytes(b"\xff\xfe")
    assert plan("--model", "gpt2", "--from", str(path)) == 2
    assert capsys.readouterr().err == refused.replace(told, "it is no text")


@pytest.mark.parametrize(
    "missing, told",
    [
        (["rates memory_gbps", "rates attention_tflops"], "meta.rates.attention_tflops, meta.rates.memory_gbps"),
        (["card", "rates pass_rates joined"], "meta.card, meta.rates.pass_rates.joined"),
        (["rates fits", "memory_bytes"], "meta.memory_bytes, meta.rates.fits"),
        (["rates fits 1 alpha_us"], "meta.rates.fits[1].alpha_us"),
    ],
)
def test_all_that_a_file_lacks_is_named(comm_file, capsys, missing, told):
    found = json.loads(Path(comm_file).read_text())
    for place in missing:
        *folders, name = [int(each) if each.isdigit() else each for each in ["meta", *place.split()]]
        del reduce(operator.getitem, folders, found)[name]
    Path(comm_file).write_text(json.dumps(found))
    assert plan("--model", "gpt2", "--gpus", "2", "--from", comm_file) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"{comm_file} is not what a whole run of tpfused bench comm --json writes: it has no {told}\n")


@pytest.fixture
def comm_file(tmp_path):
    """What `tpfused bench comm` writes, of a made-up machine."""
    fits = [
        {"op": op, "group": "all", "ranks": 2, "alpha_us": 10.0, "us_per_byte": 3e-6}
        for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    ]
    rates = {"matmul_tflops": 600.0, "attention_tflops": 300.0, "attention_backward_tflops": 250.0}
    rates |= {"memory_gbps": 3000.0, "pass_rates": {"strided": 370.0, "joined": 220.0}, "fits": fits}
    meta = {"card": "Some GPU", "gpus": 2, "dtype": "bf16", "rates": rates, "memory_bytes": 80 * 2**30}
    path = tmp_path / "comm.json"
    path.write_text(json.dumps({"meta": meta, "rows": []}))
    return str(path)


def test_a_plan_from_a_file(comm_file, capsys):
    assert plan("--model", "llama3-8b", "--gpus", "2", "--from", comm_file, "--memory-gib", "192") == 0
    out = capsys.readouterr().out
    assert f"192 GiB; from {comm_file}: 2 x Some GPU, bf16" in out and "matmul 600 TFLOP/s" in out
    assert "were not measured" not in out
    assert f"{comm_file}: 2 x Some GPU, bf16 does not tell the latency of kernels, the host's time a call, how" in out


def test_links_that_were_not_measured_are_told(comm_file, capsys):
    """As well as the groups; with numbers of the options nothing is said of what was measured."""
    options = ["--model", "llama3-70b", "--batch", "64", "--from", comm_file]
    shared = "communication is priced as if all 64 GPUs shared the links of the 2 that were measured. Unless those were"
    for gpus, more, is_told in (("64", [], True), ("2", [], False), ("64", ["--bus-gbps", "50"], False)):
        assert plan(*options, "--gpus", gpus, *more) == 0
        out = capsys.readouterr().out
        assert (shared in out) is is_told and ("real steps across hosts are slower" in out) is is_told
        assert ("groups of 4, 8, 16, 32, 64 were not measured" in out) is is_told
        assert ("priced by --bus-gbps" in out) is bool(more)


def test_a_recorded_file_of_before_is_read(capsys):
    """Without latencies, the host's time, and what is hidden: what it has is used."""
    file = Path(__file__).with_name("comm-before-latencies.json")
    assert plan("--model", "llama3-8b", "--gpus", "2", "--from", str(file)) == 0
    out = capsys.readouterr().out
    assert "matmul 804 TFLOP/s, " in out and out.count("counted as nothing") == 1 and "waits for its host" not in out


def test_what_a_file_tells_in_part_is_named(comm_file, capsys):
    found = json.loads(Path(comm_file).read_text())
    found["meta"]["rates"] |= {"latency_us": {"matmul": 3.0}, "host_us": dict.fromkeys(CALLS, 9.0), "hidden": 0.5}
    Path(comm_file).write_text(json.dumps(found))
    assert plan("--model", "gpt2", "--gpus", "2", "--from", comm_file) == 0
    told = "does not tell the latency of kernels (attention, attention_backward, memory): counted as nothing"
    assert told in capsys.readouterr().out


def test_few_tokens_wait_for_the_host(comm_file, tmp_path, capsys):
    found = json.loads(Path(comm_file).read_text())
    found["meta"]["rates"] |= {"host_us": {"matmul": 100.0, "parallel_matmul": 300.0, "other": 50.0}, "hidden": 0.8}
    found["meta"]["rates"] |= {"latency_us": dict.fromkeys(LATENCIES, 5.0)}
    Path(comm_file).write_text(json.dumps(found))
    path = tmp_path / "plan.json"
    options = ["--model", "llama3-8b", "--gpus", "2", "--tp", "2", "--from", comm_file, "--memory-gib", "500"]
    hosts = set()
    for tokens in ("512", "8192"):
        assert plan(*options, "--sequence", tokens, "--json", str(path)) == 0
        (row,) = json.loads(path.read_text())["rows"]
        out = capsys.readouterr().out
        assert ("waits for its host" in out) is (tokens == "512") and "does not tell" not in out
        assert (row["work"]["host"] * (1 + row["bubble"]) <= row["step_us"]) and row["work"]["host"] > 0
        hosts.add(row["work"]["host"])
    assert len(hosts) == 1  # there are as many calls


def test_a_file_without_what_is_needed(comm_file, capsys):
    found = json.loads(Path(comm_file).read_text())
    del found["meta"]["rates"]["fits"][1:3]
    Path(comm_file).write_text(json.dumps(found))
    assert plan("--model", "gpt2", "--gpus", "2", "--from", comm_file) == 2
    assert "says nothing of all_gather, reduce_scatter" in capsys.readouterr().err
    assert plan("--model", "gpt2", "--gpus", "1", "--from", comm_file) == 0
    assert plan("--model", "gpt2", "--gpus", "1", "--dtype", "fp16", "--from", comm_file) == 2
    assert "was measured in bf16, and --dtype is fp16" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place, value, told",
    [
        (["gpus"], "two", "meta.gpus must be how many there were, not 'two'"),
        (["memory_bytes"], -1, "meta.memory_bytes must be a number above 0, not -1"),
        (["rates", "matmul_tflops"], float("inf"), "matmul_tflops must be a number above 0, not inf"),
        (["rates", "memory_gbps"], "fast", "memory_gbps must be a number above 0, not 'fast'"),
        (["rates", "hidden"], 1.5, "hidden must be a number from 0 to 1, not 1.5"),
        (["rates", "host_us"], [3], "host_us is [3], no table"),
        (["rates", "fits", 0, "ranks"], 1, "fits[0].ranks is 1"),
        (["rates", "fits", 0, "op"], [], "fits[0].op is []"),
        (["rates", "fits", 0, "alpha_us"], "10", "fits[0].alpha_us must be a number 0 or more, not '10'"),
        (["rates", "fits", 0, "us_per_byte"], float("nan"), "fits[0].us_per_byte must be a number 0 or more, not nan"),
    ],
)
def test_a_file_with_numbers_of_no_machine(comm_file, capsys, place, value, told):
    found = json.loads(Path(comm_file).read_text())
    *folders, name = ["meta", *place]
    reduce(operator.getitem, folders, found)[name] = value
    Path(comm_file).write_text(json.dumps(found))
    assert plan("--model", "gpt2", "--gpus", "2", "--from", comm_file) == 2
    err = capsys.readouterr().err
    assert "is not what a whole run of tpfused bench comm --json writes" in err and err.count("\n") == 1
    assert told in err
