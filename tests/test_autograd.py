"""What autograd functions share: how they are applied."""

import pytest
import torch

from tpfused.autograd import eager_apply


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
