"""The overlapped operations against the dense layer: every tier, dtype, activation and way to split the tokens."""

from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block, compare, refuses
from tests.overlap import extension
from tests.overlap.extension import stand_in
from tpfused.explanation import explain
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.overlap import calls
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul, matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier
from tpfused.reference import activate

# Tokens, batch, in and out features. Uneven ones; 2 and 1 tokens, and 3 features on four ranks, leave some with none.
# Of 32 features each rank has a multiple of 8, which the matmul itself can give a GELU.
CPU_SIZES = [(8, 2, 6, 8), (5, 1, 7, 10), (2, 3, 5, 1), (1, 1, 4, 5), (3, 2, 4, 32)]
# Of the last but one, rows are no multiple of 16 bytes, but a rank's are.
GPU_SIZES = [(512, 1, 256, 512), (300, 2, 264, 1000), (7, 3, 130, 66), (1, 1, 64, 3), (2048, 1, 1024, 2048)]
# In four vectors a thread and a few more, by one kernel; and own rows that are added in two halves.
GPU_SIZES += [(64, 1, 100, 12), (3001, 1, 64, 1040), (4608, 1, 64, 1024)]
# More of a batch than messages that NCCL is given at a time, and more rows than one kernel gathers.
GPU_SIZES += [(41, 200, 512, 40)]

SHAPE, K, N = (7, 5), 6, 10  # x is [7, 5, 6]: either of its first dimensions may be the tokens
# Operation, the dimensions along which x, weight and bias are split, options.
CASES = [
    (all_gather_matmul, (0, 0, 0), {"activation": "gelu_tanh", "total_len": SHAPE[0]}),
    (all_gather_matmul, (1, 0, 0), {"activation": "relu", "total_len": SHAPE[1], "sequence_dim": 1}),
    (all_gather_matmul, (0, 0, 0), {"activation": "gelu_tanh", "total_len": SHAPE[0], "save_gathered": True}),
    (
        all_gather_matmul,
        (1, 0, 0),
        {"activation": "relu", "total_len": SHAPE[1], "sequence_dim": 1, "save_gathered": True},
    ),
    (all_gather_matmul, (0, 0, 0), {"total_len": SHAPE[0], "out_features": N}),
    (matmul_reduce_scatter, (-1, 1, None), {"in_features": K}),
    (matmul_reduce_scatter, (-1, 1, None), {"sequence_dim": 1}),
    (matmul_all_reduce, (-1, 1, None), {}),
    (column_matmul, (None, 0, 0), {"activation": "silu"}),
    (matmul_all_gather, (None, 0, 0), {"activation": "gelu", "out_features": N}),
    (matmul_all_gather, (None, 0, 0), {"activation": "relu", "out_features": N}),
]


def tiers_and_dtypes(ctx):
    if ctx.device.type == "cpu":
        return [("p2p", torch.float16), ("nccl", torch.float32), ("reference", torch.float64)]
    dtypes = torch.bfloat16, torch.float16, torch.float32
    return [*product(("p2p", "nccl"), dtypes), ("reference", torch.float64)]


@contextmanager
def forced(ctx, tp, name):
    """Operations run by this tier, on a CPU by a stand-in for the extension."""
    name = name if tp > 1 else "reference"
    with tier(name), stand_in() if ctx.device.type == "cpu" and name != "reference" else nullcontext():
        yield


def sizes(ctx, tp):
    if tp == 1:
        return CPU_SIZES[:2]
    return CPU_SIZES + (GPU_SIZES if ctx.device.type == "cuda" else [])


def draw(block, splits, dtype):
    """This rank's x, weight and bias."""
    whole = block.randn(*SHAPE, K, dtype=dtype), block.randn(N, K, dtype=dtype), block.randn(N, dtype=dtype)
    parts = [block.own(tensor, dim).clone() for tensor, dim in zip(whole, splits, strict=True)]
    return dict(zip(("x", "weight", "bias"), parts, strict=True))


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
            place = {"sequence_dim": dim, "total_len": tokens, "save_gathered": index % 3 == 0} | block.place
            poison(ctx, grad)
            with forced(ctx, tp, name):
                out = all_gather_matmul(*mine.values(), activation=activation, **place)
                poison(ctx, grad)
                out.backward(block.own(grad, -1))
            actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items()}
            inputs = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})

            def dense(x, weight, bias=None, activation=activation):
                return activate(F.linear(x, weight, bias), activation)

            parts = {"out": -1, "x": dim, "weight": 0, "bias": 0}
            what = f"{name} {dtype} {tokens, batch, k, n} {activation} dim {dim}"
            check(block, actual, dense, inputs, grad, parts, what)


def check_saved_rows(ctx, tp):
    """What is saved for backward, and on a CPU, by the stand-in, that backward gathers nothing else."""
    block = Block(ctx, tp, "group", 0)
    rows, k = 4, 16
    saved, gathered = [], []

    def gather(call, own):
        gathered.append(own.shape)
        return own.repeat(tp, 1)

    for save_gathered, needs_weight in product((False, True), (False, True)):
        x = torch.ones(rows, k, device=ctx.device, requires_grad=True)
        weight = torch.ones(8, k, device=ctx.device, requires_grad=needs_weight)
        saved.clear(), gathered.clear()
        with forced(ctx, tp, "p2p"), pytest.MonkeyPatch.context() as patch:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
                y = all_gather_matmul(x, weight, save_gathered=save_gathered, **block.place)
            patch.setattr(extension.Call, "gathered", gather)
            y.sum().backward()
        is_whole = save_gathered and needs_weight
        if tp > 1:
            assert saved[0] == (rows * tp if is_whole else rows, k), (save_gathered, needs_weight)
        if tp > 1 and ctx.device.type == "cpu":
            assert len(gathered) == (needs_weight and not is_whole)
        assert x.grad.shape == x.shape and (weight.grad is not None) == needs_weight


def check_several_weights(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), activation in product(tiers_and_dtypes(ctx), (None, "gelu_tanh", "relu")):
        several_weights_case(ctx, block, name, dtype, activation, 0, True)
        several_weights_case(ctx, block, name, dtype, activation, 1, False)


def several_weights_case(ctx, block, name, dtype, activation, dim, with_bias):
    features = 32, 3, 64  # the last rank may have none of the second
    count = range(len(features))
    inputs = {"x": block.randn(5, 3, 12, dtype=dtype)}
    inputs |= {f"weight{i}": block.randn(features[i], 12, dtype=dtype) * 0.3 for i in count}
    if with_bias:
        inputs |= {f"bias{i}": block.randn(features[i], dtype=dtype) for i in count}
    grad = block.randn(5, 3, sum(features), dtype=dtype)

    def part(key, whole):
        if key == "out":
            return torch.cat([block.own(y, -1) for y in whole.split(features, -1)], -1)
        return block.own(whole, dim if key == "x" else 0)

    def lists(values):
        return [values[f"weight{i}"] for i in count], [values[f"bias{i}"] for i in count] if with_bias else None

    def dense(x, **values):
        weights, biases = lists(values)
        pairs = zip(weights, biases or [None] * len(weights), strict=True)
        return torch.cat([activate(F.linear(x, w, b), activation) for w, b in pairs], -1)

    mine = {key: part(key, value).detach().clone().requires_grad_() for key, value in inputs.items()}
    options = {"sequence_dim": dim, "total_len": inputs["x"].shape[dim], "out_features": features}
    options["save_gathered"] = dim == 1
    with forced(ctx, block.tp, name):
        outs = all_gather_matmul(mine["x"], *lists(mine), activation, **options, **block.place)
        torch.cat(outs, -1).backward(part("out", grad))
    actual = {"out": torch.cat(outs, -1).detach()} | {key: value.grad for key, value in mine.items()}
    compare(actual, dense, inputs, grad, part, f"{name} {dtype} {activation} dim {dim}", chain=True)


def check_matmul_reduce_scatter(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (tokens, batch, k, n) in product(tiers_and_dtypes(ctx), sizes(ctx, tp)):
        for dim, with_bias, with_residual in ((0, True, True), (1, False, True), (0, False, False), (1, True, False)):
            x = block.randn(*((tokens, batch) if dim == 0 else (batch, tokens)), k, dtype=dtype)
            weight, bias = block.randn(n, k, dtype=dtype) * k**-0.5, block.randn(n, dtype=dtype)
            grad, residual = (block.randn(*x.shape[:-1], n, dtype=dtype) for _ in range(2))
            mine = {"x": block.own(x, -1), "weight": block.own(weight, 1)}
            mine |= {"bias": bias} if with_bias else {}
            mine |= {"residual": block.own(residual, dim)} if with_residual else {}
            mine = {key: value.detach().clone().requires_grad_() for key, value in mine.items()}
            poison(ctx, grad)
            with forced(ctx, tp, name):
                out = matmul_reduce_scatter(
                    **{"x_shard_k" if key == "x" else key: value for key, value in mine.items()},
                    sequence_dim=dim,
                    **block.place,
                )
                poison(ctx, grad)
                out.backward(block.own(grad, dim))
            actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items() if key != "bias"}

            def dense(x, weight, residual=None, bias=bias if with_bias else None):
                y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
                return y if residual is None else residual + y

            parts = {"out": dim, "x": -1, "weight": 1, "residual": dim}
            what = f"{name} {dtype} {tokens, batch, k, n} dim {dim} {with_residual=}"
            inputs = {"x": x, "weight": weight} | ({"residual": residual} if with_residual else {})
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
        with forced(ctx, tp, name):
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


def check_features_of_one_rank(ctx, tp, seed):
    """Which only the last one has: another brings the bias, and multiplies nothing."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), rows in product(tiers_and_dtypes(ctx), (4, 300)):
        inputs = {"x": block.randn(rows, 16, dtype=dtype), "weight": block.randn(24, 16, dtype=dtype) / 4}
        inputs["bias"], grad = block.randn(24, dtype=dtype), block.randn(rows, 24, dtype=dtype)

        def part(name, whole, last=block.rank == tp - 1):
            return whole if last or name not in ("x", "weight") else whole[:, :0]

        mine = {key: part(key, value).detach().clone().requires_grad_() for key, value in inputs.items()}
        poison(ctx, grad)
        with forced(ctx, tp, name):
            out = matmul_all_reduce(*mine.values(), **block.place)
            out.backward(grad)
        actual = {"out": out.detach()} | {key: value.grad for key, value in mine.items()}
        compare(actual, F.linear, inputs, grad, part, f"{name} {dtype} {rows}", chain=True)


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
            with forced(ctx, tp, name):
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


def check_transposed_weights(ctx, tp, seed):
    """A weight that is stored as [in, out], as GPT-2's, gives the same and is not copied; nor is its gradient."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for (name, dtype), (operation, splits, options) in product(tiers_and_dtypes(ctx), CASES):
        inputs = draw(block, splits, dtype)
        stored = inputs["weight"].t().contiguous().requires_grad_()
        results = []
        for weight in (inputs["weight"].requires_grad_(), stored):
            x, bias = (inputs[key].detach().clone().requires_grad_() for key in ("x", "bias"))
            used = weight.t() if weight is stored else weight
            with forced(ctx, tp, name):
                out = operation(x, used, bias, group=block.group, **options)
                grads = torch.autograd.grad(out.square().sum(), (x, weight, bias))
            if tp > 1 and name != "reference" and operation is not matmul_all_reduce:  # whose backward is torch's
                assert grads[1].is_contiguous(), (operation.__name__, name, grads[1].stride())
            results.append({"out": out.detach(), "x": grads[0], "bias": grads[2]})
            results[-1]["weight"] = grads[1].t() if weight is stored else grads[1]
        assert calls._matrix(stored.detach().t())[1][0] == stored.data_ptr()
        tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2}.get(dtype, 1e-4)
        for key, expected in results[0].items():
            what = f"{key} of {operation.__name__} {name} {dtype}".format
            torch.testing.assert_close(results[1][key], expected, rtol=tolerance, atol=tolerance, msg=what)


def check_measured(ctx, tp, seed):
    """Left to itself, an operation tries all tiers, and gives the same with and without gradients."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for operation, splits, options in CASES:
        inputs = draw(block, splits, torch.float32)
        call = partial(operation, *inputs.values(), group=block.group, **options)
        with tier("reference"):
            expected = call()
        with forced(ctx, tp, "measured"):
            for value in inputs.values():
                value.requires_grad_()
            torch.testing.assert_close(call().detach(), expected)
            with torch.no_grad():
                torch.testing.assert_close(call(), expected)
            if tp > 1:
                made = [row for row in explain() if row.operation.startswith(operation.__name__)]
                made = [row for row in made if row.why.startswith("measured")]
                assert made and all(row.us.keys() >= {"nccl", "reference"} for row in made), explain()
                assert not any("failed" in row.why for row in made), explain()


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
        with refuses(TypeError, operation.__name__, "must be a tensor", "gelu"):
            operation(x, weight, "gelu", **block.place)
        with refuses(TypeError, operation.__name__, "bfloat16", "float32"):
            operation(x, weight, torch.ones(5, device=ctx.device).bfloat16(), **block.place)
    with refuses(TypeError, "float64"):
        matmul_reduce_scatter(x.double(), weight, **block.place)
    with refuses(ValueError, "out_features 99", (5, 6)):
        all_gather_matmul(x, [weight, weight], out_features=[5 * tp, 99], **block.place)
    with refuses(ValueError, "2 weights", "biases", 1):
        all_gather_matmul(x, [weight, weight], [torch.ones(5, device=ctx.device)], **block.place)
    with refuses(ValueError, "2 weights", "out_features", 3):
        all_gather_matmul(x, [weight, weight], out_features=[5, 5, 5], **block.place)
    with refuses(TypeError, "all_gather_matmul", "str"):
        all_gather_matmul(x, "weight", **block.place)
    with refuses(ValueError, "all_gather_matmul", "no weight"):
        all_gather_matmul(x, [], **block.place)
    for operation in (matmul_reduce_scatter, matmul_all_reduce):
        with refuses(ValueError, operation.__name__, "in_features 99", (5, 6)):
            operation(x, weight, in_features=99, **block.place)
    with pytest.raises(ValueError, match="tier must be one of"), tier("carrier pigeon"):
        pass


def test_all_gather_matmul(workers, tp, seed):
    workers.run(check_all_gather_matmul, tp, seed)


def test_saved_rows(workers, tp):
    workers.run(check_saved_rows, tp)


def test_several_weights(workers, tp, seed):
    workers.run(check_several_weights, tp, seed)


def test_matmul_reduce_scatter(workers, tp, seed):
    workers.run(check_matmul_reduce_scatter, tp, seed)


def test_matmul_all_reduce(workers, tp, seed):
    workers.run(check_matmul_all_reduce, tp, seed)


def test_all_features_on_one_rank(workers, tp, seed):
    workers.run(check_features_of_one_rank, tp, seed)


@pytest.mark.parametrize("gather", [False, True])
def test_whole_input(workers, tp, seed, gather):
    workers.run(check_whole_input, tp, seed, gather)


def test_transposed_weights(workers, tp, seed):
    workers.run(check_transposed_weights, tp, seed)


def test_all_tiers_are_measured(workers, tp, seed):
    workers.run(check_measured, tp, seed)


def test_refusals(workers, tp):
    workers.run(check_refusals, tp)
