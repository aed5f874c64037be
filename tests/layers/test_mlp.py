"""The feed-forward layers against plain torch, and the packed order of gate and up."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import Block, check_module, collectives_made, refuses, twins, unpacked
from tpfused import ParallelGatedMLP, ParallelMLP
from tpfused.group import TPGroup

# As in test_linear: where the tokens are, and how many; None is without sequence parallelism.
TOKENS = [(None, 3), (0, 8), (0, 5), (1, 2), (-2, 1)]

modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def dense_mlp(activate):
    def dense(x, **w):
        hidden = activate(F.linear(x, w["fc1.weight"], w.get("fc1.bias")))
        return F.linear(hidden, w["fc2.weight"], w.get("fc2.bias"))

    return dense


def dense_gated_mlp(activate):
    def dense(x, **w):
        gate = F.linear(x, w["gate.weight"], w.get("gate.bias"))
        up = F.linear(x, w["up.weight"], w.get("up.bias"))
        return F.linear(activate(gate) * up, w["down.weight"], w.get("down.bias"))

    return dense


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def mlp_case(block, kind, dense, hidden, ffn, sequence_dim, tokens, dtype=torch.float64, **options):
    if sequence_dim is not None:
        options |= {"sequence_parallel": True, "sequence_dim": sequence_dim}
    layer, whole = twins(block, lambda **place: kind(hidden, ffn, **options, **place), dtype)
    x = block.randn(*((tokens, 2, hidden) if sequence_dim in (None, 0) else (2, tokens, hidden)), dtype=dtype)
    total_len = None if sequence_dim is None else tokens
    check_module(
        layer,
        lambda x: layer(x, total_len=total_len),
        {"x": x},
        block.randn(*x.shape, dtype=dtype),
        dense,
        whole,
        lambda name, value: block.own(value, sequence_dim),
        f"{kind.__name__} {hidden}, {ffn}, {tokens} tokens, {options}",
    )


def check_mlp(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    # Even, uneven, with an empty shard.
    for ffn, (sequence_dim, tokens) in block.some(product((12, 10, 3), TOKENS)):
        mlp_case(block, ParallelMLP, dense_mlp(F.gelu), 5, ffn, sequence_dim, tokens)
    for name, activate in (("relu", F.relu), ("gelu_tanh", gelu_tanh), ("silu", F.silu)):
        mlp_case(block, ParallelMLP, dense_mlp(activate), 5, 10, 0, 3, activation=name, bias=False)


def check_gated(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for ffn, (sequence_dim, tokens) in block.some(product((12, 7 if tp == 4 else 16), TOKENS)):
        mlp_case(block, ParallelGatedMLP, dense_gated_mlp(F.silu), 5, ffn, sequence_dim, tokens)
    for name, activate in (("gelu", F.gelu), ("gelu_tanh", gelu_tanh), ("relu", F.relu)):
        mlp_case(block, ParallelGatedMLP, dense_gated_mlp(activate), 5, 12, 0, 3, activation=name, bias=True)


def check_dtypes(ctx, tp, seed, dtype):
    block = Block(ctx, tp, "group", seed)
    for sequence_dim in (None, 0):
        mlp_case(block, ParallelMLP, dense_mlp(F.gelu), 64, 256, sequence_dim, 10, dtype)
        mlp_case(block, ParallelGatedMLP, dense_gated_mlp(F.silu), 64, 256, sequence_dim, 10, dtype)


def check_counts(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    for kind in (ParallelMLP, ParallelGatedMLP):
        for sequence_parallel, forward, backward in (
            (False, ["all_reduce"], ["all_reduce"]),
            (True, ["all_gather", "reduce_scatter"], ["all_gather", "reduce_scatter"]),
        ):
            place = {"device": ctx.device, "dtype": torch.float64, **block.place}  # which no operation overlaps
            layer = kind(8, 16, bias=False, sequence_parallel=sequence_parallel, **place)
            x = block.randn(2, 8).requires_grad_()
            with collectives_made() as names:
                out = layer(x)
                assert names == (forward if tp > 1 else [])
                names.clear()
                out.sum().backward()
                assert names == (backward if tp > 1 else [])


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)
    place = {"device": ctx.device, **block.place}
    for kind in (ParallelMLP, ParallelGatedMLP):
        with refuses(ValueError, "tanh"):
            kind(8, 16, "tanh", **place)
        with refuses(ValueError, "fast"):
            kind(8, 16, backend="fast", **place)
        for sizes in ((0, 16), (8, 0), (8, -2)):
            with refuses(ValueError, min(sizes)):
                kind(*sizes, **place)
        with refuses(ValueError, 8, (2, 9)):
            kind(8, 16, **place)(block.randn(2, 9, dtype=torch.float32))
        with refuses(ValueError, 5):
            kind(8, 16, **place)(block.randn(2, 8, dtype=torch.float32), total_len=5)
    with refuses(ValueError, "a gate's activation", None):
        ParallelGatedMLP(8, 16, None, **place)
    if tp > 1:
        ffn = tp + 1
        with refuses(ValueError, ffn, tp, f"divisible by {tp} fits"):
            ParallelGatedMLP(8, ffn, **place)


@modes
def test_mlp_equals_dense(workers, tp, mode, seed):
    workers.run(check_mlp, tp, mode, seed)


@modes
def test_gated_mlp_equals_dense(workers, tp, mode, seed):
    workers.run(check_gated, tp, mode, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_obeys_the_tolerance(workers, tp, seed, dtype):
    workers.run(check_dtypes, tp, seed, dtype)


def test_one_collective_each_way(workers, tp):
    workers.run(check_counts, tp)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


@pytest.mark.parametrize("bias", [True, False])
def test_initialised_as_linear_layers_one_by_one(seed, bias):
    for kind, parts in ((ParallelMLP, ["fc1", "fc2"]), (ParallelGatedMLP, ["gate", "up", "down"])):
        torch.manual_seed(seed)
        layer = kind(7, 10, bias=bias, group=TPGroup(None, 0, 1))
        found = unpacked(layer, dict(layer.named_parameters()))
        torch.manual_seed(seed)
        sizes = {part: (7, 10) for part in parts[:-1]} | {parts[-1]: (10, 7)}
        expected = {part: nn.Linear(*sizes[part], bias) for part in parts}
        assert len(found) == len(parts) * (1 + bias)
        for part, linear in expected.items():
            for kind_, param in linear.named_parameters():
                assert torch.equal(found[f"{part}.{kind_}"], param)


def test_gate_and_up_alternate_row_by_row(seed):
    torch.manual_seed(seed)
    layer = ParallelGatedMLP(3, 4, bias=True)
    parts = unpacked(layer, dict(layer.named_parameters()))
    assert layer.gate_up.weight.shape == (8, 3)
    for row in range(4):
        assert torch.equal(layer.gate_up.weight[2 * row], parts["gate.weight"][row])
        assert torch.equal(layer.gate_up.weight[2 * row + 1], parts["up.weight"][row])


def test_the_last_projection_may_be_replaced():
    """By a wrapper, which need not know of the layer's backend."""
    layer = ParallelGatedMLP(3, 4, group=TPGroup(None, 0, 1))
    layer.down = nn.Identity()
    assert layer(torch.ones(2, 3)).shape == (2, 4)
