"""What autograd functions share: how they are applied, and that they refuse a second derivative."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.compare import Block
from tests.overlap.test_operations import forced
from tpfused import ParallelMLP, RowParallelLinear, parallelize, vocab_parallel_cross_entropy
from tpfused.autograd import eager_apply, once_differentiable
from tpfused.layers.norm import Norm
from tpfused.overlap.matmul_all_gather import column_matmul
from tpfused.placement import local


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_eager_apply():
    double, x = eager_apply(Double), torch.ones(3, requires_grad=True)
    y = double(x)
    assert type(y.grad_fn).__name__ == "DoubleBackward" and torch.equal(y, 2 * x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))


def test_functorchs_transforms_are_refused():
    """As torch refuses them where there is no setup_context: a derivative would be wrong without a word."""
    double = eager_apply(Double)
    for transform in (torch.func.grad(lambda x: double(x).sum()), torch.vmap(double)):
        with pytest.raises(RuntimeError, match="functorch transforms"):
            transform(torch.ones(3))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Triple(torch.autograd.Function):
    """Saves nothing, and gives a gradient to one of its inputs."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return factor * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.factor * grad, None


triple = partial(Triple.apply)
refused = partial(pytest.raises, RuntimeError, match="differentiated once")


def first_derivative(function, x):
    return torch.autograd.grad(function(x), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Cube.apply(x).sum(),
        lambda x: (x + Cube.apply(x)).square().sum(),
        lambda x: (x + triple(x, 3)).square().sum(),
        lambda x: x.square().sum() + checkpoint(Cube.apply, 2 * x, use_reentrant=False).sum(),
    ],
    ids=["a constant gradient", "a residual", "nothing saved", "recomputed"],
)
def test_who_differentiates_again_is_refused(function):
    """Whoever asks, and for whatever the derivative depends on."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    penalty = first_derivative(function, x).square().sum()
    with refused():
        torch.autograd.grad(penalty, x, retain_graph=True)
    with refused():
        penalty.backward()
    with refused():
        torch.autograd.functional.hessian(function, x.detach())
    with refused():
        torch.autograd.functional.hvp(function, x.detach(), torch.ones_like(x))


def test_the_incoming_gradient_is_refused_too():
    x, scale = torch.randn(3), torch.ones(3, requires_grad=True)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(triple(x, 3), x, scale, create_graph=True)
    with refused():
        torch.autograd.grad(grad.sum(), scale)


def test_a_first_derivative_with_a_graph():
    x, other = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = (x * Cube.apply(x)).sum() + triple(x, 3).sum() + other.pow(3).sum()
    by_x, by_other = torch.autograd.grad(loss, (x, other), create_graph=True)
    torch.testing.assert_close(by_x, 4 * x**3 + 3)
    (again,) = torch.autograd.grad(by_other.sum() + by_x.sum(), other)
    torch.testing.assert_close(again, 6 * other)
    by_x.detach_()  # no view of anything


def check_layers_refuse(ctx, tp, seed, path):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    layer = ParallelMLP(4, 8, device=block.device, **block.place)
    labels = torch.tensor([0, 2], device=block.device)
    hidden, weight = (block.randn(rows, 4, dtype=torch.float32) for rows in (3, 4))

    def of_a_bias(x):
        bias = x.sum(0)
        return bias.square().sum() + column_matmul(hidden, weight, bias, "gelu", group=block.group).sum()

    functions = [
        lambda x: (x + layer(x)).square().sum(),
        lambda x: x.square().sum() + layer(x).sum(),
        lambda x: vocab_parallel_cross_entropy(x, labels, group=block.group).sum(),
    ]
    if path != "reference":  # which, of a bias, is torch's alone
        functions.append(of_a_bias)
    with forced(ctx, tp, path):
        for function in functions:
            x = block.randn(2, 4, dtype=torch.float32).requires_grad_()
            penalty = first_derivative(function, x).square().sum()
            with refused():
                torch.autograd.grad(penalty, x)
            with refused():
                torch.autograd.functional.hessian(function, x.detach())


@pytest.mark.parametrize("path", ["reference", "p2p"])
@pytest.mark.parametrize("tp", [2], indirect=True)
def test_layers_refuse(workers, tp, seed, path):
    workers.run(check_layers_refuse, tp, seed, path)


def check_twice_through_a_dtensor(ctx, tp, seed):
    """What is differentiable twice stays so where its parameter is a DTensor."""
    block = Block(ctx, tp, "mesh", seed)
    norm = Norm("rmsnorm", 4, device=block.device, dtype=torch.float64, **block.place)
    alone = torch.nn.RMSNorm(4, 1e-5, device=block.device, dtype=torch.float64)
    torch.manual_seed(block.seed)
    x, found = block.randn(3, 4), []
    for layer in (norm, alone):
        (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), layer.weight, create_graph=True)
        local(grad).square().sum().backward()
        found.append(local(layer.weight.grad))
    torch.testing.assert_close(*found)
    assert norm.weight.grad.placements == norm.weight.placements


@pytest.mark.parametrize("tp", [1, 2], indirect=True)
def test_twice_through_a_dtensor(workers, tp, seed):
    workers.run(check_twice_through_a_dtensor, tp, seed)


class TwoInOne(torch.nn.Module):
    """Adds two parameters, whose gradients are one tensor then, which a layer's matmul gives."""

    def __init__(self):
        super().__init__()
        self.head, self.weight, self.change = torch.nn.Linear(4, 4), *(torch.nn.Parameter(torch.eye(4)) for _ in "12")

    def forward(self, x):
        return self.head(x @ (self.weight + self.change))


def check_gradients_that_others_hold(ctx, tp, seed):
    """A DTensor's gradient is memory of its own: what comes later is added to it alone."""
    block = Block(ctx, tp, "mesh", seed)
    torch.manual_seed(block.seed)
    dense = TwoInOne().to(block.device)
    model = parallelize(deepcopy(dense), block.place["mesh"], {"head": "colwise_gather"})
    x = block.randn(3, 4, dtype=torch.float32)
    for each in (dense, model):
        for _ in range(2):
            each(x).square().sum().backward()
    for name, param in dense.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
    layer = RowParallelLinear(8, 4, device=block.device, **block.place)
    given = torch.ones(4, device=block.device)
    for _ in range(3):
        layer(torch.ones(layer.weight.to_local().shape[1], device=block.device)).backward(given)
    assert local(layer.bias.grad).tolist() == [3.0] * 4 and given.tolist() == [1.0] * 4


@pytest.mark.parametrize("tp", [1, 2], indirect=True)
def test_gradients_that_others_hold(workers, tp, seed):
    workers.run(check_gradients_that_others_hold, tp, seed)
