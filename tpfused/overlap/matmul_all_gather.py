"""Column-parallel layers whose input is whole on each rank: ``act(x @ w.T + bias)``, the outputs gathered or not.

The gather is hidden behind the matmul, and backward the all-reduce of dx behind the wgrad.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.autograd import once_differentiable, records_gradient
from tpfused.collectives import gather_from_group
from tpfused.group import TPGroup, resolve_group
from tpfused.kernels.act_backward import act_backward
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.kernels.linear_act import AUTOMATIC, linear_act_forward
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.calls import Link, Rows
from tpfused.overlap.tiers import choose
from tpfused.sharding import padded_shard_size, shard_range, shard_size

RELU, GELU_TANH = ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"]


def column_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    group=None,
    mesh=None,
) -> Tensor:
    """This rank's output features of a column-parallel layer. Differentiable: dx is all-reduced beside the wgrad.

    Args:
        x: ``[..., k]``, the same on each rank.
        weight: ``[n, k]``, this rank's output features; bias ``[n]``.
        activation: None, "gelu" (erf), "gelu_tanh", "relu", "silu".
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``.

    Raises:
        ValueError, TypeError: as `ColumnParallelLinear`; before any collective.
    """
    tp = resolve_group(group, mesh)
    _check(x, weight, bias, activation, "column_matmul")
    link = _link(x, tp)
    if link is None:
        return reference.column_parallel_linear(x, weight, bias, tp, activation=activation)
    rows = Rows(math.prod(x.shape[:-1]), 1)
    arguments = ACTIVATIONS[activation], rows, link, records_gradient(x, weight, bias)
    y = _ColumnMatmul.apply(x.reshape(rows.total, x.shape[-1]), weight, bias, *arguments)
    return y.view(*x.shape[:-1], weight.shape[0])


def matmul_all_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    out_features: int | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """All ranks' output features of a column-parallel layer, on every rank. Differentiable.

    A finished block of rows is gathered while the next is multiplied (erf GELU and silu, which no epilogue of cuBLASLt
    has, are gathered afterwards). Arguments and errors as `column_matmul`.

    Args:
        out_features: of all ranks, where they do not divide evenly: they are split like `torch.chunk`.

    Returns:
        ``[..., out_features]``.
    """
    tp = resolve_group(group, mesh)
    _check(x, weight, bias, activation, "matmul_all_gather")
    features = weight.shape[0] * tp.size if out_features is None else out_features
    own = shard_size(features, tp.size, tp.rank)
    if weight.shape[0] != own:
        raise ValueError(
            f"matmul_all_gather: of out_features {features} rank {tp.rank} of {tp.size} owns {own}, but its weight has "
            f"shape {tuple(weight.shape)}"
        )
    link = _link(x, tp)
    if link is None or features == 0:
        return reference.column_parallel_linear(x, weight, bias, tp, activation=activation, gather_features=features)
    if not _by_epilogue(ACTIVATIONS[activation], x, features, tp):
        return gather_from_group(column_matmul(x, weight, bias, activation, group=tp), x.ndim - 1, features, tp)
    rows = Rows(math.prod(x.shape[:-1]), 1)
    arguments = ACTIVATIONS[activation], rows, features, link, records_gradient(x, weight, bias)
    y = _MatmulAllGather.apply(x.reshape(rows.total, x.shape[-1]), weight, bias, *arguments)
    return y.view(*x.shape[:-1], features)


def _by_epilogue(activation: int, x: Tensor, features: int, tp: TPGroup) -> bool:
    """Whether the matmul can apply it on every rank: cuBLASLt writes a pre-activation in 16 bits and whole 16 bytes."""
    if activation == GELU_TANH:
        return x.element_size() == 2 and features % 8 == 0 and padded_shard_size(features, tp.size) % 8 == 0
    return activation in (0, RELU)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, name: str) -> None:
    checks.check_activation(activation)
    checks.check_operands(x, weight, bias, name)


def _link(x: Tensor, tp: TPGroup) -> Link | None:
    chosen = choose(tp, x)
    # What decides must be the same on every rank: not its output features, of which it may have none.
    if chosen is None or torch.is_autocast_enabled("cuda") or min(x.shape) == 0:
        return None
    return Link(*chosen)


def _backward(ctx, dy: Tensor, x: Tensor, weight: Tensor, pre: Tensor | None) -> tuple[Tensor | None, ...]:
    """-> dx, dweight, dbias from the gradient of this rank's outputs; `pre` (relu: y) for the activation."""
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dpre, dbias = act_backward(dy.contiguous(), pre, ctx.activation, needs_bias)
    dx = dweight = None
    if needs_x:
        dx, dweight = calls.whole_input_backward(ctx.link, dpre, x, weight, ctx.rows, needs_weight)
    elif needs_weight:
        dweight = product(dpre.T, x)
    return dx, dweight, dbias if needs_bias else None


class _ColumnMatmul(torch.autograd.Function):
    """x [m, k], w_shard_n [n, k] -> y_shard_n [m, n].

    forward: none. dgrad: all-reduce of dx, beside wgrad. wgrad, dbias: none. Saved: x, the weight, and the
    pre-activation (relu: the result).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, activation, rows, link, training):
        x, weight = x.contiguous(), calls.as_matrix(weight)
        keeps_pre = training and activation not in (0, RELU)
        y, pre = linear_act_forward(x, weight, bias, None, activation, False, keeps_pre, AUTOMATIC)
        ctx.activation, ctx.rows, ctx.link = activation, rows, link
        ctx.save_for_backward(x, weight, y if activation == RELU else pre)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, pre = ctx.saved_tensors
        return *_backward(ctx, dy, x, weight, pre), None, None, None, None


class _MatmulAllGather(torch.autograd.Function):
    """x [m, k], w_shard_n [n, k] -> y [m, all n].

    forward: all-gather of y beside the matmul. dgrad: all-reduce of dx, beside wgrad. wgrad, dbias: none, dy is whole
    on each rank. Saved: x, the weight, and of this rank's outputs the pre-activation (relu: y).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, activation, rows, features, link, training):
        x, weight = x.contiguous(), calls.as_matrix(weight)
        bias = None if bias is None else bias.contiguous()
        ctx.own = shard_range(features, link.communicator.size, link.communicator.rank)
        ctx.activation, ctx.rows, ctx.link = activation, rows, link
        by_epilogue = {RELU: calls.RELU, GELU_TANH: calls.GELU_TANH}.get(activation, 0)
        keeps_pre = training and activation == GELU_TANH
        y, pre = calls.matmul_all_gather(link, x, weight, bias, rows, features, by_epilogue, keeps_pre)
        ctx.save_for_backward(x, weight, y if activation == RELU else pre)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, pre = ctx.saved_tensors
        start, stop = ctx.own
        if ctx.activation == RELU:
            pre = pre[:, start:stop].contiguous()
        return *_backward(ctx, dy[:, start:stop], x, weight, pre), None, None, None, None, None
