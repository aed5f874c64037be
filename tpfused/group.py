"""From what a user has (a ProcessGroup, a DeviceMesh, or nothing) to the group, rank and size that a layer uses."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tpfused.sharding import divide

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class TPGroup:
    """The ranks that split a layer between them.

    Attributes:
        process_group: what the collectives run on; None where a single process needs none.
        rank: which shard this process owns, ``0 <= rank < size``.
        size: the number of shards: the tensor-parallel degree.
        mesh: the one-dimensional DeviceMesh the group came from, if it did: parameters are DTensors on it then.
        replicas: how many consecutive ranks of the process group own the same shard: 1, but for the key-value heads of
            `with_replicas`.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    mesh: DeviceMesh | None = None
    replicas: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to exchange anything with."""
        return self.size * self.replicas == 1

    def __deepcopy__(self, memo: dict) -> TPGroup:
        # A copy of a layer talks to the same ranks; process groups cannot be copied, nor should they be.
        return self

    def __reduce__(self):
        if self.process_group is None:
            return TPGroup, (None, self.rank, self.size)
        check_exists(self, "a layer that is to be pickled")
        ranks = tuple(dist.get_process_group_ranks(self.process_group))
        return _unpickle, (self.process_group.group_name, ranks, self.rank, self.size, self.mesh, self.replicas)


def exists(process_group: dist.ProcessGroup) -> bool:
    """Whether it has not been destroyed."""
    return process_group in GROUPS


GROUPS = dist.distributed_c10d._pg_map if dist.is_available() else {}  # all that exist; torch's own


def check_exists(group: TPGroup, what: str) -> None:
    """Refuse a group that torch has destroyed: its collectives would fail in as many ways as there are.

    Raises:
        RuntimeError
    """
    if group.process_group is not None and not exists(group.process_group) and group.size * group.replicas > 1:
        raise RuntimeError(
            f"{what}: its process group of {group.size * group.replicas} ranks was destroyed. Call "
            f"torch.distributed.destroy_process_group() after the last use, or make the layers anew in a new group"
        )


def _unpickle(
    name: str, ranks: tuple[int, ...], rank: int, size: int, mesh: DeviceMesh | None, replicas: int
) -> TPGroup:
    """A pickled group: of the process groups of the same ranks the one of this name, else the default one or the first.

    Raises:
        RuntimeError: there is none, or this process is another rank of it.
    """
    if mesh is not None:
        return TPGroup(mesh.get_group(), rank, size, mesh, replicas)
    here = dist.get_rank() if dist.is_initialized() else None
    if here is not None and here in ranks and ranks.index(here) // replicas == rank:
        same = [group for group in (dist.group.WORLD, *GROUPS) if tuple(dist.get_process_group_ranks(group)) == ranks]
        same.sort(key=lambda group: group.group_name != name)
        if same:
            return TPGroup(same[0], rank, size, None, replicas)
    where = "without a process group" if here is None else f"by rank {here} of {dist.get_world_size()}"
    raise RuntimeError(
        f"a pickled layer is part {rank} of {size} and belongs to a process group of the ranks {list(ranks)}, but is "
        f"loaded {where}: make that group before, or save full_state_dict(model), which loads at any degree"
    )


def resolve_group(group: dist.ProcessGroup | TPGroup | None = None, mesh: DeviceMesh | None = None) -> TPGroup:
    """Find the tensor-parallel group to use.

    `group` is a ProcessGroup (or a `TPGroup`, returned as it is); `mesh` is a one-dimensional DeviceMesh. With neither,
    the default process group is used, or a group of this one process when torch.distributed is not initialised.

    Raises:
        ValueError: both were given, the mesh is not one-dimensional, or this process is not a member.
        TypeError: `group` or `mesh` is something else.
        RuntimeError: the group was destroyed.
    """
    if group is not None and mesh is not None:
        raise ValueError("give either group= (plain parameters) or mesh= (DTensor parameters), not both")
    if isinstance(group, TPGroup):
        check_exists(group, "the tensor-parallel group")
        return group
    if mesh is not None:
        return _from_mesh(mesh)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            if not torch.compiler.is_compiling():
                _warn_of_other_processes(os.environ.get("WORLD_SIZE", "1"))
            return TPGroup(None, rank=0, size=1)
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the given group (new_group returned NON_GROUP_MEMBER here)"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    if not exists(group):
        raise RuntimeError("the given process group was destroyed, or is none of torch.distributed's")
    rank = dist.get_rank(group)
    if rank < 0:
        members = dist.get_process_group_ranks(group)
        raise ValueError(f"rank {dist.get_rank()} is not a member of the given group of ranks {members}")
    return TPGroup(group, rank, dist.get_world_size(group))


@cache  # said once
def _warn_of_other_processes(world: str) -> None:
    if world != "1":
        warnings.warn(
            f"tpfused: WORLD_SIZE is {world}, but torch.distributed.init_process_group has not been called: each "
            f"process makes layers of its own, not split. Call it first",
            stacklevel=3,
        )


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


def with_replicas(group: TPGroup, replicas: int) -> TPGroup:
    """The same ranks, for rows that fewer shards than ranks can hold: `replicas` consecutive ranks own each shard.

    No process group is made: who owns what is arithmetic, and the collectives run on the whole group.

    Raises:
        ValueError: the ranks are not a multiple of `replicas`.
    """
    shards = divide(group.size, replicas, "ranks over replicas")
    return TPGroup(group.process_group, group.rank // replicas, shards, group.mesh, replicas)


def replica_mesh(group: TPGroup) -> DeviceMesh:
    """The mesh of a group `with_replicas`, reshaped to (shard, replica), for DTensors.

    Made once for a mesh and number of replicas. torch makes process groups for it, in which all ranks of the program
    take part: all tensor-parallel groups must build the same layers in the same order, as they do for one model.
    """
    from torch.distributed.device_mesh import DeviceMesh

    key = (group.process_group, group.replicas)
    if key not in _REPLICA_MESHES:
        check_reshapable(group.mesh, group.size)
        (name,) = group.mesh.mesh_dim_names or ("tp",)
        shape, names = (group.size, group.replicas), (f"{name}_shard", f"{name}_replica")
        if group.mesh.mesh_dim_names is None:  # of all ranks
            mesh = DeviceMesh(group.mesh.device_type, group.mesh.mesh.view(shape), mesh_dim_names=names)
        else:
            mesh = group.mesh._unflatten(0, shape, names)  # not made anew: FSDP2 wants all meshes to have one root
        _REPLICA_MESHES[key] = mesh
    return _REPLICA_MESHES[key]


def check_reshapable(mesh: DeviceMesh, kv_heads: int) -> None:
    """Refuse a mesh that `replica_mesh` could not reshape for so many key-value heads.

    Raises:
        ValueError: its dimension has no name, and it is a part of the program's ranks: torch reshapes none such, and
            who makes another has to make those of all the parts.
    """
    if mesh.mesh_dim_names is None and mesh.size() < dist.get_world_size():
        raise ValueError(
            f"{kv_heads} key-value heads on {mesh.size()} of {dist.get_world_size()} ranks need a mesh whose dimension "
            f'has a name, as in init_device_mesh(..., mesh_dim_names=("tp",)): only such a mesh can be reshaped'
        )


_REPLICA_MESHES: dict[tuple[dist.ProcessGroup, int], DeviceMesh] = {}
