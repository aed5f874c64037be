"""Weight gradients that are added to ``weight.main_grad`` in float32, instead of to ``weight.grad``.

Megatron-LM's convention (``gradient_accumulation_fusion``): many micro-batches' gradients, added in 16 bits, would lose
what is small beside their sum. `main_grad` is a plain attribute: `copy.deepcopy` of a model leaves it behind, as torch
does with all attributes of parameters, so give the copy its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpfused.autograd import once_differentiable
from tpfused.placement import local


def gradients_of(param: Tensor) -> list[Tensor]:
    """Whose sum is the parameter's gradient: its `grad`, its `main_grad`, or both, or none."""
    grad, main_grad = param.grad, getattr(param, "main_grad", None)
    return [each for each in (main_grad, None if grad is main_grad else grad) if each is not None]


def check_one_gradient(param: Tensor, what: str) -> None:
    """Refuse a `grad` beside a `main_grad` but where `announced` has said that both count: who reads one overlooks a
    part of the gradient, or all of it.

    Raises:
        ValueError
    """
    if len(gradients_of(param)) < 2 or getattr(param, "grad_added_to_main_grad", False):
        return
    raise ValueError(
        f"{what} has a grad of shape {tuple(param.grad.shape)} beside its main_grad, and only one can be its gradient: "
        f"with accumulate_main_grad=True a layer adds to main_grad alone, but not under FSDP2 or where the weight is "
        f"used outside of the layer. Delete the attribute main_grad, or set grad to None"
    )


def main_grad_of(param: Tensor | None, what: str, *, own_dtype: bool = False) -> Tensor | None:
    """The local tensor to which backward is to add the parameter's gradient; None where it has none, or needs none.

    Args:
        own_dtype: it may have the parameter's dtype in place of float32.

    Raises:
        ValueError, TypeError: as `check_main_grad`.
    """
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None or not param.requires_grad:
        return None
    with torch.no_grad():
        main_grad, own = local(main_grad), local(param)
    check_main_grad(main_grad, own, what, own_dtype=own_dtype)
    return main_grad


def check_main_grad(main_grad: Tensor | None, weight: Tensor, what: str, *, own_dtype: bool = False) -> None:
    """Refuse one that is not a contiguous float32 tensor (or with `own_dtype` one of the weight's dtype) of the local
    weight's shape and device.

    Raises:
        ValueError, TypeError
    """
    if main_grad is None:
        return
    from tpfused.checks import check_dense  # which needs this module

    check_dense(main_grad, what, "main_grad")
    if main_grad.dtype != torch.float32 and not (own_dtype and main_grad.dtype == weight.dtype):
        wanted = f"float32 or the weight's {weight.dtype}" if own_dtype else "float32"
        raise TypeError(f"{what}: main_grad must be {wanted}, not {main_grad.dtype}")
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{what}: main_grad must have the weight's shape {tuple(weight.shape)} on {weight.device}, not "
            f"{tuple(main_grad.shape)} on {main_grad.device}"
        )
    if not main_grad.is_contiguous():
        raise ValueError(f"{what}: main_grad must be contiguous, not of strides {main_grad.stride()}")


def into_main_grad(weight: Tensor, main_grad: Tensor | None) -> Tensor:
    """`weight`, whose gradient backward adds to `main_grad`, if there is one, and does not return."""
    return weight if main_grad is None else _IntoMainGrad.apply(weight, main_grad)


def announced(weight: Tensor, main_grad: Tensor | None, param: Tensor) -> tuple[Tensor, Tensor | None]:
    """The local tensor of a parameter that has this `main_grad`, for hooks that wait for a gradient; and the main_grad
    that is left to add to.

    Megatron's data parallelism marks its parameters with ``grad_added_to_main_grad`` and wants to see a `grad`: they
    get zeros, to which other uses of the parameter add, and the mark becomes True. Others' `grad` stays None.
    """
    if main_grad is None or not hasattr(param, "grad_added_to_main_grad"):
        return weight, main_grad
    if torch.compiler.is_compiling():
        return _added_and_announced(weight, main_grad, param), None
    return _Announced.apply(weight, param), main_grad


# Compiled code would set the mark while it is traced, or never; and what it adds to main_grad itself, it gives to no
# function that comes after, as backward goes.
@torch.compiler.disable(reason="backward sets a weight's grad_added_to_main_grad; delete that attribute for fullgraph")
def _added_and_announced(weight: Tensor, main_grad: Tensor, param: Tensor) -> Tensor:
    return into_main_grad(_Announced.apply(weight, param), main_grad)


class _IntoMainGrad(torch.autograd.Function):
    """weight -> weight. Backward: its gradient is added to main_grad, in float32. Nothing saved."""

    @staticmethod
    def forward(ctx, weight, main_grad):
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.main_grad.add_(grad)
        return None, None


class _Announced(torch.autograd.Function):
    """weight -> weight. Backward: the gradient is in main_grad already; zeros in its place. Nothing saved."""

    @staticmethod
    def forward(ctx, weight, param):
        ctx.param, ctx.like = param, (weight.shape, weight.dtype, weight.device)
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.param.grad_added_to_main_grad = True
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None
