"""Weight gradients that are added to ``weight.main_grad`` in float32."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrize

from tests.compare import Block, refuses
from tests.layers.paths import assert_near, gradients, make_model, paths
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tests.overlap.cases import OPERATIONS
from tests.overlap.test_operations import CASES, draw
from tpfused import (
    ColumnParallelLinear,
    ParallelTransformer,
    RowParallelLinear,
    VocabParallelEmbedding,
    clip_grad_norm_,
)
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


def check_for_the_input_alone(ctx, tp):
    """A backward pass adds the weight's gradient without being asked for it where it runs overlapped."""
    block = Block(ctx, tp, "group", 0)
    for name in paths(ctx, tp):
        for operation, splits, options in CASES:
            x, weight, bias = (value.requires_grad_() for value in draw(block, splits, torch.float32).values())
            main_grad = torch.zeros_like(weight)
            out = operation(x, weight, bias, main_grad=main_grad, group=block.group, **options)
            torch.autograd.grad(out.square().sum(), x)
            if main_grad.numel():
                assert main_grad.any() == (name != "reference"), f"{operation.__name__} {name}"


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
    """Its hooks see a `grad`, which adds nothing, and that the gradient is in main_grad; compiled, too."""
    block = Block(ctx, tp, "group", seed)
    x = torch.ones(3, 8, device=block.device)
    for name in paths(ctx, tp):
        layer = ColumnParallelLinear(8, 8, device=block.device, accumulate_main_grad=True, **block.place)
        seen = []
        layer.weight.register_post_accumulate_grad_hook(lambda param, seen=seen: seen.append(param.grad))
        for compiles in (False, True):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
            torch._dynamo.reset()
            function = torch.compile(layer, backend="aot_eager") if compiles else layer
            function(x).sum().backward()
            assert layer.weight.grad_added_to_main_grad and len(seen) == 1 and not seen.pop().any(), (name, compiles)
            assert (layer.weight.main_grad == 3).all()
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="grad_added_to_main_grad"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


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


def check_weights_out_of_sight(ctx, tp, case):
    """Where forward computes with another tensor than the parameter that has the main_grad, nothing is added to it."""
    place = {"mesh": ctx.mesh(tp)}
    ids, x = torch.zeros(2, dtype=torch.int64, device=ctx.device), torch.ones(2, 4, device=ctx.device)
    options = {"device": ctx.device, "accumulate_main_grad": True, **place}
    layers = [(ColumnParallelLinear(4, 8, **options), x), (VocabParallelEmbedding(4, 8, **options), ids)]
    layers.append((RowParallelLinear(4 * tp, 8, **options), x))
    layers.append((ParallelTransformer(replace(CONFIGS[1], accumulate_main_grad=True), **place), ids[None]))
    for before in (False, True):
        for layer, given in layers:
            layer = copy.deepcopy(layer)
            inner = layer.embedding if isinstance(layer, ParallelTransformer) else layer
            if before:
                inner.weight.main_grad = torch.zeros_like(local(inner.weight))
            if case == "fsdp2":
                fully_shard(layer, mesh=ctx.grid(tp)["dp"])
            else:
                parametrize.register_parametrization(inner, "weight", nn.Identity())
            if not before:
                for param in layer.parameters():
                    param.main_grad = torch.zeros_like(param)
            with refuses(
                ValueError, f"{type(inner).__name__}.weight", "accumulate_main_grad", "FSDP2", "ignored_params"
            ):
                layer(given)


@pytest.mark.parametrize("case", ["fsdp2", "parametrized"])
@two_ranks
def test_weights_that_are_others_in_forward_are_refused(workers, tp, case):
    workers.run(check_weights_out_of_sight, tp, case)


def check_left_out_of_fsdp2(ctx, tp):
    """What FSDP2 ignores stays the layer's; and it shards layers without main_grads as ever."""
    layer = ColumnParallelLinear(4, 8, device=ctx.device, mesh=ctx.mesh(tp), accumulate_main_grad=True)
    fully_shard(layer, mesh=ctx.grid(tp)["dp"], ignored_params={layer.weight})
    layer.weight.main_grad = torch.zeros_like(local(layer.weight))
    layer(torch.ones(2, 4, device=ctx.device)).sum().backward()
    assert (layer.weight.main_grad == 2).all() and layer.weight.grad is None


@two_ranks
def test_weights_that_fsdp2_ignores(workers, tp):
    workers.run(check_left_out_of_fsdp2, tp)


def test_clipping_a_main_grad_beside_another_gradient():
    plain, both = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    plain.grad = torch.ones(3)
    both.main_grad = torch.zeros(3)
    assert clip_grad_norm_([plain, both], 9.0) == 3**0.5
    both.grad = torch.ones(3)
    for mark in (None, False):
        if mark is not None:
            both.grad_added_to_main_grad = mark
        with refuses(ValueError, "parameter 1", (3,), "main_grad", "FSDP2"):
            clip_grad_norm_([plain, both], 1.0)
        assert (plain.grad == 1).all()
    both.grad_added_to_main_grad = True  # what a layer says that has given zeros, to which others may have added
    assert clip_grad_norm_([plain, both], 9.0) == 6**0.5
    both.main_grad += 2
    assert clip_grad_norm_([plain, both], 30**0.5 / 2).item() == pytest.approx(30**0.5)
    scaled = torch.stack((plain.grad, both.grad, both.main_grad))
    torch.testing.assert_close(scaled, torch.tensor([0.5, 0.5, 1])[:, None].expand(3, 3))
    both.grad = torch.eye(3)[0].to_sparse()
    plain.grad, both.main_grad = None, torch.ones(3)
    assert clip_grad_norm_([plain, both], 9.0) == 6**0.5
    plain.grad, both.grad = torch.ones(3), torch.ones(3)
    del both.grad_added_to_main_grad
    both.main_grad = both.grad
    assert clip_grad_norm_([plain, both], 1.0) == 6**0.5
    assert (both.grad < 1).all()


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
def test_for_the_input_alone(workers, tp):
    workers.run(check_for_the_input_alone, tp)


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
