"""`tpfused check`'s large cases: that they take the paths they are for, and see what is wrong there."""

import re

import pytest
import torch

from tpfused.checking import cases, job
from tpfused.checking.cases import LARGE, LAYERS, MANY_TOKENS, OPERATIONS, SIZES, Case
from tpfused.extension import source_folder
from tpfused.group import TPGroup
from tpfused.layers import attention
from tpfused.overlap.tiers import wanted

ATTENTION = Case("layer", "ParallelAttention of many tokens", 1, "bf16")
SEVERAL_TIERS = ("first", 1), ("first", 2), ("sequential", 2), ("first", 4), ("sequential", 4)
ALONE, CPU = TPGroup(None, 0, 1), torch.device("cpu")


def is_large(case):
    return SIZES[case.size] is LARGE or (case.kind == "layer" and LAYERS[case.name].tokens == MANY_TOKENS)


def test_each_operation_tier_and_dtype_has_one_on_gpus_alone():
    tiers, degrees = job.TIERS["cuda"], (1, 2, 4)
    large = [case for case in cases.cases(degrees, tiers, on_gpu=True) if is_large(case)]
    dtypes = "bf16", "fp16", "fp32"
    operations = {(case.name, case.tier, case.tp, case.dtype) for case in large if case.kind == "operation"}
    assert operations == {
        (name, by, tp, each) for name in OPERATIONS for by in tiers for tp in (2, 4) for each in dtypes
    }
    layers = {(case.tier, case.tp, case.dtype) for case in large if case.kind == "layer"}
    assert layers == {(by, tp, each) for by, tp in SEVERAL_TIERS for each in dtypes}
    assert len(large) == len(operations) + len(layers) and ATTENTION in large
    assert not any(is_large(case) for case in cases.cases(degrees, job.TIERS["cpu"], on_gpu=False))


def constant(file, name):
    factor, _, shift = re.search(rf"{name} = (\d+)( << (\d+))?;", (source_folder() / file).read_text()).groups()
    return int(factor) << int(shift or 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_its_rows_are_too_many_for_one_kernel(ranks):
    """As csrc decides it: by what a rank writes at its peers."""
    tokens, k, n, _ = LARGE
    own, peers = tokens // ranks, ranks - 1
    assert 2 * peers * own * k > constant("small_rows.h", "most_gathered")
    assert 2 * peers * own * n > constant("small_rows.h", "most_scattered")
    most_small = constant("group.h", "most_small_bytes")
    assert 2 * peers * tokens * (n // ranks) > constant("small_rows.h", "most_features_gathered")
    assert 2 * 2 * peers * own * n > most_small  # a share's parts and its sums
    if ranks == 2:
        assert own >= constant("matmul_reduce_scatter.cpp", "least_split")


@pytest.mark.parametrize("features", [LARGE[2], LARGE[2] // 2])
def test_its_sums_and_features_come_in_several_blocks(features):
    tiles = -(-LARGE[0] // 128) * -(-features // 256)
    assert "least_tiles = 2 * 132;" in (source_folder() / "blocks.h").read_text()
    assert tiles // (2 * 132) > 1


@pytest.mark.parametrize("wrong", ["", "the last queries see nothing", "the last queries forget the first half"])
def test_attention_of_many_tokens(wrong, seed, monkeypatch):
    attend = attention.scaled_dot_product_attention
    last, half = 64, MANY_TOKENS // 2
    mask = torch.ones(1, 1, last, half, dtype=torch.bool).tril(half - last)

    def attend_wrongly(q, k, v, *options, backend):
        right = attend(q, k, v, *options, backend=backend)
        if wanted[-1] == "reference":
            return right
        forgetful = attend(q[:, :, -last:], k[:, :, half:], v[:, :, half:], mask, False, 0.0, backend=backend)
        return torch.cat((right[:, :, :-last], forgetful * ("forget" in wrong)), dim=2)

    if wrong:
        monkeypatch.setattr(attention, "scaled_dot_product_attention", attend_wrongly)
    torch.manual_seed(seed)
    assert (cases.run(ATTENTION, ALONE, CPU).ratio > 1) == bool(wrong)
