"""Checkpoints: a killed save leaves the previous one whole, and what is damaged or foreign is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from tests.training.runs import make_run, worker_of
from tpfused.cli import main
from tpfused.cli.errors import UserError
from tpfused.training import saving
from tpfused.training.loop import make_optimizer

SEED = 5


class Killed(BaseException):
    """Stands for SIGKILL: nothing that handles errors may catch it."""


@pytest.fixture
def trained(tmp_path):
    """A run that saves to an empty directory, its worker, and a model and optimizer after one step.

    Any module will do: a small one is written and flushed faster.
    """
    torch.manual_seed(SEED)
    run = make_run(steps=10, save=str(tmp_path / "runs"))
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(run, list(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saving.check_target(run)
    return run, worker_of(run), model, optimizer


def test_only_the_two_newest_stay(trained, tmp_path):
    for step in (1, 2, 3, 4):
        saving.save(trained[0], trained[1], step, *trained[2:])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["step-000003", "step-000004"]
    assert saving.find(str(tmp_path / "runs"))["step"] == 4
    assert saving.find(str(tmp_path / "runs" / "step-000003"))["step"] == 3


@pytest.mark.parametrize(
    "what, calls",
    [("write_text", 0), *(("_flush", calls) for calls in range(6)), ("rename", 0), ("rename", 1), ("rmtree", 0)],
)
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(trained, tmp_path, monkeypatch, what, calls):
    root = tmp_path / "runs"
    for step in (1, 2):
        saving.save(trained[0], trained[1], step, *trained[2:])
    owner = {"_flush": saving, "rmtree": shutil}.get(what, type(root))
    original, done = getattr(owner, what), []

    def kill_later(*args, **kwargs):
        if len(done) == calls:
            raise Killed
        done.append(original(*args, **kwargs))
        return done[-1]

    monkeypatch.setattr(owner, what, kill_later)
    with pytest.raises(Killed):
        saving.save(trained[0], trained[1], 3, *trained[2:])
    monkeypatch.undo()
    meta = saving.find(str(root))
    assert meta["step"] in (2, 3)
    reload(trained, meta["path"])
    saving.save(trained[0], trained[1], 4, *trained[2:])
    assert not list(root.glob(".*")), "leftovers of the killed save are removed by the next"


@pytest.mark.parametrize("owner, name", [(saving, "_flush"), (safetensors.torch, "save_file")])
def test_a_full_disk_is_one_line(trained, owner, name, monkeypatch):
    def fail(*arguments):
        raise safetensors.SafetensorError("disk full") if name == "save_file" else OSError("disk full")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(UserError, match=f"^--save {trained[0].save} cannot be written: disk full$"):
        saving.save(trained[0], trained[1], 1, *trained[2:])


def reload(trained, path):
    run, worker, model, optimizer = trained
    fresh = torch.nn.Linear(3, 2)
    fresh_optimizer = make_optimizer(run, list(fresh.parameters()))
    torch.manual_seed(1)
    saving.load(replace(run, resume=path), worker, fresh, fresh_optimizer)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(fresh_optimizer.state[mine][key], value)
    assert torch.initial_seed() == SEED


def truncate(checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[:-1])


def corrupt_header(checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 8 + data[8:])


def change_meta(**changes):
    def change(checkpoint):
        meta = json.loads((checkpoint / "meta.json").read_text())
        (checkpoint / "meta.json").write_text(json.dumps(meta | changes))

    return change


def change_config(**changes):
    def change(checkpoint):
        meta = json.loads((checkpoint / "meta.json").read_text())
        (checkpoint / "meta.json").write_text(json.dumps(meta | {"config": meta["config"] | changes}))

    return change


DAMAGE = {
    "truncated": (truncate, "model.safetensors has"),
    "no optimizer": (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors: No such file"),
    "no meta": (lambda path: (path / "meta.json").unlink(), "meta.json: No such file"),
    "meta cut short": (lambda path: (path / "meta.json").write_text('{"format": 1, '), "meta.json is not what"),
    "nested meta": (lambda path: (path / "meta.json").write_text("[" * 100_000), "meta.json is not what"),
    "foreign meta": (lambda path: (path / "meta.json").write_text("[1, 2]"), "meta.json is not what"),
    "another format": (change_meta(format=99), "format is 99"),
    "another step": (change_meta(step=3), "of step 3"),
    "a step that is none": (change_meta(step="2"), "of step '2'"),
    "no sizes": (change_meta(files={}), "meta.json is not what"),
    "a rate that is none": (change_config(lr="abc"), "lr is 'abc'"),
    "a length that is none": (change_config(seq_len=None), "seq_len is None"),
    "a preset that is none": (change_config(preset=["quick"]), "preset is ['quick']"),
    "another model": (change_meta(model={"hidden_size": 7}), "another model"),
    "bad header": (corrupt_header, "cannot be used"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(trained, damage, capfd):
    run = trained[0]
    harm, message = DAMAGE[damage]
    checkpoint = saving.Path(saving.save(run, trained[1], 2, *trained[2:]))
    harm(checkpoint)
    before = {path: path.read_bytes() for path in checkpoint.parent.rglob("*") if path.is_file()}
    command = ["train", "--device", "cpu", "--tp", "1", "--no-dense", "--resume", run.save, "--save", run.save]
    assert main(command) == 2
    err = capfd.readouterr().err
    assert message in err and err.startswith("tpfused train: ") and err.count("\n") == 1
    assert {path: path.read_bytes() for path in checkpoint.parent.rglob("*") if path.is_file()} == before


def refused(command, capsys) -> str:
    assert main(["train", "--device", "cpu", *command]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_other_runs_checkpoints_are_not_overwritten(trained, tmp_path, capsys):
    run = trained[0]
    saving.save(run, trained[1], 2, *trained[2:])
    saving.save(run, trained[1], 5, *trained[2:])
    assert "step 5 already" in refused(["--preset", "quick", "--save", run.save], capsys)
    assert "step 5 already" in refused(["--resume", f"{run.save}/step-000002", "--save", run.save], capsys)
    assert "quick preset, not of memory" in refused(["--resume", run.save, "--preset", "memory"], capsys)
    assert "state of adam, not of sgd" in refused(["--resume", run.save, "--optimizer", "sgd"], capsys)
    assert "step 5 of 5 already" in refused(["--resume", run.save, "--steps", "5"], capsys)
    shutil.rmtree(f"{run.save}/step-000005")
    text = tmp_path / "gone"
    text.write_text("words " * 100)
    gone = make_run(steps=10, save=run.save, text=str(text))
    saving.save(gone, trained[1], 6, *trained[2:])
    text.unlink()
    assert "does not exist" in refused(["--resume", run.save], capsys)


def test_a_file_in_a_checkpoints_place_is_found_before_training(trained, tmp_path, capsys):
    (tmp_path / "step-000002").write_text("mine")
    assert "step 2 already" in refused(["--preset", "quick", "--steps", "2", "--save", str(tmp_path)], capsys)
    assert "no checkpoint" in refused(["--resume", str(tmp_path)], capsys)


def test_a_run_may_save_where_it_resumed(trained):
    run = trained[0]
    path = saving.save(run, trained[1], 2, *trained[2:])
    saving.check_target(replace(run, resume=path, first_step=2, save=f"{run.save}/../runs"))
