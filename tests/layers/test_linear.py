"""Column- and row-parallel linear layers against nn.Linear."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import Block, collectives_made, compare, refuses, strided
from tpfused import ColumnParallelLinear, RowParallelLinear
from tpfused.placement import local, shard_info

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# Even, uneven, with empty shards, and a vocabulary head's.
SIZES = [(8, 8), (7, 10), (3, 5), (2, 1)]
# Where the tokens are and how many: None is without sequence parallelism; 2 and 1 tokens leave ranks without any.
TOKENS = [(None, 3), (0, 8), (0, 5), (1, 2), (-2, 1)]
# Taken in turn by the combinations of the above.
OPTIONS = [{}, {"bias": False}, {"skip_bias_add": True}]

modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def input_shape(sequence_dim, tokens, features):
    return (tokens, 2, features) if sequence_dim in (None, 0) else (2, tokens, features)


def dense_and_parallel(kind, block, in_features, out_features, dtype=torch.float64, **options):
    """nn.Linear and the layer, from one seed."""
    torch.manual_seed(block.seed)
    dense = nn.Linear(in_features, out_features, options.get("bias", True), device=block.device, dtype=dtype)
    torch.manual_seed(block.seed)
    layer = kind(in_features, out_features, dtype=dtype, device=block.device, **options, **block.place)
    return dense, layer


def sequence_options(sequence_dim):
    return {} if sequence_dim is None else {"sequence_parallel": True, "sequence_dim": sequence_dim}


def whole(out):
    """What a layer returned, with a skipped bias added."""
    return out if not isinstance(out, tuple) else out[0] if out[1] is None else out[0] + out[1]


def layer_results(layer, forward, x, grad):
    """The output and the gradients of `x` and of the layer's parameters, all this rank's local tensors."""
    x = strided(x).detach().requires_grad_()
    out = whole(forward(x))
    out.backward(strided(grad))
    return {"out": out.detach(), "x": x.grad} | {name: local(param.grad) for name, param in layer.named_parameters()}


def column_case(block, sizes, sequence_dim, tokens, dtype=torch.float64, activation=None, **options):
    in_features, out_features = sizes
    options |= sequence_options(sequence_dim)
    dense, layer = dense_and_parallel(
        ColumnParallelLinear, block, *sizes, dtype=dtype, activation=activation, **options
    )
    for name, param in layer.named_parameters():
        block.check_parameter(param, getattr(dense, name), 0)
    x = block.randn(*input_shape(sequence_dim, tokens, in_features), dtype=dtype)
    grad = block.randn(*x.shape[:-1], out_features, dtype=dtype)
    feature_dim = None if options.get("gather_output") else -1
    total_len = None if sequence_dim is None else tokens

    actual = layer_results(
        layer,
        lambda x: layer(x, total_len=total_len),
        block.own(x, sequence_dim),
        block.own(grad, feature_dim),
    )
    split = {"out": feature_dim, "x": sequence_dim, "weight": 0, "bias": 0}
    compare(
        actual,
        lambda x, weight, bias=None: ACTIVATIONS[activation](F.linear(x, weight, bias)),
        {"x": x, **dict(dense.named_parameters())},
        grad,
        lambda name, tensor: block.own(tensor, split[name]),
        f"column {sizes}, {tokens} tokens, {activation}, {options}",
    )


def row_case(block, sizes, sequence_dim, tokens, dtype=torch.float64, **options):
    in_features, out_features = sizes
    options |= sequence_options(sequence_dim)
    dense, layer = dense_and_parallel(RowParallelLinear, block, *sizes, dtype=dtype, **options)
    for name, param in layer.named_parameters():
        block.check_parameter(param, getattr(dense, name), {"weight": 1, "bias": None}[name])
    x = block.randn(*input_shape(sequence_dim, tokens, in_features), dtype=dtype)
    grad = block.randn(*x.shape[:-1], out_features, dtype=dtype)
    feature_dim = -1 if options.get("input_is_parallel", True) else None

    actual = layer_results(layer, layer, block.own(x, feature_dim), block.own(grad, sequence_dim))
    split = {"out": sequence_dim, "x": feature_dim, "weight": 1, "bias": None}
    compare(
        actual,
        lambda x, weight, bias=None: F.linear(x, weight, bias),
        {"x": x, **dict(dense.named_parameters())},
        grad,
        lambda name, tensor: block.own(tensor, split[name]),
        f"row {sizes}, {tokens} tokens, {options}",
    )


def check_column(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for number, (sizes, (sequence_dim, tokens), gather_output) in enumerate(
        block.some(product(SIZES, TOKENS, (False, True)))
    ):
        column_case(block, sizes, sequence_dim, tokens, gather_output=gather_output, **OPTIONS[number % len(OPTIONS)])
    for activation in ACTIVATIONS:
        column_case(block, (7, 10), None, 3, activation=activation, gather_output=True)
        column_case(block, (7, 10), 0, 5, activation=activation, bias=False)
    column_case(block, (3, 50257), None, 2)
    column_case(block, (3, 5), 0, 0)  # no tokens at all


def check_row(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for number, (sizes, (sequence_dim, tokens), parallel) in enumerate(
        block.some(product(SIZES, TOKENS, (True, False)))
    ):
        row_case(block, sizes, sequence_dim, tokens, input_is_parallel=parallel, **OPTIONS[number % len(OPTIONS)])
    row_case(block, (50257, 3), None, 2)
    row_case(block, (5, 3), 1, 0)


def check_dtypes(ctx, tp, mode, seed, dtype):
    block = Block(ctx, tp, mode, seed)
    for sequence_dim in (None, 0):
        column_case(block, (64, 256), sequence_dim, 10, dtype=dtype, activation="gelu")
        row_case(block, (256, 64), sequence_dim, 10, dtype=dtype)


def check_counts(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    x = block.randn(tp, 2, 8)

    def made(kind, x, frozen=False, **options):
        layer = kind(8, 8, dtype=torch.float64, device=block.device, **options, **block.place)
        x = x.detach().requires_grad_(not frozen)
        with collectives_made() as names:
            out = layer(x)
            forward = list(names)
            names.clear()
            out.sum().backward()
        return forward, sorted(names)

    shard, tokens, sequence = block.own(x, -1), block.own(x, 0), {"sequence_parallel": True}
    ledger = [
        (made(ColumnParallelLinear, x), [], ["all_reduce"]),
        (made(ColumnParallelLinear, x, frozen=True), [], []),
        (made(ColumnParallelLinear, x, gather_output=True), ["all_gather"], ["all_reduce"]),
        (made(ColumnParallelLinear, tokens, **sequence), ["all_gather"], ["reduce_scatter"]),
        (made(RowParallelLinear, shard), ["all_reduce"], []),
        (made(RowParallelLinear, x, input_is_parallel=False), ["all_reduce"], ["all_gather"]),
        (made(RowParallelLinear, shard, bias=False, **sequence), ["reduce_scatter"], ["all_gather"]),
        (made(RowParallelLinear, shard, **sequence), ["reduce_scatter"], ["all_gather", "all_reduce"]),
    ]
    for number, (names, forward, backward) in enumerate(ledger):
        assert names == ((forward, backward) if tp > 1 else ([], [])), (number, names)


def check_skipped_bias(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    column, row = ColumnParallelLinear, RowParallelLinear
    for kind, dim, gather in ((column, 0, {}), (column, None, {"gather_output": True}), (row, None, {})):
        dense, layer = dense_and_parallel(kind, block, 7, 6, skip_bias_add=True, **gather)
        x = block.randn(2, 7)
        out, bias = layer(x if kind is column else block.own(x, -1))
        torch.testing.assert_close(out, block.own(F.linear(x, dense.weight), -1 if dim == 0 else None))
        assert torch.equal(bias, block.own(dense.bias, dim))
        _, layer = dense_and_parallel(kind, block, 7, 6, skip_bias_add=True, bias=False, **gather)
        assert layer(x if kind is column else block.own(x, -1))[1] is None


def check_copies(ctx, tp, mode, seed):
    """deepcopy, moves between dtypes and the meta device keep weights and what is known of their shards."""
    block = Block(ctx, tp, mode, seed)
    for kind, dims in ((ColumnParallelLinear, (0, 0)), (RowParallelLinear, (1, None))):
        dense, layer = dense_and_parallel(kind, block, 7, 10)
        parameters = list(zip((dense.weight, dense.bias), dims, strict=True))

        def check(layer, parameters=parameters, dtype=torch.float64):
            for param, (whole, dim) in zip(layer.parameters(), parameters, strict=True):
                block.check_parameter(param, whole.to(dtype), dim)

        copied = copy.deepcopy(layer)
        with torch.no_grad():
            for param in layer.parameters():
                local(param).zero_()
        check(copied)
        assert copied.group is layer.group
        check(copied.to(torch.float32), dtype=torch.float32)

        empty = kind(7, 10, device="meta", dtype=torch.float64, **block.place)
        assert all(param.is_meta for param in empty.parameters())
        empty.to_empty(device=block.device)
        torch.manual_seed(block.seed)
        empty.reset_parameters()
        check(empty)

        layer.load_state_dict(copied.double().state_dict())
        for param, other in zip(layer.parameters(), copied.parameters(), strict=True):
            assert torch.equal(local(param), local(other)) and shard_info(param) == shard_info(other)


def check_init_method(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for kind, dims in ((ColumnParallelLinear, (0, 0)), (RowParallelLinear, (1, None))):
        dense, layer = dense_and_parallel(kind, block, 7, 10, init_method=nn.init.xavier_uniform_)
        torch.manual_seed(block.seed)
        nn.init.xavier_uniform_(dense.weight)
        block.check_parameter(layer.weight, dense.weight, dims[0])
        block.check_parameter(layer.bias, torch.zeros_like(dense.bias), dims[1])


def check_frozen(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    for kind, dim in ((ColumnParallelLinear, 0), (RowParallelLinear, None)):
        dense, layer = dense_and_parallel(kind, block, 7, 6)
        x, grad = block.randn(3, 7), block.randn(3, 6)
        (expected,) = torch.autograd.grad(dense(x.requires_grad_()), x, grad)
        part = (lambda t: t) if kind is ColumnParallelLinear else (lambda t: block.own(t, -1))
        layer.requires_grad_(False)
        mine = part(x.detach()).requires_grad_()
        layer(mine).backward(block.own(grad, -1) if dim == 0 else grad)
        torch.testing.assert_close(mine.grad, part(expected))
        assert layer.weight.grad is None and layer.bias.grad is None


def check_autocast(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    autocast = torch.autocast(ctx.device.type, torch.bfloat16)
    for sequence_dim in (None, 0):
        for kind in (ColumnParallelLinear, RowParallelLinear):
            dense, layer = dense_and_parallel(kind, block, 64, 128, torch.float32, **sequence_options(sequence_dim))
            column = kind is ColumnParallelLinear
            x, grad = block.randn(8, 64, dtype=torch.float32), block.randn(8, 128, dtype=torch.bfloat16)
            x_dim, out_dim = (sequence_dim, -1) if column else (-1, sequence_dim)
            x.requires_grad_()
            with autocast:
                expected = dense(x)
            expected.backward(grad)
            mine = block.own(x.detach(), x_dim).clone().requires_grad_()
            with autocast:
                out = layer(mine)
            out.backward(block.own(grad, out_dim).contiguous())
            assert out.dtype == torch.bfloat16 and mine.grad.dtype == layer.weight.grad.dtype == torch.float32
            for name, actual, whole, dim in (
                ("out", out, expected, out_dim),
                ("x", mine.grad, x.grad, x_dim),
                ("weight", local(layer.weight.grad), dense.weight.grad, 0 if column else 1),
                ("bias", local(layer.bias.grad), dense.bias.grad, 0 if column else None),
            ):
                error = (actual - block.own(whole, dim)).abs().max() / whole.abs().max()
                assert error < 0.02, f"{name}: {error}"


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)

    def make(kind, *args, **options):
        return kind(*(args or (8, 12)), dtype=torch.float64, device=block.device, **options, **block.place)

    column, row = make(ColumnParallelLinear), make(RowParallelLinear)
    own = 8 // tp
    for layer, features in ((column, 8), (row, own), (make(RowParallelLinear, input_is_parallel=False), 8)):
        with refuses(ValueError, features, (2, features + 1)):
            layer(block.randn(2, features + 1))
        with refuses(ValueError, features, ()):
            layer(block.randn())
        with refuses(TypeError, torch.int64):
            layer(torch.ones(2, features, dtype=torch.int64, device=block.device))
        with refuses(TypeError, torch.float32, torch.float64):
            layer(block.randn(2, features, dtype=torch.float32))
        with refuses(ValueError, "meta", block.device.type):
            layer(torch.ones(2, features, dtype=torch.float64, device="meta"))
        with refuses(TypeError, "list"):
            layer([1.0] * features)
    if tp > 1:
        with refuses(ValueError, own, (2, 8)):
            row(block.randn(2, 8))  # whole features where a shard is due
    with refuses(ValueError, 5):
        column(block.randn(2, 8), total_len=5)

    for kind, features in ((ColumnParallelLinear, 8), (RowParallelLinear, own)):
        for sequence_dim, shape in ((1, (2, features)), (-1, (2, features)), (2, (3, 2, features)), (0, (features,))):
            with refuses(ValueError, sequence_dim, shape):
                make(kind, sequence_parallel=True, sequence_dim=sequence_dim)(block.randn(*shape))
    with refuses(ValueError, 5 * tp, 5, (4, 8)):
        make(ColumnParallelLinear, sequence_parallel=True)(block.randn(4, 8), total_len=5 * tp)

    for kind in (ColumnParallelLinear, RowParallelLinear):
        for size in (0, -3):
            with refuses(ValueError, "in_features", size):
                make(kind, size, 8)
            with refuses(ValueError, "out_features", size):
                make(kind, 8, size)
        for size in (2.5, "8", True, None):
            with refuses(TypeError, "out_features", type(size).__name__):
                make(kind, 8, size)
        with refuses(ValueError, "fast"):
            make(kind, backend="fast")
        with refuses(ValueError, "group=", "mesh="):
            kind(8, 8, group=ctx.group(tp), mesh=ctx.mesh(tp))
    with refuses(ValueError, "tanh"):
        make(ColumnParallelLinear, activation="tanh")
    with refuses(ValueError, "skip_bias_add", "gelu"):
        make(ColumnParallelLinear, activation="gelu", skip_bias_add=True)


@modes
def test_column_equals_dense(workers, tp, mode, seed):
    workers.run(check_column, tp, mode, seed)


@modes
def test_row_equals_dense(workers, tp, mode, seed):
    workers.run(check_row, tp, mode, seed)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_ranks_that_stand_apart(workers, tp, seed):
    workers.run(check_column, tp, "strided", seed)
    workers.run(check_row, tp, "strided", seed)


@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_obeys_the_tolerance(workers, tp, mode, seed, dtype):
    workers.run(check_dtypes, tp, mode, seed, dtype)


def test_each_layer_makes_only_its_own_collectives(workers, tp):
    workers.run(check_counts, tp)


def test_skipped_bias_is_returned_and_not_added(workers, tp, seed):
    workers.run(check_skipped_bias, tp, seed)


@modes
def test_copies_moves_and_the_meta_device(workers, tp, mode, seed):
    workers.run(check_copies, tp, mode, seed)


@modes
def test_init_method_fills_the_whole_weight(workers, tp, mode, seed):
    workers.run(check_init_method, tp, mode, seed)


def test_frozen_weights_still_pass_gradients(workers, tp, seed):
    workers.run(check_frozen, tp, seed)


@modes
def test_autocast(workers, tp, mode, seed):
    workers.run(check_autocast, tp, mode, seed)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


def test_one_process_is_its_dense_self(seed):
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(seed)
        dense = nn.Linear(5, 3)
        torch.manual_seed(seed)
        layer = kind(5, 3)
        assert torch.equal(layer.weight, dense.weight) and torch.equal(layer.bias, dense.bias)
        x = torch.randn(4, 5)
        torch.testing.assert_close(layer(x), dense(x))
