"""``all_reduce(x @ w.T) + bias``: the row-parallel layer, its all-reduce hidden."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.autograd import once_differentiable
from tpfused.group import resolve_group
from tpfused.kernels.act_backward import bias_grad
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.calls import Link, Rows
from tpfused.overlap.tiers import choose

NAME = "matmul_all_reduce"


def matmul_all_reduce(
    x_shard_k: Tensor, weight: Tensor, bias: Tensor | None = None, *, group=None, mesh=None
) -> Tensor:
    """The sum over the ranks of ``x @ weight.T``, plus bias, on every rank. Differentiable, without a collective.

    A block of rows is reduced while the next is multiplied. The NCCL tier adds as NCCL does, and rounds as it goes; the
    other adds the ranks' parts in float32, in their order.

    Args:
        x_shard_k: ``[..., k]``, this rank's input features.
        weight: ``[n, k]``.
        bias: ``[n]``, the same on each rank.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``.

    Raises:
        ValueError, TypeError: as `RowParallelLinear`; before any collective.
    """
    tp = resolve_group(group, mesh)
    checks.check_operands(x_shard_k, weight, bias, NAME)
    chosen = choose(tp, x_shard_k)
    # What decides must be the same on every rank: not its input features, of which it may have none.
    if chosen is None or torch.is_autocast_enabled("cuda") or min(*x_shard_k.shape[:-1], weight.shape[0], 1) == 0:
        return reference.row_parallel_linear(x_shard_k, weight, bias, tp, input_is_parallel=True, sequence_dim=None)
    leading = x_shard_k.shape[:-1]
    rows = Rows(math.prod(leading), 1)
    y = _MatmulAllReduce.apply(x_shard_k.reshape(rows.total, weight.shape[1]), weight, bias, rows, Link(*chosen))
    return y.view(*leading, weight.shape[0])


class _MatmulAllReduce(torch.autograd.Function):
    """x_shard_k [m, k], w_shard_k [n, k] -> y [m, n].

    forward: all-reduce of the parts beside the matmul. dgrad, wgrad, dbias: none, dy is whole on each rank. Saved:
    x_shard_k and the weight.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, rows, link):
        x, weight = x.contiguous(), calls.as_matrix(weight)
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight)
        return calls.matmul_all_reduce(link, x, weight, bias, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = product(dy, weight) if needs_x else None
        dweight = product(dy.T, x) if needs_weight else None
        return dx, dweight, bias_grad(dy) if needs_bias else None, None, None
