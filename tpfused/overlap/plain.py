"""What an operation does on one rank alone, and how its rows travel by torch's collectives. No gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfused import reference
from tpfused.collectives import all_gather, reduce_scatter
from tpfused.kernels.act_backward import act_backward
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.kernels.linear_act import AUTOMATIC, apply_activation, linear_act_forward
from tpfused.overlap.plans import Plan

_aten = torch.ops.aten
_DERIVATIVES = {  # for the CPU, where the kernels are not
    "gelu": lambda dy, pre: _aten.gelu_backward(dy, pre, approximate="none"),
    "gelu_tanh": lambda dy, pre: _aten.gelu_backward(dy, pre, approximate="tanh"),
    "relu": lambda dy, y: _aten.threshold_backward(dy, y, 0),
    "silu": _aten.silu_backward,
}


def gather_rows(x: Tensor, plan: Plan) -> Tensor:
    """This rank's rows -> all."""
    width = plan.each * x.shape[1]  # of a token
    tokens = all_gather(x.reshape(plan.batch, plan.own // (plan.each * plan.batch), width), 1, plan.tokens, plan.tp)
    return tokens.view(plan.total, x.shape[1])


def scatter_rows(x: Tensor, plan: Plan) -> Tensor:
    """All rows -> this rank's, summed over the ranks."""
    tokens = reduce_scatter(x.view(plan.batch, plan.tokens, plan.each * x.shape[1]), 1, plan.tp)
    return tokens.view(plan.own, x.shape[1])


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, keeps_pre: bool
) -> tuple[Tensor, Tensor]:
    """-> ``activation(x @ weight.T + bias)`` and what the activation is of; if not kept, that may be anything."""
    if x.is_cuda:
        return linear_act_forward(x, weight, bias, None, ACTIVATIONS[activation], False, keeps_pre, AUTOMATIC)
    pre = F.linear(x, weight, bias)
    return reference.activate(pre, activation), pre


def activate(pre: Tensor, activation: str) -> Tensor:
    return apply_activation(pre, ACTIVATIONS[activation]) if pre.is_cuda else reference.activate(pre, activation)


def act_gradient(
    dy: Tensor, kept: Tensor | None, activation: str | None, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """-> the gradients of the pre-activation (dy itself without an activation), contiguous, and of the bias. `kept`:
    the pre-activation, after relu the result."""
    dy = dy.contiguous()
    if activation is None and not needs_bias:
        return dy, None
    if dy.is_cuda:
        dpre, dbias = act_backward(dy, kept, ACTIVATIONS[activation], needs_bias)
        return dpre, dbias if needs_bias else None
    dpre = _DERIVATIVES[activation](dy, kept) if activation else dy
    return dpre, dpre.sum(0) if needs_bias else None
