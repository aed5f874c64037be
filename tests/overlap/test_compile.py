"""The overlapped operations under torch.compile: one graph, and the results and gradients of eager calls."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.compare import Block, results
from tests.overlap.test_operations import CASES, SHAPE, K, N, draw, forced
from tpfused.group import resolve_group
from tpfused.overlap import operators
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.operators import sizes_of
from tpfused.overlap.plans import plan_of, to_rows


def tiers_and_dtypes(ctx):
    if ctx.device.type == "cpu":
        return [("p2p", torch.float32), ("reference", torch.float64)]
    return [("p2p", torch.bfloat16), ("nccl", torch.float32), ("reference", torch.float64)]


def compiled(function, **options):
    # What is in question is whether it can be traced: the graph runs as it is.
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def assert_same(actual, expected, what):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name} of {what}: {text}")


def check_compiled(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for name, dtype in tiers_and_dtypes(ctx)[-1 if tp == 1 else 0 :]:
        without_gradients = set()
        for operation, splits, options in CASES:
            inputs = draw(block, splits, dtype)

            def layer(x, weight, bias, operation=operation, options=options):
                y = operation(x * 2, weight, bias, group=block.group, **options)
                return y.transpose(0, 1)[1:]  # through views of the result, too, the gradient must pass

            with forced(ctx, tp, name):
                grad = torch.randn_like(layer(**inputs))
                expected = results(layer, inputs, grad)
                what = f"{operation.__name__} {options} {name}"
                assert_same(results(compiled(layer), inputs, grad), expected, what)
                if operation in without_gradients:
                    continue
                without_gradients.add(operation)  # whatever its options: they are traced alike
                with torch.no_grad():
                    torch.testing.assert_close(compiled(layer)(**inputs), expected["out"], msg=what)


def check_dynamic(ctx, tp, seed):
    """One graph for any number of tokens."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)

    def mlp(x, w1, b1, w2):
        y = all_gather_matmul(x, w1, b1, "gelu_tanh", group=block.group)
        return matmul_reduce_scatter(y, w2, group=block.group)

    function = compiled(mlp, dynamic=True)
    weights = {"w1": block.randn(4, 6), "b1": block.randn(4), "w2": block.randn(6, 4)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 5, 8):
            inputs = {"x": block.randn(tokens, 2, 6)} | weights
            grad = block.randn(tokens, 2, 6)
            assert_same(results(function, inputs, grad), results(mlp, inputs, grad), f"{tokens} tokens")


def check_several_weights(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)

    def gated(x, gate, up):
        gate, up = all_gather_matmul(x, [gate, up], sequence_dim=1, group=block.group)
        return torch.nn.functional.silu(gate) * up

    def first(x, gate):
        return all_gather_matmul(x, [gate, unused], activation="silu", group=block.group)[0]

    unused = block.randn(4, 6).requires_grad_()
    x_and_gate = {"x": block.randn(3, 2, 6), "gate": block.randn(4, 6)}
    for function, inputs in ((gated, {**x_and_gate, "up": block.randn(4, 6)}), (first, x_and_gate)):
        grad = torch.randn_like(function(**inputs))
        eager = results(function, inputs, grad)
        assert_same(results(compiled(function), inputs, grad), eager, function.__name__)


def check_operators(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    name, dtype = block.group.group_name, torch.float64
    for operation, splits, options in CASES:
        x, weight, bias = (value.requires_grad_() for value in draw(block, splits, dtype).values())
        dim = options.get("sequence_dim", 0)
        each, batch = (SHAPE[1], 1) if dim == 0 else (1, SHAPE[0])
        plan = plan_of(resolve_group(block.group), None, SHAPE[dim], each, batch, K, N)
        sizes = sizes_of(plan._replace(saves_gathered=options.get("save_gathered", False)))
        rows = to_rows(x.detach()).requires_grad_()
        operator = getattr(torch.ops.tpfused, operation.__name__).default
        torch.library.opcheck(operator, (rows, [weight], [bias], options.get("activation"), sizes, True, name))


def check_tracing(ctx, tp, seed):
    """It makes no communicator, for it chooses no tier, and gives the layout of the real results."""
    block = Block(ctx, tp, "group", seed)
    for operation, splits, options in CASES:
        inputs = draw(block, splits, torch.float32)
        with forced(ctx, tp, "p2p"):
            real = operation(*inputs.values(), group=block.group, **options)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.MonkeyPatch.context() as patch:
            patch.delattr(operators, "choose")
            fakes = [mode.from_tensor(value) for value in inputs.values()]
            fake = operation(*fakes, group=block.group, **options)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), operation.__name__


def test_compiles_into_one_graph(workers, tp, seed):
    workers.run(check_compiled, tp, seed, timeout=240)


def test_one_graph_for_any_number_of_tokens(workers, tp, seed):
    workers.run(check_dynamic, tp, seed)


def test_several_weights(workers, tp, seed):
    workers.run(check_several_weights, tp, seed)


def test_tracing_makes_no_communicator(workers, tp, seed):
    workers.run(check_tracing, tp, seed)


def test_operators_are_well_formed(workers, tp, seed):
    workers.run(check_operators, tp, seed)
