"""The overlapped operations against the dense layer: every tier, dtype, activation and way to split the tokens."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block, compare, refuses
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul, matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier
from tpfused.reference import activate

# Tokens, batch, in and out features. Uneven ones; 2 and 1 tokens, and 3 features on four ranks, leave some with none.
CPU_SIZES = [(8, 2, 6, 8), (5, 1, 7, 10), (2, 3, 5, 3), (1, 1, 4, 1)]
GPU_SIZES = [(512, 1, 256, 512), (300, 2, 264, 1000), (7, 3, 130, 66), (1, 1, 64, 3), (2048, 1, 1024, 2048)]


def tiers_and_dtypes(ctx):
    if ctx.device.type == "cpu":
        return [("reference", torch.float64)]
    dtypes = torch.bfloat16, torch.float16, torch.float32
    return [*product(("p2p", "nccl"), dtypes), ("reference", torch.float64)]


def sizes(ctx, tp):
    if tp == 1:
        return CPU_SIZES[:2]
    return CPU_SIZES + (GPU_SIZES if ctx.device.type == "cuda" else [])


def poison(ctx, like):
    """Memory that the operation may get has NaN in it."""
    torch.full_like(like, torch.nan, device=ctx.device)


def check(block, actual, dense, inputs, grad, parts, what):
    """`parts`: the dimension of which this rank has its part. The ranks' own sums are rounded before they are added,
    which eager torch's are not: a chain of operations."""
    compare(actual, dense, inputs, grad, lambda name, whole: block.own(whole, parts[name]), what, chain=True)


def check_all_gather_matmul(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (tokens, batch, k, n) in product(tiers_and_dtypes(ctx), sizes(ctx, tp)):
        for index, activation in enumerate(ACTIVATIONS):
            dim, with_bias = index % 2, index < 4
            x = block.randn(*((tokens, batch) if dim == 0 else (batch, tokens)), k, dtype=dtype)
            weight, bias = block.randn(n, k, dtype=dtype) * k**-0.5, block.randn(n, dtype=dtype) if with_bias else None
            grad = block.randn(*x.shape[:-1], n, dtype=dtype)
            mine = {"x": block.own(x, dim), "weight": block.own(weight, 0)}
            if with_bias:
                mine["bias"] = block.own(bias, 0)
            mine = {key: value.detach().clone().requires_grad_() for key, value in mine.items()}
            poison(ctx, grad)
            with tier(name if tp > 1 else "reference"):
                out = all_gather_matmul(
                    *mine.values(), activation=activation, sequence_dim=dim, total_len=tokens, **block.place
                )
                poison(ctx, grad)
                out.backward(block.own(grad, -1))
            actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items()}
            inputs = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})

            def dense(x, weight, bias=None, activation=activation):
                return activate(F.linear(x, weight, bias), activation)

            parts = {"out": -1, "x": dim, "weight": 0, "bias": 0}
            what = f"{name} {dtype} {tokens, batch, k, n} {activation} dim {dim}"
            check(block, actual, dense, inputs, grad, parts, what)


def check_matmul_reduce_scatter(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (tokens, batch, k, n) in product(tiers_and_dtypes(ctx), sizes(ctx, tp)):
        for dim, with_bias in ((0, True), (1, False)):
            x = block.randn(*((tokens, batch) if dim == 0 else (batch, tokens)), k, dtype=dtype)
            weight, bias = block.randn(n, k, dtype=dtype) * k**-0.5, block.randn(n, dtype=dtype)
            grad = block.randn(*x.shape[:-1], n, dtype=dtype)
            mine = {"x": block.own(x, -1), "weight": block.own(weight, 1)} | ({"bias": bias} if with_bias else {})
            mine = {key: value.detach().clone().requires_grad_() for key, value in mine.items()}
            poison(ctx, grad)
            with tier(name if tp > 1 else "reference"):
                out = matmul_reduce_scatter(*mine.values(), sequence_dim=dim, **block.place)
                poison(ctx, grad)
                out.backward(block.own(grad, dim))
            actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items() if key != "bias"}

            def dense(x, weight, bias=bias if with_bias else None):
                return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

            parts = {"out": dim, "x": -1, "weight": 1}
            what = f"{name} {dtype} {tokens, batch, k, n} dim {dim}"
            inputs = {"x": x, "weight": weight}
            check(block, actual, dense, inputs, grad, parts, what)
            if with_bias:
                own = block.own(grad, dim).double().flatten(0, 1).sum(0)
                torch.testing.assert_close(mine["bias"].grad.double(), own, rtol=2e-2, atol=2e-2)


def check_matmul_all_reduce(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (tokens, batch, k, n) in product(tiers_and_dtypes(ctx), sizes(ctx, tp)):
        x, weight = block.randn(tokens, batch, k, dtype=dtype), block.randn(n, k, dtype=dtype) * k**-0.5
        bias, grad = block.randn(n, dtype=dtype), block.randn(tokens, batch, n, dtype=dtype)
        mine = {"x": block.own(x, -1), "weight": block.own(weight, 1), "bias": bias}
        mine = {key: value.detach().clone().requires_grad_() for key, value in mine.items()}
        poison(ctx, grad)
        with tier(name if tp > 1 else "reference"):
            out = matmul_all_reduce(*mine.values(), **block.place)
            poison(ctx, grad)
            out.backward(grad)
        actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items()}
        parts = {"out": None, "x": -1, "weight": 1, "bias": None}
        inputs = {"x": x, "weight": weight, "bias": bias}
        what = f"{name} {dtype} {tokens, batch, k, n}"

        def dense(x, weight, bias):
            return F.linear(x, weight, bias)

        check(block, actual, dense, inputs, grad, parts, what)


def check_whole_input(ctx, tp, seed, gather):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (tokens, batch, k, n) in product(tiers_and_dtypes(ctx), sizes(ctx, tp)):
        for index, activation in enumerate(ACTIVATIONS):
            x, weight = block.randn(tokens, batch, k, dtype=dtype), block.randn(n, k, dtype=dtype) * k**-0.5
            bias, grad = block.randn(n, dtype=dtype), block.randn(tokens, batch, n, dtype=dtype)
            inputs = {"x": x, "weight": weight} | ({"bias": bias} if index < 4 else {})
            parts = {"out": None if gather else -1, "x": None, "weight": 0, "bias": 0}
            mine = {key: block.own(value, parts[key]).detach().clone() for key, value in inputs.items()}
            mine = {key: value.requires_grad_() for key, value in mine.items()}
            poison(ctx, grad)
            with tier(name if tp > 1 else "reference"):
                if gather:
                    out = matmul_all_gather(*mine.values(), activation=activation, out_features=n, **block.place)
                else:
                    out = column_matmul(*mine.values(), activation=activation, **block.place)
                poison(ctx, grad)
                out.backward(block.own(grad, parts["out"]))
            actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items()}

            def dense(x, weight, bias=None, activation=activation):
                return activate(F.linear(x, weight, bias), activation)

            what = f"{name} {dtype} {tokens, batch, k, n} {activation} gather {gather}"
            check(block, actual, dense, inputs, grad, parts, what)


def check_refusals(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    x, weight = torch.ones(4, 6, device=ctx.device), torch.ones(5, 6, device=ctx.device)
    with refuses(ValueError, "6 features", (4, 7)):
        all_gather_matmul(torch.ones(4, 7, device=ctx.device), weight, **block.place)
    with refuses(ValueError, "total_len 3", 4):
        all_gather_matmul(x, weight, total_len=3, **block.place)
    with refuses(ValueError, "swish"):
        all_gather_matmul(x, weight, activation="swish", **block.place)
    with refuses(ValueError, "out_features 99", (5, 6)):
        matmul_all_gather(x, weight, out_features=99, **block.place)
    with refuses(ValueError, "sequence_dim 1"):
        matmul_reduce_scatter(x, weight, sequence_dim=1, **block.place)
    for operation in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, column_matmul, matmul_all_gather):
        with refuses(ValueError, "a matrix", (6,)):
            operation(x, weight[0], **block.place)
        with refuses(ValueError, operation.__name__, "5 features", (6,)):
            operation(x, weight, torch.ones(6, device=ctx.device), **block.place)
        with refuses(TypeError, operation.__name__, "bfloat16", "float32"):
            operation(x, weight, torch.ones(5, device=ctx.device).bfloat16(), **block.place)
    with refuses(TypeError, "float64"):
        matmul_reduce_scatter(x.double(), weight, **block.place)
    with pytest.raises(ValueError, match="tier must be one of"), tier("carrier pigeon"):
        pass


def test_all_gather_matmul(workers, tp, seed):
    workers.run(check_all_gather_matmul, tp, seed)


def test_matmul_reduce_scatter(workers, tp, seed):
    workers.run(check_matmul_reduce_scatter, tp, seed)


def test_matmul_all_reduce(workers, tp, seed):
    workers.run(check_matmul_all_reduce, tp, seed)


@pytest.mark.parametrize("gather", [False, True])
def test_whole_input(workers, tp, seed, gather):
    workers.run(check_whole_input, tp, seed, gather)


def test_refusals(workers, tp):
    workers.run(check_refusals, tp)
