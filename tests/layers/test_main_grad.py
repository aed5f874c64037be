"""Weight gradients that are added to ``weight.main_grad`` in float32."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.compare import Block, refuses
from tests.layers.paths import assert_near, gradients, make_model, paths
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tests.overlap.cases import OPERATIONS
from tests.overlap.test_operations import CASES, draw
from tpfused import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, clip_grad_norm_
from tpfused.placement import local

CONFIGS = [
    replace(GPT, sequence_parallel=True),
    replace(LLAMA, tie_embeddings=True),
    replace(LLAMA, sequence_parallel=True, num_kv_heads=1, bias=True),  # a head's k and v on both ranks
]
two_ranks = pytest.mark.parametrize("tp", [2], indirect=True)


def with_main_grads(model, in_mesh=False):
    """-> the main_grads, of all weights but the norms' and positions'."""
    made = {}
    for name, param in model.named_parameters():
        if name.endswith("weight") and "norm" not in name and name != "positions.weight":
            made[name] = torch.zeros(local(param).shape, device=param.device)
            param.main_grad = (
                DTensor.from_local(made[name], param.device_mesh, param.placements) if in_mesh else made[name]
            )
    return made


def check_models(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        for name in paths(ctx, tp):
            plain, model = make_model(block, config), make_model(block, replace(config, accumulate_main_grad=True))
            main_grads = with_main_grads(model, in_mesh=mode == "mesh")
            for _ in range(3):
                ids = draw_ids(block, config, 6)
                plain.loss(ids, ids.roll(1, 1)).backward()
                model.loss(ids, ids.roll(1, 1)).backward()
            found = gradients(model)
            assert main_grads and not found.keys() & main_grads.keys()
            assert_near(found | main_grads, gradients(plain), f"{name} {config}")


def check_precision(ctx, tp, seed):
    """What 16 bits would lose: a small gradient on top of a large one."""
    block = Block(ctx, tp, "group", seed)
    for name in paths(ctx, tp):
        for kind, shape in ((ColumnParallelLinear, (4, 2, 8)), (RowParallelLinear, (4, 2, 8 // tp))):
            for sequence_parallel in (False, True):
                options = {"sequence_parallel": sequence_parallel, "accumulate_main_grad": True}
                layer = kind(8, 8, dtype=torch.float16, device=block.device, **options, **block.place)
                layer.weight.main_grad = torch.full(layer.weight.shape, 2048.0, device=block.device)
                x = torch.full(shape, 2**-4, dtype=torch.float16, device=block.device).requires_grad_()
                out = layer(x, total_len=None) if kind is ColumnParallelLinear else layer(x)
                out.backward(torch.full_like(out, 2**-6))
                tokens = 8 * tp if sequence_parallel and kind is ColumnParallelLinear else 8
                added = layer.weight.main_grad - 2048
                assert torch.equal(added, torch.full_like(added, tokens * 2**-10)), (name, kind, sequence_parallel)
                assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None


def check_clipping(ctx, tp, mode, seed):
    """By the norm of all gradients, wherever they are; ``grad`` beside a main_grad is zeros for hooks."""
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        plain, model = make_model(block, config), make_model(block, replace(config, accumulate_main_grad=True))
        main_grads = with_main_grads(model, in_mesh=mode == "mesh")
        if mode == "mesh":  # plain local tensors serve as well
            model.embedding.weight.main_grad = main_grads["embedding.weight"]
        for layer in (each.attention.out for each in model.blocks):
            layer.weight.grad_added_to_main_grad = False
        ids = draw_ids(block, config, 6)
        plain.loss(ids, ids.roll(1, 1)).backward()
        model.loss(ids, ids.roll(1, 1)).backward()
        expected = clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.01), expected, rtol=1e-4, atol=0)
        assert expected > 0.02
        found = gradients(model)
        announced = found.keys() & main_grads.keys()
        assert announced
        for name in announced:
            assert not found[name].any()
        assert_near(found | main_grads, gradients(plain), str(config))


def check_operations(ctx, tp, seed):
    """As an argument, one and several, with frozen weights, and twice through the same graph."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for name in paths(ctx, tp):
        for operation, splits, options in CASES:
            inputs = draw(block, splits, torch.float32)
            x, weight, bias = (value.requires_grad_() for value in inputs.values())
            out = operation(x, weight, bias, group=block.group, **options)
            expected = torch.autograd.grad(out.square().sum(), (x, weight, bias))
            main_grad = torch.ones_like(weight)
            out = operation(x, weight, bias, main_grad=main_grad, group=block.group, **options).square().sum()
            for count in (1, 2):
                found = torch.autograd.grad(out, (x, weight, bias), retain_graph=True, allow_unused=True)
                assert found[1] is None
                found = dict(x=found[0], weight=main_grad - 1, bias=found[2])
                wanted = dict(x=expected[0], weight=count * expected[1], bias=expected[2])
                assert_near(found, wanted, f"{operation.__name__} {name}")
            before = main_grad.clone()
            out = operation(x, weight.detach(), bias, main_grad=main_grad, group=block.group, **options)
            out.sum().backward()
            assert torch.equal(main_grad, before)


def check_several_weights(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    operation = OPERATIONS["all_gather_matmul"]
    for name in paths(ctx, tp):
        x, *weights = (block.randn(n, 6, dtype=torch.float32).requires_grad_() for n in (4, 3, 5))
        expected = torch.autograd.grad(sum(y.square().sum() for y in operation(x, weights, group=block.group)), weights)
        for first in (torch.zeros_like(weights[0]), None):
            main_grads = [first, torch.zeros_like(weights[1])]
            outs = operation(x, weights, main_grad=main_grads, group=block.group)
            found = torch.autograd.grad(sum(y.square().sum() for y in outs), weights, allow_unused=True)
            assert (found[0] is None) == (first is not None) and found[1] is None
            found = dict(first=first if found[0] is None else found[0], second=main_grads[1])
            assert_near(found, dict(zip(found, expected, strict=True)), name)


def check_megatrons_marks(ctx, tp, seed):
    """Its hooks see a `grad`, which adds nothing, and that the gradient is in main_grad."""
    block = Block(ctx, tp, "group", seed)
    for name in paths(ctx, tp):
        layer = ColumnParallelLinear(8, 8, device=block.device, accumulate_main_grad=True, **block.place)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
        seen = []
        layer.weight.register_post_accumulate_grad_hook(lambda param, seen=seen: seen.append(param.grad))
        layer(torch.ones(3, 8, device=block.device)).sum().backward()
        assert layer.weight.grad_added_to_main_grad and len(seen) == 1 and not seen[0].any(), name
        assert (layer.weight.main_grad == 3).all()


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)
    ids = torch.zeros(2, 2, dtype=torch.int64, device=block.device)
    for kind, x in ((ColumnParallelLinear, torch.ones(2, 4, device=block.device)), (VocabParallelEmbedding, ids)):
        layer = kind(4, 6, device=block.device, accumulate_main_grad=True, **block.place)
        own = local(layer.weight).detach()
        for main_grad, error, told in (
            (torch.zeros(own.shape, device=block.device, dtype=torch.float16), TypeError, torch.float16),
            (torch.zeros(9, 9, device=block.device), ValueError, (9, 9)),
            (torch.zeros(own.shape, device="meta"), ValueError, "meta"),
            (torch.zeros(own.shape[::-1], device=block.device).t(), ValueError, "contiguous"),
        ):
            layer.weight.main_grad = main_grad
            with refuses(error, "main_grad", told):
                layer(x)
    weight = torch.ones(4, 4, device=block.device)
    with refuses(TypeError, "main_grad", "float64"):
        OPERATIONS["column_matmul"](weight, weight, main_grad=weight.double(), **block.place)
    sharded = DTensor.from_local(weight, ctx.mesh(tp), [Replicate()], run_check=False)
    for odd, told in ((sharded, "DTensor"), (weight.to_sparse(), "sparse")):
        with refuses(TypeError, "main_grad", told):
            OPERATIONS["column_matmul"](weight, weight, main_grad=odd, **block.place)
    with refuses(TypeError, "2 weights", "main_grads"):
        OPERATIONS["all_gather_matmul"](weight, [weight, weight], main_grad=weight, **block.place)


@two_ranks
@pytest.mark.parametrize("mode", ["group", "mesh"])
def test_models(workers, tp, mode, seed):
    workers.run(check_models, tp, mode, seed)


@two_ranks
def test_sums_are_in_float32(workers, tp, seed):
    workers.run(check_precision, tp, seed)


@pytest.mark.parametrize("mode", ["group", "mesh"])
@two_ranks
def test_clipping(workers, tp, mode, seed):
    workers.run(check_clipping, tp, mode, seed)


@two_ranks
def test_operations(workers, tp, seed):
    workers.run(check_operations, tp, seed)


@two_ranks
def test_several_weights(workers, tp, seed):
    workers.run(check_several_weights, tp, seed)


@two_ranks
def test_megatrons_marks(workers, tp, seed):
    workers.run(check_megatrons_marks, tp, seed)


@pytest.mark.parametrize("mode", ["group", "mesh"])
@two_ranks
def test_a_main_grad_that_does_not_fit_is_refused(workers, tp, mode):
    workers.run(check_refusals, tp, mode)
