"""The conjugate pairs of tensor parallelism: each forward collective with the one that serves its gradient.

| function                | forward            | backward           | where                                     |
|-------------------------|--------------------|--------------------|-------------------------------------------|
| `copy_to_group`         | nothing            | all-reduce         | whole input of a column layer             |
| `reduce_from_group`     | all-reduce         | nothing            | output of a row layer                     |
| `scatter_to_group`      | keep the own slice | all-gather         | whole input of a row layer                |
| `gather_from_group`     | all-gather         | keep the own slice | whole output of a column layer            |
| `all_gather_tokens`     | all-gather         | reduce-scatter     | input of a column layer, sequence parallel |
| `reduce_scatter_tokens` | reduce-scatter     | all-gather         | output of a row layer, sequence parallel  |

The first four are f and g of Megatron-LM (Shoeybi et al., 2019, section 3) and their like; the last two are g and g-bar
of sequence parallelism (Korthikanti et al., 2022, section 4.2.2). What decides between an all-gather whose backward
slices and one whose backward reduce-scatters is who consumes the result: replicated computation produces the same
gradient on every rank, sharded computation produces partial sums.

Axes are split as `tpfused.sharding` says, evenly or not. All take a `TPGroup`; in a group of one they return their
input. Inputs may have any strides. Nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.autograd import apply, once_differentiable, records_gradient, refuse_export_with_gradients
from tpfused.group import TPGroup
from tpfused.sharding import padded_shard_size, shard_range, shard_size

# torch 2.13 renamed these two and deprecated the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Observer = Callable[[str, Tensor], Callable[[], None]]
_observers: list[Observer] = []


@contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """Call ``callback(name, tensor)`` before each collective of this process, and what it returns after it.

    `name` is "all_reduce", "all_gather" or "reduce_scatter"; `tensor` is what this rank gives to it. On the GPU both
    calls happen when the collective is enqueued, so record events in them to time it.
    """
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


@contextmanager
def _observed(name: str, tensor: Tensor) -> Iterator[None]:
    done = [callback(name, tensor) for callback in _observers]
    yield
    for call in done:
        call()


# The bare collectives: no gradient, any dimension, any split.


def all_reduce(x: Tensor, group: TPGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: `x` reduced over the group. No gradient."""
    from tpfused.overlap.small_sums import small_all_reduce  # which needs this module

    x = x.detach()
    if group.alone or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    with _observed("all_reduce", x):
        out = small_all_reduce(x, group, op)
        if out is None:
            out = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out, op, group.process_group)
    return out


def all_gather(x_shard: Tensor, dim: int, total: int, group: TPGroup) -> Tensor:
    """A new tensor: the shards joined along `dim`, which then has `total` entries. No gradient.

    Raises:
        ValueError: this rank's shard is not of the size that `total` entries give it.
    """
    own = shard_size(total, group.size, group.rank)
    if x_shard.shape[dim] != own:
        raise ValueError(
            f"rank {group.rank} of {group.size} owns {own} of {total} entries, but its tensor of shape "
            f"{tuple(x_shard.shape)} has {x_shard.shape[dim]} along dimension {dim}"
        )
    rows = _pad_rows(x_shard.detach().movedim(dim, 0), padded_shard_size(total, group.size))
    out = rows.new_empty(group.size * group.replicas * rows.shape[0], *rows.shape[1:])
    if out.numel():
        with _observed("all_gather", rows):
            all_gather_single(out, rows, group=group.process_group)
    if group.replicas > 1:
        out = out.view(group.size, group.replicas, *rows.shape)[:, 0].flatten(0, 1)
    return _own_tensor(out[:total].movedim(0, dim).contiguous())


def reduce_scatter(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """A new tensor: this rank's slice along `dim` of `x` summed over the group. No gradient."""
    total = x.shape[dim]
    shard = padded_shard_size(total, group.size)
    rows = _pad_rows(x.detach().movedim(dim, 0), shard * group.size)
    out = rows.new_empty(shard, *rows.shape[1:])
    if out.numel():
        with _observed("reduce_scatter", rows):
            reduce_scatter_single(out, rows, group=group.process_group)
    return _own_tensor(out[: shard_size(total, group.size, group.rank)].movedim(0, dim).contiguous())


def own_slice(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """This rank's slice of `x` along `dim`: a view."""
    start, stop = shard_range(x.shape[dim], group.size, group.rank)
    return x.narrow(dim, start, stop - start)


def _own_tensor(x: Tensor) -> Tensor:
    """`x` without a copy, but no view for autograd, which refuses to change one in place that a Function has made.
    Nothing else may hold what `x` is a view of."""
    return x.detach()


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) if missing else x.contiguous()


# The conjugate pairs. Differentiable once: a second derivative would need other collectives, and autograd refuses it.


def _result(x: Tensor) -> Tensor:
    """`x` as the result of a forward. torch.compile takes one that is a view, or was written in place, for a view of
    what it is made of, and the gradient of its own views then passes the function by (torch 2.11 to 2.13 at least).
    """
    return x.clone() if torch.compiler.is_compiling() else x


class _CopyToGroup(torch.autograd.Function):
    """x -> x. Backward: dx is a partial sum on each rank, all-reduced once. Nothing saved."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _result(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    """Partial sums -> their sum, all-reduced. Backward: dy is whole on each rank, and is dx as it is. Nothing saved."""

    @staticmethod
    def forward(ctx, x, group):
        return _result(all_reduce(x, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _ScatterToGroup(torch.autograd.Function):
    """x -> x_shard. Backward: dx_shard -> dx, all-gathered. Nothing saved."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.total, ctx.group = dim, x.shape[dim], group
        # Copied even where it is contiguous: in-place operations on the result must not reach x.
        return own_slice(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(grad, ctx.dim, ctx.total, ctx.group), None, None


class _GatherFromGroup(torch.autograd.Function):
    """x_shard -> x, all-gathered. Backward: dx is whole on each rank; the own slice of it. Nothing saved."""

    @staticmethod
    def forward(ctx, x_shard, dim, total, group):
        ctx.dim, ctx.group = dim, group
        return _result(all_gather(x_shard, dim, total, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return own_slice(grad, ctx.dim, ctx.group).contiguous(), None, None, None


class _AllGatherTokens(torch.autograd.Function):
    """x_shard_m -> x, all-gathered. Backward: dx is a partial sum on each rank, reduce-scattered. Nothing saved."""

    @staticmethod
    def forward(ctx, x_shard_m, dim, total, group):
        ctx.dim, ctx.group = dim, group
        return _result(all_gather(x_shard_m, dim, total, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatterTokens(torch.autograd.Function):
    """Partial sums -> own slice of their sum, reduce-scattered. Backward: dy_shard_m, all-gathered. Nothing saved."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.total, ctx.group = dim, x.shape[dim], group
        return _result(reduce_scatter(x, dim, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(grad, ctx.dim, ctx.total, ctx.group), None, None


class _CopyToReplicas(torch.autograd.Function):
    """x -> x. Backward: dx is a partial sum on each replica, summed over those of the own shard. Nothing saved."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _result(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # Every shard has a slot, so that one all-reduce of the whole group sums each shard over its own replicas.
        slots = grad.new_zeros(ctx.group.size, *grad.shape)
        slots[ctx.group.rank] = grad
        return all_reduce(slots, ctx.group)[ctx.group.rank].clone(), None  # else the other slots would stay as well


def copy_to_replicas(x: Tensor, group: TPGroup) -> Tensor:
    """A shard that several ranks own, each computing a part with it; all shards of one size. Its gradient is summed."""
    return _copy_to(_CopyToReplicas, x, group) if group.replicas > 1 else x


def copy_to_group(x: Tensor, group: TPGroup) -> Tensor:
    """`x`, whole on each rank, where sharded computation begins. Its gradient is all-reduced."""
    return _copy_to(_CopyToGroup, x, group) if group.size > 1 else x


def _copy_to(function: type[torch.autograd.Function], x: Tensor, group: TPGroup) -> Tensor:
    refuse_export_with_gradients()
    return function.apply(x, group) if records_gradient(x) else x  # there is nothing to do forward


def reduce_from_group(x: Tensor, group: TPGroup) -> Tensor:
    """The sum over the group of each rank's `x`. Its gradient passes as it is."""
    return x if group.size == 1 else apply(_ReduceFromGroup, x, group)


def scatter_to_group(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """This rank's slice along `dim` of `x`, which is whole on each rank. Its gradient is all-gathered."""
    return x if group.size == 1 else apply(_ScatterToGroup, x, dim, group)


def gather_from_group(x_shard: Tensor, dim: int, total: int, group: TPGroup) -> Tensor:
    """All shards joined along `dim` (`total` entries), for computation that every rank repeats.

    Raises:
        ValueError: this rank's shard is not of the size that `total` entries give it.
    """
    return x_shard if group.size == 1 else apply(_GatherFromGroup, x_shard, dim, total, group)


def all_gather_tokens(x_shard_m: Tensor, dim: int, total: int, group: TPGroup) -> Tensor:
    """All ranks' tokens joined along `dim` (`total` of them), for sharded computation: the gradient is
    reduce-scattered.

    Raises:
        ValueError: this rank's shard is not of the size that `total` tokens give it.
    """
    return x_shard_m if group.size == 1 else apply(_AllGatherTokens, x_shard_m, dim, total, group)


def reduce_scatter_tokens(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """This rank's tokens, along `dim`, of the sum over the group of each rank's `x`. The gradient is all-gathered."""
    return x if group.size == 1 else apply(_ReduceScatterTokens, x, dim, group)
