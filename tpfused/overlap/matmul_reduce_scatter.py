"""``reduce_scatter(x @ w.T) + bias``: the row-parallel layer of sequence parallelism, its reduce-scatter hidden."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.autograd import once_differentiable
from tpfused.group import resolve_group
from tpfused.kernels.act_backward import bias_grad
from tpfused.overlap import calls
from tpfused.overlap.calls import Link, Rows
from tpfused.overlap.tiers import choose
from tpfused.sharding import shard_size

NAME = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    x_shard_k: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_dim: int = 0,
    group=None,
    mesh=None,
) -> Tensor:
    """This rank's tokens of the sum over the ranks of ``x @ weight.T``, plus bias. Differentiable.

    A finished part of the output travels to its owner while the next is multiplied. Each rank's part is rounded to the
    dtype; they are added in float32 in the ranks' order. Backward: dy is gathered beside the dgrad.

    Args:
        x_shard_k: ``[..., k]``, all tokens, this rank's input features.
        weight: ``[n, k]``.
        bias: ``[n]``, the same on each rank; its gradient is of this rank's tokens alone.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``, with this rank's tokens along `sequence_dim`.

    Raises:
        ValueError, TypeError: as `RowParallelLinear`; before any collective.
    """
    tp = resolve_group(group, mesh)
    checks.check_operands(x_shard_k, weight, bias, NAME)
    dim = checks.token_dim(x_shard_k, sequence_dim, NAME)
    chosen = choose(tp, x_shard_k)
    # What decides must be the same on every rank: not its input features, of which it may have none.
    if chosen is None or torch.is_autocast_enabled("cuda") or min(*x_shard_k.shape[:-1], weight.shape[0]) == 0:
        return reference.row_parallel_linear(x_shard_k, weight, bias, tp, input_is_parallel=True, sequence_dim=dim)
    batch = calls.batch_of(x_shard_k, dim)
    rows = Rows(x_shard_k.shape[dim], math.prod(batch))
    y = _MatmulReduceScatter.apply(calls.to_rows(x_shard_k, dim), weight, bias, rows, Link(*chosen))
    return calls.from_rows(y, shard_size(rows.tokens, tp.size, tp.rank), batch, dim)


class _MatmulReduceScatter(torch.autograd.Function):
    """x_shard_k [total, k], w_shard_k [n, k] -> y_shard_m [own, n].

    forward: reduce-scatter of the parts beside the matmul. dgrad: all-gather of dy beside it. wgrad: uses the same.
    dbias: none, the sum of this rank's tokens. Saved: x_shard_k and the weight.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, rows, link):
        x, weight = x.contiguous(), calls.as_matrix(weight)
        bias = None if bias is None else bias.contiguous()
        own = shard_size(rows.tokens, link.communicator.size, link.communicator.rank) * rows.each
        ctx.rows, ctx.link = rows, link
        ctx.save_for_backward(x, weight)
        return calls.matmul_reduce_scatter(link, x, weight, bias, rows, own)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dx = dweight = None
        if needs_x or needs_weight:
            dx, dweight = calls.row_backward(ctx.link, dy, x, weight, ctx.rows, needs_x, needs_weight)
        return dx, dweight, bias_grad(dy) if needs_bias else None, None, None
