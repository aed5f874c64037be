"""``act(all_gather(x) @ w.T + bias)``: the column-parallel layer of sequence parallelism, its all-gather hidden."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.autograd import once_differentiable, records_gradient
from tpfused.group import resolve_group
from tpfused.kernels.act_backward import act_backward
from tpfused.kernels.activations import ACTIVATIONS
from tpfused.kernels.linear_act import apply_activation
from tpfused.overlap import calls
from tpfused.overlap.calls import Link, Rows
from tpfused.overlap.tiers import choose

NAME = "all_gather_matmul"


def all_gather_matmul(
    x_shard_m: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    sequence_dim: int = 0,
    total_len: int | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """All ranks' rows, joined, through this rank's part of a column-parallel layer. Differentiable.

    The own rows are multiplied at once and a peer's when they have arrived. Backward: x is gathered again beside the
    dgrad, whose reduce-scatter the wgrad hides.

    Args:
        x_shard_m: ``[..., k]``, this rank's part of the tokens along `sequence_dim`.
        weight: ``[n, k]``, this rank's output features.
        bias: ``[n]``.
        activation: None, "gelu" (erf), "gelu_tanh", "relu", "silu".
        total_len: all ranks' tokens, where they do not divide evenly: they are split like `torch.chunk`.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``, with all tokens.

    Raises:
        ValueError, TypeError: as `ColumnParallelLinear`; before any collective.
    """
    tp = resolve_group(group, mesh)
    checks.check_activation(activation)
    checks.check_operands(x_shard_m, weight, bias, NAME)
    dim = checks.token_dim(x_shard_m, sequence_dim, NAME)
    total_len = checks.total_tokens(x_shard_m, dim, total_len, tp, NAME)
    chosen = choose(tp, x_shard_m)
    batch = calls.batch_of(x_shard_m, dim)
    # What decides must be the same on every rank: not its own tokens or output features, of which it may have none.
    if chosen is None or torch.is_autocast_enabled("cuda") or min(total_len, weight.shape[1], *batch) == 0:
        return reference.column_parallel_linear(
            x_shard_m, weight, bias, tp, activation=activation, sequence_dim=dim, total_len=total_len
        )
    rows = Rows(total_len, math.prod(batch))
    x = calls.to_rows(x_shard_m, dim)
    training = records_gradient(x, weight, bias)
    y = _AllGatherMatmul.apply(x, weight, bias, ACTIVATIONS[activation], rows, Link(*chosen), training)
    return calls.from_rows(y, total_len, batch, dim)


class _AllGatherMatmul(torch.autograd.Function):
    """x_shard_m [own, k], w_shard_n [n, k] -> y_shard_n [total, n].

    forward: all-gather of x beside the matmul. dgrad: reduce-scatter, beside wgrad. wgrad: all-gather of x, beside
    dgrad. dbias: none. Saved: x_shard_m, the weight, and the pre-activation (relu: the result).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, activation, rows, link, training):
        x, weight = x.contiguous(), calls.as_matrix(weight)
        bias = None if bias is None else bias.contiguous()
        by_epilogue = {ACTIVATIONS["relu"]: calls.RELU, ACTIVATIONS["gelu_tanh"]: calls.GELU_TANH}.get(activation, 0)
        if by_epilogue == calls.GELU_TANH and (weight.shape[0] % 8 or x.element_size() == 4):
            by_epilogue = 0  # cuBLASLt writes a pre-activation in half precision and rows of 16 bytes only
        keeps_pre = training and by_epilogue == calls.GELU_TANH
        y, pre = calls.all_gather_matmul(link, x, weight, bias, rows, by_epilogue, keeps_pre)
        if activation and not by_epilogue:
            y, pre = apply_activation(y, activation), y
        elif activation == ACTIVATIONS["relu"]:
            pre = y  # whose sign tells the derivative
        ctx.activation, ctx.rows, ctx.link = activation, rows, link
        ctx.save_for_backward(x, weight, pre)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, pre = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dpre, dbias = act_backward(dy.contiguous(), pre, ctx.activation, needs_bias)
        dx = dweight = None
        if needs_x or needs_weight:
            dx, dweight = calls.column_backward(ctx.link, dpre, x, weight, ctx.rows, needs_x, needs_weight)
        return dx, dweight, dbias if needs_bias else None, None, None, None, None
