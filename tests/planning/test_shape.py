"""Parameters, counted by hand, by their publishers, and by building the model."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tpfused import ParallelTransformer
from tpfused.group import TPGroup
from tpfused.planning.shape import PRESETS, SEQUENCE, Shape
from tpfused.planning.worker import config_of

LLAMA = Shape(hidden=8, ffn=20, layers=3, heads=4, kv_heads=2, vocab=50)
GPT = Shape(hidden=8, ffn=30, layers=2, heads=4, kv_heads=4, vocab=50, style="gpt", positions=16)


def built(shape: Shape, tp: int) -> int:
    """What the first of `tp` ranks really has: no collective is needed to make it."""
    config = config_of(shape, tokens=16)
    model = ParallelTransformer(config, group=TPGroup(None, rank=0, size=tp), device=torch.device("meta"))
    return sum(parameter.numel() for parameter in model.parameters())


def test_by_hand():
    # qkv (8 + 4 + 4) x 8, out 8 x 8, gate and up 40 x 8, down 8 x 20, two norms of 8
    assert LLAMA.block_parameters() == 128 + 64 + 320 + 160 + 16
    assert LLAMA.parameters() == 3 * 688 + 50 * 8 + 8 + 50 * 8
    # with biases of 24, 8, 30 and 8, and norms of 16
    assert GPT.block_parameters() == 192 + 24 + 64 + 8 + 240 + 30 + 240 + 8 + 32
    assert GPT.parameters() == 2 * 838 + 66 * 8 + 16 + 50 * 8 + 50
    assert replace(GPT, tied=True).parameters() == 2 * 838 + 66 * 8 + 16


@pytest.mark.parametrize(
    "name, parameters", [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("gpt2", 124_439_808)]
)
def test_presets_are_as_large_as_published(name, parameters):
    assert PRESETS[name].parameters() == parameters == built(PRESETS[name], 1)
    assert name in SEQUENCE


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", [LLAMA, replace(LLAMA, ffn=21), GPT, replace(GPT, tied=True), replace(GPT, vocab=51)])
def test_a_rank_has_as_many(shape, tp):
    """kv heads shared by two ranks, uneven vocabularies and feed-forward features among them."""
    if not shape.splits(tp):
        pytest.skip("cannot be built")
    assert shape.parameters(tp) == built(shape, tp)


@pytest.mark.parametrize("ffn", [20, 21, 22])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1), (6, 3), (12, 3)])
def test_what_splits_can_be_built(heads, kv_heads, ffn):
    shape = Shape(hidden=8 * heads, ffn=ffn, layers=1, heads=heads, kv_heads=kv_heads, vocab=50)
    for tp in (1, 2, 3, 4, 6, 8):
        try:
            built(shape, tp)
        except ValueError:
            assert not shape.splits(tp), tp
        else:
            assert shape.splits(tp), tp


@pytest.mark.parametrize(
    "changed, tp, told",
    [
        ({}, 3, "tp 3 does not divide 4 heads"),
        ({"heads": 12, "hidden": 24, "kv_heads": 3}, 2, "of tp 2 and 3 kv heads neither divides the other"),
        ({"ffn": 21}, 4, "tp 4 splits 21 feed-forward features so that gates and ups are on different ranks"),
    ],
)
def test_why_a_model_does_not_split(changed, tp, told):
    assert replace(LLAMA, **changed).why_unsplit(tp) == told and LLAMA.why_unsplit(1) is None


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"heads": 3}, "hidden 8 is no multiple of heads 3"),
        ({"kv_heads": 3}, "heads 4 is no multiple of kv_heads 3"),
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"heads": 8}, "rotary positions need an even head_dim, not 1"),
        ({"style": "bert"}, "'bert'"),
    ],
)
def test_refuses(wrong, told):
    with pytest.raises(ValueError, match=told):
        replace(LLAMA, **wrong)


def test_the_arithmetic_needs_no_torch():
    code = "import sys, tpfused.planning.layouts; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
