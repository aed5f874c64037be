"""What the package's autograd functions share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import forward_ad


def records_gradient(*tensors: Tensor | None) -> bool:
    """Whether a function of these will have a backward pass (``ctx.needs_input_grad`` says so under no_grad too)."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # half the time of `any`, at every call
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def needs_function(*tensors: Tensor | None) -> bool:
    """Whether what is computed of these must be a function of autograd's: they record gradients, or may have tangents
    (forward-mode), which would be lost outside of one, and which torch refuses in one."""
    return forward_ad._current_level >= 0 or records_gradient(*tensors)


def refuse_export_with_gradients() -> None:
    """For what has a backward pass of its own, whatever requires gradients so far: the program may be given others.

    Raises:
        RuntimeError: torch.export traces with gradients enabled.
    """
    if torch.compiler.is_exporting() and torch.is_grad_enabled():
        raise RuntimeError(
            "torch.export keeps no collective and no main_grad of a backward pass, and the program could train with "
            "wrong gradients: export it under torch.no_grad(), for inference"
        )


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply(*args)``, of a function whose backward pass is not what autograd makes of its forward: a program
    that torch.export makes has the forward only.

    Raises:
        RuntimeError: as `refuse_export_with_gradients`.
    """
    refuse_export_with_gradients()
    return function.apply(*args)


def eager_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply``, for eager calls of a function without a setup_context, in two thirds of its own host time: it
    does without a look at each argument for tensors that functorch's transforms have left behind.
    """
    direct = super(torch.autograd.Function, function).apply

    def call(*args):
        return function.apply(*args) if torch._C._are_functorch_transforms_active() else direct(*args)

    return call


def once_differentiable(backward: Callable) -> Callable:
    """For a ``backward(ctx, *grads)`` that autograd can't differentiate: who tries gets an error.

    torch's own decorator of this name lets a second derivative vanish without a word where the incoming gradient is a
    constant, as it is after ``.sum()``, and wherever ``torch.autograd.grad`` is asked for some inputs only: its error
    is on no path to them. This one's is on the paths to the incoming gradients and to what `ctx` has saved: inputs that
    the derivative depends on have to be among that, needed in backward or not.
    """

    @wraps(backward)
    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _Unpacked(ctx)
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        # They require gradients themselves, so that there is an error where nothing else does.
        tensors = [x.detach().requires_grad_() for x in whole if x is not None]
        refused = iter(_Refuse.apply(len(tensors), *tensors, *sources))
        whole = tuple(x if x is None else next(refused) for x in whole)
        return whole if isinstance(outputs, tuple) else whole[0]

    return wrapper


class _Refuse(torch.autograd.Function):
    """The first `count` tensors as they are. Backward, whichever of all tensors it is asked for: an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("tpfused's functions can be differentiated once only")


class _Unpacked:
    """A ctx whose saved tensors can be had several times: activation checkpointing hands them out once."""

    def __init__(self, ctx):
        vars(self).update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._ctx, name, value)
