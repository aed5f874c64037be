"""What layers and operations return may be changed in place, whatever its shape, and has its own gradient then."""

import torch

from tests.compare import Block, assert_close
from tests.layers.paths import paths
from tpfused import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelGatedMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    collectives,
    matmul_reduce_scatter,
)
from tpfused.group import resolve_group


def changed_like_others(function, x, params, where):
    """``y *= 3`` after `function` against ``y * 3``: values, gradients, and that `x` is left alone."""
    before, results = x.clone(), []
    for change in (lambda y: y * 3, lambda y: y.mul_(3)):
        given = x.clone().requires_grad_(x.is_floating_point())
        y = change(function(given))
        wanted = [tensor for tensor in (given, *params) if tensor.requires_grad]
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), wanted)))
        assert torch.equal(given, before), where
    for actual, expected in zip(*results[::-1], strict=True):
        assert_close(actual, expected, where)


def check_layers(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    options = {"bias": False, "dtype": torch.float64, "device": block.device, **block.place}
    for dim in (0, 1):
        scattered = {"sequence_parallel": True, "sequence_dim": dim}
        for batch in (1, 2):
            tokens, own = ([n, batch] if dim == 0 else [batch, n] for n in (2 * tp, 2))
            embedding = VocabParallelEmbedding(
                9, 8, dtype=torch.float64, device=block.device, **scattered, **block.place
            )
            ids = torch.randint(9, tokens, device=block.device)
            changed_like_others(embedding, ids, [*embedding.parameters()], f"embedding, {dim}, {batch}")
            for layer, shape in (
                (ColumnParallelLinear(8, 8, gather_output=True, **options), (batch, 8)),
                (ColumnParallelLinear(8, 8, gather_output=True, **scattered, **options), (*own, 8)),
                (RowParallelLinear(8, 6, **scattered, **options), (*tokens, 8 // tp)),
                (RowParallelLinear(8, 6, input_is_parallel=False, **options), (batch, 8)),
                (ParallelGatedMLP(8, 8, **scattered, **options), (*own, 8)),
                (ParallelAttention(8, 4, **scattered, **options), (*own, 8)),
            ):
                changed_like_others(layer, block.randn(*shape), [*layer.parameters()], f"{layer}, {dim}, {batch}")
            weight = block.randn(6, 3).requires_grad_()

            def scatter(x, weight=weight, dim=dim):
                return matmul_reduce_scatter(x, weight, sequence_dim=dim, group=block.group)

            changed_like_others(scatter, block.randn(*tokens, 3), [weight], f"{dim}, {batch}")


def test_what_layers_return_may_be_changed_in_place(workers, tp, seed):
    workers.run(check_layers, tp, seed)


def check_overlapped(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for _ in paths(ctx, tp):
        for rows in (1, 2):
            layer = RowParallelLinear(8, 6, False, sequence_parallel=True, device=block.device, **block.place)
            x = block.randn(rows * tp, 8 // tp, dtype=torch.float32).requires_grad_()
            y = layer(x)
            y /= 2
            y.sum().backward()
            torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand_as(x) / 2)


def test_what_overlapped_operations_return_may_be_too(workers, tp, seed):
    workers.run(check_overlapped, tp, seed)


def check_pairs(ctx, tp, seed):
    """Even and uneven splits, along either dimension, of tensors of several rows and of one."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    group = resolve_group(block.group)
    for total in (2 * tp, 2 * tp + 1):
        for shape, dim in (((total, 3), 0), ((total, 1), 0), ((3, total), 1), ((1, total), -1)):
            whole = block.randn(*shape)
            for function, x, more in (
                (collectives.reduce_from_group, whole, ()),
                (collectives.scatter_to_group, whole, (dim,)),
                (collectives.reduce_scatter_tokens, whole, (dim,)),
                (collectives.gather_from_group, block.own(whole, dim), (dim, total)),
                (collectives.all_gather_tokens, block.own(whole, dim), (dim, total)),
            ):
                changed_like_others(lambda x, f=function, m=more: f(x * 1, *m, group), x, [], (function, shape, dim))


def test_what_the_conjugate_pairs_return_may_be_changed_in_place(workers, tp, seed):
    workers.run(check_pairs, tp, seed)
