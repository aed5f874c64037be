"""Checkpoints that take the place of others in their folder, and folders that hold more than one."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tpfused
from tests.compare import refuses
from tpfused import sharded

torch_files = pytest.importorskip("safetensors.torch")

SEVERAL = {"max_file_bytes": 100}  # a file for each tensor of `model_of`


def model_of(value):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def loaded(folder):
    """The one value that all of a checkpoint's tensors have."""
    model = model_of(torch.nan)
    tpfused.load_sharded(model, folder)
    values = {value for param in model.parameters() for value in param.flatten().tolist()}
    assert len(values) == 1, f"of several checkpoints: {values}"
    return values.pop()


@pytest.mark.parametrize("options", [{}, SEVERAL], ids=["to one", "to several"])
@pytest.mark.parametrize("before", [{}, SEVERAL], ids=["one", "several"])
def test_each_moment_has_a_whole_checkpoint(tmp_path, monkeypatch, before, options):
    tpfused.save_sharded(model_of(0.0), tmp_path, **before)
    found, steps = [], {"replace": Path.replace, "unlink": Path.unlink, "write_text": Path.write_text}

    def watched(name):
        def step(path, *args, **kwargs):
            found.append(loaded(tmp_path))  # as if the process died here
            return steps[name](path, *args, **kwargs)

        return step

    for value in (1.0, 2.0):  # the second one finds what the first has left
        del found[:]
        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(Path, name, watched(name))
            tpfused.save_sharded(model_of(value), tmp_path, **options)
        assert set(found) <= {value - 1, value} and found[0] == value - 1 and loaded(tmp_path) == value
        expected = 1 if not options else len(list(model_of(0.0).parameters()))
        assert len(list(tmp_path.glob("*.safetensors"))) == expected
        assert (tmp_path / sharded.INDEX).exists() is bool(options) and not list(tmp_path.glob(".*"))


class Config:
    """Writes two files, as a transformers model's configs do; of names that only it knows."""

    def __init__(self, value):
        self.value = value

    def save_pretrained(self, folder):
        for name in ("config.json", "other.json"):
            (Path(folder) / name).write_text(str(self.value))


def configured(value):
    model = model_of(value)
    model.config = Config(value)
    return model


@pytest.mark.parametrize("options", [{}, SEVERAL], ids=["to one", "to several"])
@pytest.mark.parametrize("before", [{}, SEVERAL], ids=["one", "several"])
def test_configs_take_their_places_beside_the_weights(tmp_path, monkeypatch, before, options):
    """Only while they are renamed, and the weights, do the two belong to different checkpoints."""
    tpfused.save_sharded(configured(0.0), tmp_path, **before)
    found, steps = [], {"replace": Path.replace, "unlink": Path.unlink, "write_text": Path.write_text}

    def watched(name):
        def step(path, *args, **kwargs):
            configs = {float((tmp_path / name).read_text()) for name in ("config.json", "other.json")}
            found.append(configs | {loaded(tmp_path)})
            return steps[name](path, *args, **kwargs)

        return step

    (tmp_path / f".{sharded.SINGLE}.configs").mkdir()  # an interrupted save's
    (tmp_path / f".{sharded.SINGLE}.configs" / "odd.json").write_text("0")
    for name in steps:
        monkeypatch.setattr(Path, name, watched(name))
    tpfused.save_sharded(configured(1.0), tmp_path, **options)
    mixed = [index for index, values in enumerate(found) if len(values) > 1]
    # The second config's turn, and the weights'; an index does not count before the single file is gone.
    assert len(mixed) == (3 if options and not before else 2) and mixed[-1] - mixed[0] == len(mixed) - 1
    assert found[mixed[0] - 1] == {0.0} and found[-1] in ({1.0}, {0.0, 1.0})
    assert sorted(file.name for file in tmp_path.glob("*.json") if file.name != sharded.INDEX) == [
        "config.json",
        "other.json",
    ]
    assert not list(tmp_path.glob(".*")) and loaded(tmp_path) == 1.0


def test_a_config_that_cannot_be_written_leaves_all_as_it_was(tmp_path, monkeypatch):
    tpfused.save_sharded(configured(0.0), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(self, folder):
        (Path(folder) / "config.json").write_text("half of i")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Config, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        tpfused.save_sharded(configured(1.0), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_save_that_fails_leaves_the_earlier_one_alone(tmp_path, monkeypatch):
    tpfused.save_sharded(model_of(0.0), tmp_path, **SEVERAL)
    before = sorted(path.name for path in tmp_path.iterdir())
    right, calls = torch_files.save_file, []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return right(*args, **kwargs)

    monkeypatch.setattr(torch_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        tpfused.save_sharded(model_of(1.0), tmp_path, **SEVERAL)
    assert sorted(path.name for path in tmp_path.iterdir()) == before and loaded(tmp_path) == 0.0


def test_other_files_stay_and_are_not_read(tmp_path):
    others = [tmp_path / f"{name}.safetensors" for name in ("model_ema", "model-backup", "adapter_model", "a")]
    tpfused.save_sharded(model_of(1.0), tmp_path)
    for path in others:
        torch_files.save_file(model_of(7.0).state_dict(), path)
    assert loaded(tmp_path) == 1.0
    for options in (SEVERAL, {}):
        tpfused.save_sharded(model_of(2.0), tmp_path, **options)
        assert loaded(tmp_path) == 2.0 and all(path.exists() for path in others)
    (tmp_path / sharded.SINGLE).unlink()
    with refuses(ValueError, "0.bias", "two files", "a.safetensors", "adapter_model.safetensors"):
        tpfused.load_sharded(model_of(0.0), tmp_path)


def test_broken_files_are_named(tmp_path):
    tpfused.save_sharded(model_of(1.0), tmp_path)
    file = tmp_path / sharded.SINGLE
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        tpfused.load_sharded(model_of(0.0), tmp_path)
    file.unlink()
    for text in ("{", "{}", '{"weight_map": 3}', "[]"):
        (tmp_path / sharded.INDEX).write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / sharded.INDEX))):
            tpfused.load_sharded(model_of(0.0), tmp_path)
    tpfused.save_sharded(model_of(1.0), tmp_path)
    assert loaded(tmp_path) == 1.0


def check_nothing_to_save(ctx, path):
    model = nn.Sequential(tpfused.ColumnParallelLinear(4, 8, device="meta", group=ctx.group(ctx.world)))
    with refuses(ValueError, "2 tensors", "meta", "0.weight"):
        tpfused.save_sharded(model, path)
    with refuses(TypeError, "max_file_bytes", "5GB"):
        tpfused.save_sharded(model, path, max_file_bytes="5GB")
    with refuses(ValueError, "max_file_bytes", "-5"):
        tpfused.save_sharded(model, path, max_file_bytes=-5)


def test_what_cannot_be_saved_is_refused_on_all_ranks(workers, tmp_path):
    workers.run(check_nothing_to_save, tmp_path)
