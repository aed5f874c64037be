"""The example in four processes, against the same steps of the dense model."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import tpfused
from tests.parallelize.models import build, compare

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"


def run_example(ctx, arguments):
    """As torchrun would, in processes that have imported everything and joined already; what it printed."""
    printed, ended = io.StringIO(), mock.Mock()
    with (
        mock.patch.dict(os.environ, LOCAL_RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world)),
        mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments]),
        mock.patch("torch.distributed.barrier", ended.barrier),
        mock.patch("torch.distributed.destroy_process_group", ended.destroy_process_group),
        mock.patch("torch.cuda.is_available", return_value=ctx.device.type == "cuda"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert [call[0] for call in ended.mock_calls] == ["barrier", "destroy_process_group"]
    return printed.getvalue()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fine_tuning_on_a_grid(workers, tmp_path, seed, name):
    if workers.world != 4:
        pytest.skip("needs 4 ranks")
    torch.manual_seed(seed)
    dense = build(name)
    dense.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    ids = torch.randint(2, 131, (25, 9))  # the last one is dropped
    torch.save(ids, tmp_path / "ids.pt")

    arguments = [str(tmp_path / part) for part in ("model", "ids.pt", "tuned")] + ["--tp", "2", "--lr", "1e-3"]
    printed = workers.run(run_example, arguments)[0]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3

    dense.train()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    for loss, batch in zip(losses, ids[:24].split(8), strict=True):
        expected = dense(batch, labels=batch).loss
        assert abs(expected.item() - loss) < 1e-4  # all ranks' mean
        expected.backward()
        tpfused.clip_grad_norm_(dense.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tuned = type(dense).from_pretrained(tmp_path / "tuned")
    # Adam makes steps of rounding where a gradient is zero but for that, as that of a bias of the keys is.
    for (key, param), other in zip(dense.named_parameters(), tuned.parameters(), strict=True):
        assert (param - other).abs().median() < 1e-6, key
    compare({"loss": tuned(ids, labels=ids).loss}, {"loss": dense.eval()(ids, labels=ids).loss}, 1e-4, str)


@pytest.mark.parametrize(
    "texts, options, told",
    [
        (torch.zeros(8, 3, dtype=torch.int64), ["--tp", "3"], "--tp 3 does not divide the number of processes, 4"),
        (torch.zeros(8, 3, dtype=torch.int64), ["--tp", "0"], "--tp 0 does not"),
        (torch.zeros(8, 3, dtype=torch.int64), ["--tp", "2", "--batch", "3"], "--batch 3 does not divide by .* 2"),
        (torch.zeros(7, 3, dtype=torch.int64), [], r"8 texts or more, tokens\], not torch.int64 \[7, 3\]"),
        (torch.zeros(8, 3), [], "int64 .* not torch.float32"),
        (torch.zeros(8, dtype=torch.int64), [], r"not torch.int64 \[8\]"),
        (torch.zeros(8, 3, dtype=torch.int64), [], "File exists"),
    ],
)
def test_the_example_refuses_before_it_joins(tmp_path, monkeypatch, capsys, texts, options, told):
    data, out = tmp_path / "ids.pt", tmp_path / "file"
    torch.save(texts, data)
    out.touch()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["finetune.py", str(folder), str(data), str(out), *options])
    with (
        mock.patch("torch.distributed.init_device_mesh", side_effect=AssertionError("joined")),
        pytest.raises((SystemExit, FileExistsError)) as caught,
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert re.search(told, capsys.readouterr().err + str(caught.value))


def test_the_example_asks_no_hub(tmp_path, monkeypatch, capsys):
    data = tmp_path / "ids.pt"
    torch.save(torch.zeros(8, 3, dtype=torch.int64), data)
    monkeypatch.setattr(sys, "argv", ["finetune.py", "no/folder", str(data), str(tmp_path / "out")])
    with mock.patch("torch.distributed.init_device_mesh", side_effect=AssertionError("joined")):
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: no/folder: no folder with a model's config.json")
    assert not (tmp_path / "out").exists()


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60
