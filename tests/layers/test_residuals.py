"""Residuals, which under sequence parallelism go into the sums of the ranks' parts."""

import torch
from torch import nn

from tests.compare import Block, refuses
from tests.layers.test_transformer import LLAMA, sequence_parallel
from tpfused import (
    ParallelAttention,
    ParallelGatedMLP,
    ParallelMLP,
    ParallelTransformerBlock,
    RowParallelLinear,
)
from tpfused.layers.norm import Norm
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


def check_residuals(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    for parallel in (False, True):
        for backend in (None, "reference"):
            options = {"backend": backend, "sequence_parallel": parallel, "device": ctx.device, **block.place}
            rows, own = (2 * tp, 2) if parallel else (2, 2)
            for layer, x in (
                (RowParallelLinear(6 * tp, 12, **options), torch.ones(rows, 3, 6)),
                (ParallelMLP(12, 8, **options), torch.ones(own, 3, 12)),
                (ParallelGatedMLP(12, 8, **options), torch.ones(own, 3, 12)),
                (ParallelAttention(12, 4, **options), torch.ones(own, 3, 12)),
            ):
                x, name = x.to(ctx.device), type(layer).__name__
                good = torch.ones(own, 3, 12, device=ctx.device)
                norm = Norm("rmsnorm", 12, device=ctx.device, **block.place)
                for wrong in (good[:1], good[:, :1], good[..., :1], good[0], good.expand(4, *good.shape)):
                    with refuses(ValueError, f"{name}: the residual", tuple(wrong.shape), (own, 3, 12)):
                        layer(x, residual=wrong)
                    if not parallel:
                        with refuses(ValueError, f"{name}: the residual", tuple(wrong.shape), (own, 3, 12)):
                            layer(x, then=(wrong, norm))
                with refuses(TypeError, name, "residual must be a tensor", "'x'"):
                    layer(x, residual="x")
                layer(x, residual=good)
                if parallel:
                    continue
                for wrong, got in ((5, "5"), ((good,), "['Tensor']"), ((good, nn.LayerNorm(12)), "'LayerNorm'")):
                    with refuses(TypeError, name, "`then` must be a residual and a tpfused Norm", got):
                        layer(x, then=wrong)
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        layer(x, then=(good, norm))


def test_residuals_that_would_be_broadcast_are_refused(workers, tp):
    workers.run(check_residuals, tp)
