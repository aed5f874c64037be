"""Memory: the formulas as published, and what a block's autograd graph really keeps."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tpfused import ParallelTransformerBlock
from tpfused.group import TPGroup
from tpfused.planning.block import Setting
from tpfused.planning.memory import (
    Memory,
    block_activations,
    checkpointed_activations,
    head_activations,
    stage_memory,
    state_bytes,
)
from tpfused.planning.shape import Shape
from tpfused.planning.worker import config_of

S, B, H = 64, 2, 32
GPT = Shape(hidden=H, ffn=4 * H, layers=4, heads=4, kv_heads=4, vocab=96, style="gpt", positions=S)
LLAMA = Shape(hidden=H, ffn=56, layers=4, heads=8, kv_heads=2, vocab=96)
STATISTICS = 4 * S * B * 4  # fp32, a head and token of GPT


def setting(tp=1, sequence_parallel=False, overlap=True, size=2):
    return Setting(tp, S, B, size, sequence_parallel, overlap)


def test_sixteen_bytes_a_parameter():
    assert state_bytes(10, 2) == (20, 20, 120) and sum(state_bytes(10, 4)) == sum(state_bytes(10, 2)) == 160


@pytest.mark.parametrize("tp", [2, 4])
def test_korthikanti(tp):
    """Their sbh(34 + 5as/h), sbh(10 + 24/t + 5as/(ht)) and sbh/t(34 + 5as/h), less scores and dropout masks."""
    sbh = S * B * H
    assert block_activations(GPT, setting()) == 32 * sbh + STATISTICS
    assert block_activations(GPT, setting(tp)) == (8 + 24 / tp) * sbh + STATISTICS / tp
    assert block_activations(GPT, setting(tp, True)) == 32 / tp * sbh + STATISTICS / tp
    assert block_activations(GPT, setting(tp, True, overlap=False)) == (4 + 28 / tp) * sbh + STATISTICS / tp
    assert checkpointed_activations(GPT, setting(tp)) == 2 * sbh
    assert checkpointed_activations(GPT, setting(tp, True)) == 2 * sbh / tp


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_block_keeps_as_much(shape):
    """LayerNorm in both: without a GPU, torch composes RMSNorm of functions that keep more."""
    config = config_of(shape, S, norm="layernorm")
    block = ParallelTransformerBlock(config, group=TPGroup(None, rank=0, size=1), dtype=torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(torch.randn(S, B, H, dtype=torch.bfloat16, requires_grad=True))
    assert out.requires_grad
    counted = block_activations(shape, setting())
    # Besides: the norms' statistics, the angles of positions, and a copy of attention's output whose heads are apart.
    assert counted <= sum(kept.values()) <= 1.1 * counted + 2 * S * B * H


def test_stages():
    """Weights that are tied are there twice on two stages; a first stage keeps more micro-batches."""
    tied = Shape(hidden=H, ffn=4 * H, layers=4, heads=4, kv_heads=4, vocab=96, style="gpt", positions=S, tied=True)
    whole = stage_memory(tied, setting(), 4, 1, first=True, last=True, checkpointed=False)
    assert whole.parameters == 2 * tied.parameters()
    first = stage_memory(tied, setting(), 2, 2, first=True, last=False, checkpointed=False)
    last = stage_memory(tied, setting(), 2, 1, first=False, last=True, checkpointed=False)
    assert first.parameters + last.parameters == whole.parameters + 2 * 96 * H
    assert first.activations == 4 * block_activations(tied, setting())
    assert last.activations == 2 * block_activations(tied, setting()) + head_activations(tied, setting())
    again = stage_memory(tied, setting(), 2, 2, first=True, last=False, checkpointed=True)
    assert again.activations == 4 * 2 * S * B * H + block_activations(tied, setting())


def test_a_tenth_of_the_card_is_left_free():
    memory = Memory(10, 10, 60, 10)
    assert memory.total == 90 and memory.fits(100) and not memory.fits(99)
