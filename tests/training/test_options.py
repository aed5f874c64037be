"""Presets, and every wrong use that can be found before a worker starts: one line, exit code 2, nothing written."""

import os
from dataclasses import replace

import pytest
import torch

from tests.training.runs import make_run
from tpfused import ParallelTransformer
from tpfused.cli import main
from tpfused.group import TPGroup
from tpfused.training.data import make_data, read_text
from tpfused.training.options import resolve
from tpfused.workers import Worker

MEMORY_DENSE = 26_793_984
MEMORY_TP4 = 7_110_912


def parameters(run, tp: int, rank: int) -> int:
    group = TPGroup(None, rank=rank, size=tp)
    model = ParallelTransformer(run.transformer_config(), group=group, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_memory_model_has_the_published_size():
    run = make_run(preset="memory")
    assert parameters(run, 1, 0) == MEMORY_DENSE
    assert [parameters(run, 4, rank) for rank in range(4)] == [MEMORY_TP4] * 4
    # By count, with Adam: parameters, gradients and two moments, all split alike.
    assert MEMORY_TP4 / MEMORY_DENSE <= 0.35


def test_the_memory_preset_splits_tokens_unless_told_otherwise():
    """That is what its peak memory is promised for."""
    options = dict.fromkeys(make_run().as_dict(), None) | {"device": "cpu"}
    assert resolve(options | {"preset": "memory"}, None).sequence_parallel
    assert not resolve(options | {"preset": "memory", "sequence_parallel": False}, None).sequence_parallel
    assert not resolve(options | {"preset": "quick"}, None).sequence_parallel


def test_the_memory_task_is_the_published_one():
    run = make_run(preset="memory", seq_len=None, batch_size=None, steps=None, lr=None)
    assert (run.batch_size, run.seq_len, run.steps, run.lr, run.optimizer) == (16, 32, 500, 3e-4, "adam")
    data = make_data(run)
    ids, labels = data.batch(0)
    assert ids.shape == (16, 32) and ids.dtype == torch.int64 and labels is ids
    assert data.sequences.shape == (100, 32) and 0 <= data.sequences.min() and data.sequences.max() < 1024
    assert all((data.sequences == row).all(1).any() for row in ids)
    assert (make_data(replace(run, seed=1)).sequences == data.sequences).all()


def test_batches_depend_on_seed_and_step_alone():
    run = make_run()
    first, again = make_data(run), make_data(run)
    first.batch(0)
    assert (first.batch(1)[0] == again.batch(1)[0]).all()
    assert not (first.batch(1)[0] == first.batch(2)[0]).all()
    assert not (first.batch(1)[0] == make_data(replace(run, seed=1)).batch(1)[0]).all()


def test_labels_are_the_next_bytes_and_the_tail_is_held_out():
    run = make_run()
    data, text = make_data(run), read_text(None)
    ids, labels = data.batch(0)
    assert bytes(ids[0].tolist()) in text and (ids[:, 1:] == labels[:, :-1]).all()
    assert bytes(data.train.tolist()) + bytes(data.tail.tolist()) == text
    held_ids, held_labels = data.held_out()
    assert (held_ids.flatten()[1:] == held_labels.flatten()[:-1]).all()
    assert bytes(held_ids.flatten().tolist()) in bytes(data.tail.tolist())


def test_learning_rate_warms_up_then_stays():
    run = make_run(lr=1.0, warmup=4)
    assert [run.learning_rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "given, world, local_world, expected",
    [
        ({}, 8, 4, (4, 2)),
        ({}, 6, 3, (2, 3)),
        ({"tp": 2}, 8, 4, (2, 4)),
        ({"dp": 4}, 8, 8, (2, 4)),
        ({}, 16, 16, (4, 4)),
    ],
)
def test_degrees_fill_the_group_that_torchrun_started(given, world, local_world, expected):
    worker = Worker(0, world, 0, local_world, None, lambda name, payload: None)
    options = dict.fromkeys(make_run().as_dict(), None) | {"device": "cpu", "batch_size": 48} | given
    run = resolve(options, worker)
    assert (run.tp, run.dp) == expected


def test_text_of_the_least_length(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"x" * 49 + b"y")
    data = make_data(make_run(text=str(text)))
    assert len(data.train) == len(data.tail) == 25 and len(data.held_out()[0]) == 1
    data.batch(0)


WRONG = {
    "--preset nosuch": "nosuch",
    "--device tpu": "tpu",
    "--tp 3": "--tp must be one of 1, 2, 4 for the quick preset, not 3: ",
    "--tp 0": "0",
    "--dp -1": "-1",
    "--tp 8": "--tp must be one of 1, 2, 4 for the quick preset, not 8: ",
    "--batch-size 6 --dp 4": "6",
    "--batch-size 8 --accumulate 3": "3",
    "--accumulate 0": "0",
    "--steps 0": "0",
    "--seq-len 0": "0",
    "--seq-len 5000": "5000",
    "--tp 4 --dp 100 --batch-size 1600": "400 workers",
    "--dtype fp16": "fp16",
    "--optimizer lion": "lion",
    "--dp-mode zero": "zero",
    "--lr nan": "nan",
    "--lr -1": "-1",
    "--warmup -1": "-1",
    "--seed -1": "-1",
    "--sample -1": "-1",
    "--save-every 5": "--save",
    "--preset memory --text README.md": "--text",
    "--text {tmp}/missing": "does not exist",
    "--text {tmp}/empty": "empty",
    "--text {tmp}/short": "10 bytes",
    "--text {tmp}": "not a regular file",
    "--text {tmp}/locked": "cannot be read",
    "--plot {tmp}/missing/plot.png": "plot.png",
    "--plot {tmp}/plot.nosuch": ".png",
    "--json {tmp}": "--json",
    "--save {tmp}/short": "short",
    "--resume {tmp}/missing": "no such directory",
    "--resume {tmp}": "no checkpoint",
    "--text {tmp}/short --json {tmp}/short": "one file",
    "--plot {tmp}/a.png --json {tmp}/a.png": "one file",
    "--save {tmp}/runs --json {tmp}/runs/step-000001/meta.json": "cannot be written",
    "--save {tmp} --json {tmp}/run.json": "among the checkpoints",
    "--plot {tmp}/plot.pgf": ".png",
    "--json " + "n" * 300: "cannot be written",
    "--resume " + "n" * 300: "no such directory",
    "--batch-size 1000000000000": "1000000000000",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_use_is_one_line(options, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("ten bytes.")
    locked = tmp_path / "locked"
    locked.write_text("secret " * 1000)
    locked.chmod(0)
    if "locked" in options and os.access(locked, os.R_OK):
        pytest.skip("this user may read everything")
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "--device", "cpu", "--preset", "quick", *options.format(tmp=tmp_path).split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tpfused train: ") and err.count("\n") == 1
    assert WRONG[options] in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(capsys):
    assert main(["train", "--device", "cuda"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "missing, option", [("rich", []), ("matplotlib", ["--plot", "x.png"]), ("safetensors", ["--save", "x"])]
)
def test_a_missing_extra_says_how_to_get_it(missing, option, capsys, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    assert main(["train", *option]) == 2
    err = capsys.readouterr().err
    assert missing in err and 'pip install "tpfused[demo]"' in err and err.count("\n") == 1


def test_an_environment_that_is_no_launchers_is_one_line(capsys, monkeypatch):
    for name, value in (("RANK", "first"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert main(["train"]) == 2
    err = capsys.readouterr().err
    assert "'first'" in err and err.count("\n") == 1
