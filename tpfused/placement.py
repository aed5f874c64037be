"""How any parameter is split, plain or DTensor: a list of `ShardInfo`, one a split, in the order they were made.

A plain tensor-parallel shard is split once. Under FSDP2 the tensor-parallel shard is split again over the
data-parallel ranks, usually along the same dimension; DTensor writes that as ``_StridedShard`` on the mesh's
data-parallel dimension. Taking the splits one at a time needs no such notion, and is right for sizes that do
not divide evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.autograd import eager_apply, records_gradient
from tpfused.collectives import gather_from_group, own_slice
from tpfused.group import TPGroup, check_exists, exists
from tpfused.sharding import shard_range, shard_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardInfo(NamedTuple):
    """One split of a tensor."""

    dim: int
    size: int  # of what was split, along dim
    group: TPGroup  # whose ranks own the shards, in rank order


def shard_info(param: Tensor) -> ShardInfo | None:
    """How a plain parameter is a shard; None where it is whole on each rank, and for a DTensor, which knows itself."""
    return getattr(param, "tp_shard", None)


def local(param: Tensor | None, *, new_gradient: bool = False) -> Tensor | None:
    """What this rank computes with: a DTensor's local tensor (differentiable), or the parameter itself.

    `new_gradient`: what the local tensor gets for a gradient is a new tensor, which nothing else holds, as a matmul
    gives it. Otherwise it is copied: autograd sees that nobody else holds the DTensor that is made of it, keeps that as
    the parameter's, and adds to it what comes later.
    """
    if not is_dtensor(param):
        return param
    if torch.compiler.is_compiling():  # which lays gradients out itself, and cannot trace the other
        return param.to_local(grad_placements=param.placements)
    return _to_local(param, new_gradient) if records_gradient(param) else param.to_local()


def is_dtensor(tensor: object) -> bool:
    if not torch.compiler.is_compiling():
        return hasattr(tensor, "to_local")
    from torch.distributed.tensor import DTensor  # whose attributes hasattr does not find there

    return isinstance(tensor, DTensor)


class _ToLocal(torch.autograd.Function):
    """A DTensor -> its local tensor. Backward: the local gradient -> a DTensor laid out exactly as the parameter.

    `DTensor.to_local` would derive the gradient's strides from its local ones, which is wrong for uneven shards of the
    last dimension; torch 2.11 then makes each rank hold the whole of the gradient.
    """

    @staticmethod
    def forward(ctx, param, new_gradient):
        ctx.spec, ctx.new_gradient = param._spec, new_gradient
        ctx.set_materialize_grads(False)  # one that went to a main_grad
        part = param.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx, grad):
        from torch.distributed.tensor import DTensor

        if grad is None:
            return None, None
        grad = grad.contiguous() if ctx.new_gradient else grad.clone(memory_format=torch.contiguous_format)
        spec = ctx.spec
        if not torch.is_grad_enabled():  # `from_local` would build the spec anew: nearly half of all the host's time
            return DTensor(grad, spec, requires_grad=False), None
        whole = {"shape": spec.shape, "stride": spec.stride}
        return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False, **whole), None


_to_local = eager_apply(_ToLocal)


def splits(param: Tensor) -> list[ShardInfo]:
    """The splits that lead from the whole of `param` to this rank's part; empty where each rank has the whole.

    Raises:
        ValueError: a DTensor whose local tensors are partial sums.
        RuntimeError: the process group of a split was destroyed.
    """
    found = _plain_splits(param)
    placements = getattr(param, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"partial sums {tuple(placements)} are not parts of a tensor; redistribute them first")
    mesh_dims = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    # A strided split is made after those to its right (its split_factor counts them); all others go left to right.
    mesh_dims.sort(key=lambda dim: hasattr(placements[dim], "split_factor"))
    sizes = list(param.shape)
    for mesh_dim in mesh_dims:
        mesh, dim = param.device_mesh, placements[mesh_dim].dim
        group = TPGroup(_process_group(mesh, mesh_dim), mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
        found.append(ShardInfo(dim, sizes[dim], group))
        sizes[dim] = shard_size(sizes[dim], group.size, group.rank)
    return found


def _plain_splits(param: Tensor) -> list[ShardInfo]:
    info = shard_info(param)
    if info is None:
        return []
    if not exists(info.group.process_group):  # of many parameters in a step: the words are for those that need them
        check_exists(info.group, f"a parameter of shape {tuple(param.shape)}")
    return [info]


def _process_group(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup | None:
    """Of one dimension of the mesh; None where that is of one rank, which needs none."""
    if mesh.size(dim) == 1:
        return None
    try:
        return mesh.get_group(dim)
    except RuntimeError as error:  # the mesh knows its group by name only
        raise RuntimeError(
            f"a DTensor on dimension {dim} of a mesh: its process group of {mesh.size(dim)} ranks was destroyed"
        ) from error


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Over which the model's parameters are split or repeated: all that connect its ranks, in one order on each.

    Raises:
        RuntimeError: one was destroyed.
    """
    found: dict[dist.ProcessGroup, set[int]] = {}
    for param in model.parameters():
        mesh = getattr(param, "device_mesh", None)
        groups = [] if mesh is None else [_process_group(mesh, dim) for dim in range(mesh.ndim)]
        groups += [split.group.process_group for split in _plain_splits(param)]
        found |= {group: set(dist.get_process_group_ranks(group)) for group in groups if group is not None}
    # Large ones first: those of key-value heads, say, are inside the group of all the model.
    kept: dict[dist.ProcessGroup, set[int]] = {}
    for group, ranks in sorted(found.items(), key=lambda item: -len(item[1])):
        if len(ranks) > 1 and not any(ranks <= others for others in kept.values()):
            kept[group] = ranks
    return list(kept)


def own_box(shape: Sequence[int], made_by: Sequence[ShardInfo]) -> tuple[slice, ...]:
    """Where in a whole of this `shape` this rank's local part lies: ``whole[own_box]`` is `own_part` of it."""
    box = [slice(0, size) for size in shape]
    for dim, _, group in made_by:
        first, last = box[dim].start, box[dim].stop
        start, stop = shard_range(last - first, group.size, group.rank)
        box[dim] = slice(first + start, first + stop)
    return tuple(box)


def whole_shape(param: Tensor) -> torch.Size:
    """The shape of what `param` is a part of. A DTensor's own shape is that of its whole already."""
    shape = list(param.shape)
    info = shard_info(param)
    if info is not None:
        shape[info.dim] = info.size
    return torch.Size(shape)


def gather_whole(part: Tensor, made_by: Sequence[ShardInfo]) -> Tensor:
    """From each rank's local part to the whole, on every rank. Collective over the splits' groups."""
    for dim, size, group in reversed(made_by):
        part = gather_from_group(part, dim, size, group)
    return part


def own_part(whole: Tensor, made_by: Sequence[ShardInfo]) -> Tensor:
    """This rank's local part of a whole: a view."""
    for dim, _, group in made_by:
        whole = own_slice(whole, dim, group)
    return whole
