"""`TransformerConfig(save_gathered=True)`: the same gradients, from rows that are kept."""

from dataclasses import replace

import pytest
import torch

from tests.compare import Block
from tests.layers.test_transformer import GPT, LLAMA, sequence_parallel
from tpfused import ParallelTransformerBlock, explain
from tpfused.placement import local


def check_saves(ctx, tp, seed):
    """Kv heads of each rank's own, and ones that ranks share, whose projection is not a layer by itself."""
    block, tokens = Block(ctx, tp, "group", seed), 4 * tp
    for config in (GPT, LLAMA, replace(LLAMA, num_kv_heads=1, head_dim=6)):
        config = sequence_parallel(config, (0, tokens))
        found, ran = [], []
        for saves in (False, True):
            torch.manual_seed(block.seed)
            module = ParallelTransformerBlock(replace(config, save_gathered=saves), device=ctx.device, **block.place)
            x = block.own(block.randn(tokens, 2, config.hidden_size, dtype=torch.float32), 0).requires_grad_()
            before = len(explain())
            module(x).square().sum().backward()
            found.append([x.grad, *(local(param.grad) for param in module.parameters())])
            told = (choice.operation.removesuffix(f" {config.activation}") for choice in explain()[before:])
            ran.append({operation for operation in told if "all_gather" in operation})
        for without, with_ in zip(*found, strict=True):
            torch.testing.assert_close(with_, without)
        assert ran == [{"all_gather_matmul"}, {"all_gather_matmul saving all rows"}], config


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_a_block_that_saves_gathered_rows(workers, tp, seed):
    workers.run(check_saves, tp, seed)
