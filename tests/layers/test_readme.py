"""README's Python, run as it stands: on the CPU, with smaller models."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import tpfused
from tests.compare import Block
from tpfused.collectives import all_gather, own_slice
from tpfused.group import resolve_group

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

pytestmark = pytest.mark.parametrize("workers", ["cpu"], indirect=True)


def run(distinctive: str, *replaced: tuple[str, str], **given: object) -> dict:
    """The one snippet with these words, in which some others are replaced; -> its names."""
    (code,) = (snippet for snippet in SNIPPETS if distinctive in snippet)
    for old, new in replaced:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    with patch("torch.distributed.init_process_group"), redirect_stdout(StringIO()):
        exec(compile(code, README.name, "exec"), given)
    return given


def check_layers(ctx):
    names = run("model.py", ("torch.cuda.is_available()", "False"))
    assert names["y"].shape == (8, 1024) and names["fc1"].weight.grad.shape == (4096 // ctx.world, 1024)


def check_split(ctx, folder):
    names = run(
        "AutoConfig",
        ('"cuda", (2, 4)', '"cpu", (2, 2)'),
        ('"llama", "llama-trained"', repr((str(folder), str(folder / "out")))),
        ('torch.randint(1000, (2, 64), device="cuda")', "torch.arange(8).view(2, 4)"),
    )
    assert names["loss"].isfinite() and (folder / "out" / "config.json").exists()


def check_generate(ctx):
    smaller = ("hidden_size=256, num_layers=4, num_heads=4", "hidden_size=48, num_layers=1, num_heads=12")
    names = run("KVCache", smaller, ("max_new_tokens=64", "max_new_tokens=4"), ("(ids, 64", "(ids, 4"))
    model, ids = names["model"], names["ids"]
    assert torch.equal(names["next_ids"], model.generate(ids, 1)[:, -1:])
    assert names["cache"].length == 17 and names["out"].shape == (8, 20)


def check_overlap(ctx):
    block, group = Block(ctx, ctx.world, "group", 0), resolve_group()
    torch.manual_seed(0)
    x, w1, b1, w2 = (block.randn(*shape) for shape in ((8, 5), (12, 5), (12,), (5, 12)))
    shards = {name: own_slice(whole, 0, group) for name, whole in (("x_shard", x), ("w1_shard", w1), ("b1_shard", b1))}
    names = run("all_gather_matmul", **shards, w2_shard=own_slice(w2, 1, group))
    expected = F.gelu(x @ w1.T + b1, approximate="tanh") @ w2.T
    torch.testing.assert_close(all_gather(names["y_shard"], 0, 8, group), expected)


def test_layers(workers):
    workers.run(check_layers)


def test_a_model_that_is_split(workers, tmp_path):
    pytest.importorskip("transformers")
    from tests.parallelize.models import build

    torch.manual_seed(0)
    build("llama").save_pretrained(tmp_path)
    workers.run(check_split, tmp_path)


def test_generation(workers):
    workers.run(check_generate)


def test_overlapped_matmuls(workers):
    workers.run(check_overlap)


def test_what_needs_no_ranks(workers):
    run("as tensor_parallel")
    for line in re.findall(r"`(from tpfused[^`]*)`", README.read_text()):
        exec(line.replace("\n", " "), {})


def test_it_has_all_names(workers):
    names = set(re.findall(r"\w+", README.read_text()))
    assert not [name for name in tpfused.__all__ if name not in names]
