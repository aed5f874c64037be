"""Transformers in eval mode and calls of them with a cache, for the tests of incremental decoding and generation."""

from dataclasses import replace

import pytest
import torch

from tests.compare import twins
from tpfused import ParallelTransformer, TransformerConfig

SIZES = {"vocab_size": 13, "hidden_size": 8, "num_layers": 2, "num_heads": 4, "max_positions": 16, "head_dim": 2}
GPT = TransformerConfig.gpt(ffn_size=12, **SIZES)
LLAMA = TransformerConfig.llama(ffn_size=8, num_kv_heads=2, **SIZES)
CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt-tied": replace(GPT, num_kv_heads=1, sequence_dim=1, tie_embeddings=True, vocab_size=3),
    "llama-one-kv-head": replace(LLAMA, num_kv_heads=1, bias=True),
    "gpt-sequence-parallel": replace(GPT, sequence_parallel=True, dropout=0.5, attention_dropout=0.5),
    "llama-sequence-parallel": replace(LLAMA, sequence_parallel=True, sequence_dim=1, checkpoint_activations=True),
}
TOKENS = 9

modes = pytest.mark.parametrize("mode", ["group", "mesh"])
configs = pytest.mark.parametrize("name", CONFIGS)


def make(block, config, dtype=torch.float64):
    """A model in eval mode, and the dense weights that it holds parts of."""
    model, whole = twins(block, lambda **place: ParallelTransformer(config, **place), dtype)
    return model.eval(), whole


def in_parts(model, cache, ids, sizes):
    return torch.cat([model(part, cache=cache) for part in ids.split(sizes, dim=1)], dim=1)
