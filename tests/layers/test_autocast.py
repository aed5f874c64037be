"""Autocast: results in the dtypes of torch's own layers, overlapped too, and gradients in the parameters'."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.compare import Block, packed, part, strided, unpacked
from tests.layers.paths import assert_near, gradients, make_model, paths
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tests.overlap.test_operations import CASES, draw
from tpfused import (
    ColumnParallelLinear,
    ParallelGatedMLP,
    ParallelTransformer,
    RowParallelLinear,
    VocabParallelEmbedding,
    explain,
    reference,
    vocab_parallel_cross_entropy,
)
from tpfused.group import TPGroup
from tpfused.layers.norm import Norm
from tpfused.overlap import choice
from tpfused.overlap.tiers import tier
from tpfused.placement import local

HALVES = [torch.bfloat16, torch.float16]
CONFIGS = [
    replace(GPT, sequence_parallel=True),
    replace(LLAMA, tie_embeddings=True),
    replace(LLAMA, sequence_parallel=True, num_kv_heads=1, sequence_dim=1),
]
two_ranks = pytest.mark.parametrize("tp", [2], indirect=True)


def check_operations(ctx, tp, seed, half):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for operation, splits, options in CASES:
        inputs = draw(block, splits, torch.float32)
        x, weight, bias = (value.requires_grad_() for value in inputs.values())

        def results(x=x, weight=weight, bias=bias, operation=operation, options=options):
            out = operation(strided(x), weight, bias, group=block.group, **options)
            names, leaves = zip(*(pair for pair in (("x", x), ("weight", weight), ("bias", bias))), strict=True)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
            return {"out": out.detach()} | dict(zip(names, grads, strict=True))

        with tier("reference"):
            exact = results()
        exact["out"] = exact["out"].to(half)
        for name in paths(ctx, tp):
            choice._known.clear()
            choice._listed.clear()
            with torch.autocast(ctx.device.type, half):
                assert_near(results(), exact, f"{operation.__name__} {name} {half}", 0.06)
            dtype = str(half).removeprefix("torch.")
            [row] = explain()
            assert row.operation.startswith(operation.__name__), explain()  # and perhaps what it saves
            assert (row.tier, row.dtype) == (name, dtype), explain()


def check_layers(ctx, tp, seed, half):
    """Dtypes are those of torch's layers, for inputs of both dtypes."""
    block = Block(ctx, tp, "group", seed)
    place = {"device": ctx.device}
    pairs = [
        (ColumnParallelLinear(8, 8, gather_output=True, **place, **block.place), nn.Linear(8, 8, **place), 8),
        (RowParallelLinear(8, 8, input_is_parallel=False, **place, **block.place), nn.Linear(8, 8, **place), 8),
        (Norm("layernorm", 8, **place, **block.place), nn.LayerNorm(8, **place), 8),
        (Norm("rmsnorm", 8, **place, **block.place), nn.RMSNorm(8, **place), 8),
        (VocabParallelEmbedding(8, 8, **place, **block.place), nn.Embedding(8, 8, **place), None),
    ]
    gated = ParallelGatedMLP(8, 8, **place, **block.place)
    weights = nn.Linear(8, 16, **place), nn.Linear(8, 8, **place)
    pairs.append((gated, lambda x: weights[1](reference.gated_act(weights[0](x), "silu")), 8))
    for name in paths(ctx, tp):
        for layer, dense, features in pairs:
            for dtype in (torch.float32, half) if features else (torch.int64,):
                with torch.autocast(ctx.device.type, half):
                    x = (
                        torch.ones(4, features, dtype=dtype, **place)
                        if features
                        else torch.ones(4, dtype=dtype, **place)
                    )
                    if features:
                        x.requires_grad_()
                    out, expected = layer(x), dense(x)
                assert out.dtype == expected.dtype, (name, type(layer).__name__, dtype, out.dtype, expected.dtype)
                out.sum().backward()
                for parameter in layer.parameters():
                    assert local(parameter.grad).dtype == torch.float32
                assert features is None or x.grad.dtype == dtype
        with torch.autocast(ctx.device.type, half):
            logits, labels = torch.ones(3, 8, dtype=half, **place), torch.ones(3, dtype=torch.int64, **place)
            loss = vocab_parallel_cross_entropy(block.own(logits, -1), labels, group=block.group)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, F.cross_entropy(logits, labels).float(), rtol=1e-2, atol=1e-2)


def check_models(ctx, tp, seed, half):
    """The loss and the gradients of one rank alone, up to roundings."""
    block = Block(ctx, tp, "group", seed)
    for config in CONFIGS:
        config = replace(config, hidden_size=16, ffn_size=32, head_dim=4)
        alone = make_alone(block, config)
        ids, labels = draw_ids(block, config, 8), draw_ids(block, config, 8)
        with torch.autocast(ctx.device.type, half):
            expected = alone.loss(ids, labels)
        expected.backward()
        grads = unpacked(alone, {name: param.grad for name, param in alone.named_parameters()})
        for name in paths(ctx, tp):
            model = make_model(block, config)
            with torch.autocast(ctx.device.type, half):
                loss = model.loss(ids, labels)
            loss.backward()
            assert loss.dtype == torch.float32 and abs(loss - expected) < 0.02, (name, loss, expected)
            found, parameters = gradients(model), dict(model.named_parameters())
            for key, whole in packed(model, grads).items():
                if config.bias and config.positions == "learned" and key.endswith("qkv.bias"):
                    continue  # a key's has no gradient but rounding
                error = (found[key] - part(whole, parameters[key])).abs().max()
                assert found[key].dtype == torch.float32 and error <= 0.1 * whole.abs().max(), (name, key, error)
            assert name in {row.tier for row in explain()}


def make_alone(block, config):
    """The same model on each rank by itself."""
    torch.manual_seed(block.seed)
    return ParallelTransformer(config, device=block.device, group=TPGroup(None, 0, 1))


def check_grad_scaler(ctx, tp, seed):
    """Loss scaling in float16: the steps of float32, and where a gradient overflows none, on no rank."""
    block = Block(ctx, tp, "group", seed)
    config = replace(GPT, sequence_parallel=True, hidden_size=16, ffn_size=32, head_dim=4)
    ids = draw_ids(block, config, 8)
    plain = make_model(block, config)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain.loss(ids, ids.roll(1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in paths(ctx, tp):
        for scaler in (
            torch.amp.GradScaler(ctx.device.type, init_scale=2.0**10),
            ShardedGradScaler(ctx.device.type, init_scale=2.0**10, process_group=block.group),
        ):
            model = make_model(block, config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(model=model, optimizer=optimizer, scaler=scaler, spoils=False):
                with torch.autocast(ctx.device.type, torch.float16):
                    loss = model.loss(ids, ids.roll(1, 1))
                scaler.scale(loss).backward()
                if spoils:
                    model.blocks[0].mlp.fc1.weight.grad.fill_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

            for _ in range(3):
                step()
            assert scaler.get_scale() == 2.0**10
            now = {key: local(param).detach().clone() for key, param in model.named_parameters()}
            wanted = {key: local(param).detach() for key, param in plain.named_parameters()}
            assert_near(now, wanted, f"{name} {type(scaler).__name__}", 0.02)
            if isinstance(scaler, ShardedGradScaler):
                step(spoils=block.rank == 1)
                assert scaler.get_scale() == 2.0**9
                for key, param in model.named_parameters():
                    assert torch.equal(local(param), now[key]), key


halves = pytest.mark.parametrize("half", HALVES, ids=["bf16", "fp16"])


@two_ranks
@halves
def test_operations_run_overlapped(workers, tp, seed, half):
    workers.run(check_operations, tp, seed, half)


@two_ranks
@halves
def test_dtypes_are_those_of_torchs_layers(workers, tp, seed, half):
    workers.run(check_layers, tp, seed, half)


@two_ranks
@halves
def test_models(workers, tp, seed, half):
    workers.run(check_models, tp, seed, half)


@two_ranks
def test_loss_scaling(workers, tp, seed):
    workers.run(check_grad_scaler, tp, seed)
