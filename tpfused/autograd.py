"""What the package's autograd functions share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether a function of these will have a backward pass (``ctx.needs_input_grad`` says so under no_grad too)."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def eager_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply``, for eager calls of a function without a setup_context, in two thirds of its own host time: it
    does without a look at each argument for tensors that functorch's transforms have left behind.
    """
    apply = super(torch.autograd.Function, function).apply

    def call(*args):
        return function.apply(*args) if torch._C._are_functorch_transforms_active() else apply(*args)

    return call


def once_differentiable(backward: Callable) -> Callable:
    """For a ``backward(ctx, *grads)`` that autograd can't differentiate: who tries gets an error.

    torch's own decorator of this name lets a second derivative vanish without a word where the incoming gradient is a
    constant, as it is after ``.sum()``.
    """

    @wraps(backward)
    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        refuse = torch._C._functions.DelayedError(b"tpfused's functions can be differentiated once only", len(whole))
        refused = refuse(*(x if x is None else x.detach().requires_grad_() for x in whole))
        return refused if isinstance(outputs, tuple) else refused[0] if isinstance(refused, tuple) else refused

    return wrapper
