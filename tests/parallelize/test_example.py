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
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, LOCAL_RANK=str(ctx.rank)),
        mock.patch.object(sys, "argv", [str(EXAMPLE), *arguments]),
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.destroy_process_group"),
        mock.patch("torch.cuda.is_available", return_value=ctx.device.type == "cuda"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fine_tuning_on_a_grid(workers, tmp_path, seed, name):
    if workers.world != 4:
        pytest.skip("needs 4 ranks")
    torch.manual_seed(seed)
    dense = build(name)
    dense.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    ids = torch.randint(2, 131, (24, 9))
    torch.save(ids, tmp_path / "ids.pt")

    arguments = [str(tmp_path / part) for part in ("model", "ids.pt", "tuned")] + ["--tp", "2", "--lr", "1e-3"]
    printed = workers.run(run_example, arguments)[0]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3

    dense.train()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    for loss, batch in zip(losses, ids.split(8), strict=True):
        halves = [dense(half, labels=half).loss for half in batch.chunk(2)]
        assert abs(halves[0].item() - loss) < 1e-3  # rank 0's
        (sum(halves) / 2).backward()
        tpfused.clip_grad_norm_(dense.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tuned = type(dense).from_pretrained(tmp_path / "tuned")
    # Adam makes steps of rounding where a gradient is zero but for that, as that of a bias of the keys is.
    for (key, param), other in zip(dense.named_parameters(), tuned.parameters(), strict=True):
        assert (param - other).abs().median() < 1e-6, key
    compare({"loss": tuned(ids, labels=ids).loss}, {"loss": dense.eval()(ids, labels=ids).loss}, 1e-4, str)


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 60
