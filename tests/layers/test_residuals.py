"""A block's residuals, which go into the sums of the ranks' parts under sequence parallelism."""

import torch

from tests.compare import Block, refuses
from tests.layers.test_transformer import LLAMA, sequence_parallel
from tpfused import ParallelTransformerBlock
from tpfused.placement import local


def check_hooks(ctx, tp, seed):
    """Who listens to a layer hears what it gives by itself, without the residual that else goes into its sum."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    config = sequence_parallel(LLAMA, (0, 8))
    layer = ParallelTransformerBlock(config, device=ctx.device, dtype=torch.float64, **block.place)
    x = block.own(block.randn(4 * tp, 2, config.hidden_size), 0)
    assert layer._joins_residuals()
    alone = layer(x)
    heard = {}
    for part in (layer.attention, layer.mlp.down):
        part.register_forward_hook(lambda module, args, out: heard.update({module: out}))
    assert not layer._joins_residuals()
    torch.testing.assert_close(layer(x), alone)
    attended = x + heard[layer.attention]
    torch.testing.assert_close(attended + heard[layer.mlp.down], alone)
    down = layer.mlp.down
    fed = torch.ones(4 * tp, 2, local(down.weight).shape[1], device=ctx.device, dtype=torch.float64)
    with refuses(ValueError, "the residual, (4, 1, 6)", "must be (4, 2, 6)"):
        down(fed, residual=x[:, :1])
    down.skip_bias_add = True
    with refuses(ValueError, "a residual goes with neither"):
        down(fed, residual=x)


def test_hooks_hear_a_layer_by_itself(workers, tp, seed):
    workers.run(check_hooks, tp, seed)
