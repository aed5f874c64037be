"""From what a user has (a ProcessGroup, a DeviceMesh, or nothing) to the group, rank and size that a layer uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from tpfused.sharding import divide

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class TPGroup:
    """The ranks that split a layer between them.

    Attributes:
        process_group: what the collectives run on; None where a single process needs none.
        rank: this process's place in the group, ``0 <= rank < size``.
        size: the tensor-parallel degree.
        mesh: the one-dimensional DeviceMesh the group came from, if it did: parameters are DTensors on it then.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict) -> TPGroup:
        # A copy of a layer talks to the same ranks; process groups cannot be copied, nor should they be.
        return self


def resolve_group(group: dist.ProcessGroup | TPGroup | None = None, mesh: DeviceMesh | None = None) -> TPGroup:
    """Find the tensor-parallel group to use.

    `group` is a ProcessGroup (or a `TPGroup`, returned as it is); `mesh` is a one-dimensional DeviceMesh. With neither,
    the default process group is used, or a group of this one process when torch.distributed is not initialised.

    Raises:
        ValueError: both were given, the mesh is not one-dimensional, or this process is not a member.
        TypeError: `group` or `mesh` is something else.
    """
    if group is not None and mesh is not None:
        raise ValueError("give either group= (plain parameters) or mesh= (DTensor parameters), not both")
    if isinstance(group, TPGroup):
        return group
    if mesh is not None:
        return _from_mesh(mesh)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return TPGroup(None, rank=0, size=1)
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the given group (new_group returned NON_GROUP_MEMBER here)"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        members = dist.get_process_group_ranks(group)
        raise ValueError(f"rank {dist.get_rank()} is not a member of the given group of ranks {members}")
    return TPGroup(group, rank, dist.get_world_size(group))


def _from_mesh(mesh: DeviceMesh) -> TPGroup:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must be one-dimensional, but has {mesh.ndim} dimensions {tuple(mesh.shape)}; "
            f'slice the tensor-parallel one out of it, as in mesh["tp"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the mesh of ranks {mesh.mesh.tolist()}")
    return TPGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh)


class ReplicaGroups(NamedTuple):
    """A group of ``shards * replicas`` ranks seen as a grid, for rows that fewer shards than ranks can hold."""

    shards: TPGroup  # over which the distinct rows are split
    replicas: TPGroup  # this rank and those that hold the same rows
    grid: DeviceMesh | None  # the mesh reshaped to (shard, replica), in mesh mode


def replica_groups(group: TPGroup, replicas: int) -> ReplicaGroups:
    """Split `group` into blocks of `replicas` consecutive ranks that hold the same rows.

    Collective over `group` at the first call; the result is kept, so that all layers share its process groups.
    """
    key = (group.process_group, group.mesh is not None, replicas)
    if key not in _REPLICA_GROUPS:
        make = _replica_groups_of_ranks if group.mesh is None else _replica_groups_of_mesh
        _REPLICA_GROUPS[key] = make(group, divide(group.size, replicas, "ranks and replicas"), replicas)
    return _REPLICA_GROUPS[key]


def _replica_groups_of_ranks(group: TPGroup, shards: int, replicas: int) -> ReplicaGroups:
    ranks = dist.get_process_group_ranks(group.process_group)
    shard, replica = divmod(group.rank, replicas)
    # Only the members call new_group: the other tensor-parallel groups of a (dp, tp) grid need not join in.
    same_rows = dist.new_group(ranks[shard * replicas : (shard + 1) * replicas], use_local_synchronization=True)
    other_rows = dist.new_group(ranks[replica::replicas], use_local_synchronization=True)
    return ReplicaGroups(TPGroup(other_rows, shard, shards), TPGroup(same_rows, replica, replicas), None)


def _replica_groups_of_mesh(group: TPGroup, shards: int, replicas: int) -> ReplicaGroups:
    name = (group.mesh.mesh_dim_names or ("tp",))[0]
    names = (f"{name}_shard", f"{name}_replica")
    # Unflattened, not made anew: FSDP2 wants every mesh to have one root.
    grid = group.mesh._unflatten(0, (shards, replicas), names)
    return ReplicaGroups(_from_mesh(grid[names[0]]), _from_mesh(grid[names[1]]), grid)


# Keyed by (process group, whether from a mesh, replicas). Process groups live as long as the program does.
_REPLICA_GROUPS: dict[tuple, ReplicaGroups] = {}
