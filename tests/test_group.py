"""From a process group, a mesh or nothing to the group a layer uses."""

import copy

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import refuses
from tpfused.group import TPGroup, _warn_of_other_processes, replica_mesh, resolve_group, with_replicas


def members(group):
    return dist.get_process_group_ranks(group.process_group)


def check_accepts(ctx, size):
    block = list(range(ctx.rank - ctx.rank % size, ctx.rank - ctx.rank % size + size))
    for group in (resolve_group(ctx.group(size)), resolve_group(mesh=ctx.mesh(size))):
        assert (members(group), group.rank, group.size) == (block, ctx.rank % size, size)
        assert resolve_group(group) is group
        assert copy.deepcopy(group) is group
    assert resolve_group(ctx.group(size)).mesh is None
    assert resolve_group(mesh=ctx.mesh(size)).mesh is ctx.mesh(size)
    whole = resolve_group()
    assert (members(whole), whole.rank, whole.size) == (list(range(ctx.world)), ctx.rank, ctx.world)


def check_refuses(ctx):
    with refuses(ValueError, "group=", "mesh="):
        resolve_group(ctx.group(1), mesh=ctx.mesh(1))
    with refuses(ValueError, 2, (ctx.world, 1)):
        resolve_group(mesh=ctx.grid(1))
    with refuses(TypeError, "str"):
        resolve_group("tp")
    with refuses(TypeError, "int"):
        resolve_group(mesh=4)


def check_refuses_a_stranger(ctx):
    part = list(range(ctx.world // 2))
    group = dist.new_group(part)
    mesh = DeviceMesh(ctx.device.type, part, mesh_dim_names=("tp",))
    if ctx.rank in part:
        assert members(resolve_group(group)) == members(resolve_group(mesh=mesh)) == part
    else:
        with refuses(ValueError, f"rank {ctx.rank}"):
            resolve_group(group)
        with refuses(ValueError, f"rank {ctx.rank}", part):
            resolve_group(mesh=mesh)


def check_replicas(ctx, size, replicas):
    first = ctx.rank - ctx.rank % size
    for group in (resolve_group(ctx.group(size)), resolve_group(mesh=ctx.mesh(size))):
        made = with_replicas(group, replicas)
        assert (made.rank, made.size, made.replicas) == (ctx.rank % size // replicas, size // replicas, replicas)
        assert made.process_group is group.process_group and made.mesh is group.mesh
        with refuses(ValueError, size, 3):
            with_replicas(group, 3)
    mesh = replica_mesh(made)
    assert mesh.mesh.tolist() == [[first + s * replicas + r for r in range(replicas)] for s in range(size // replicas)]
    assert list(mesh.get_coordinate()) == [made.rank, ctx.rank % replicas]
    assert replica_mesh(with_replicas(group, replicas)) is mesh


def test_one_process_without_torch_distributed():
    group = resolve_group()
    assert group == resolve_group(group) and isinstance(group, TPGroup)
    assert (group.process_group, group.rank, group.size, group.mesh) == (None, 0, 1, None)


@pytest.mark.parametrize("world, warnings", [("1", 0), ("4", 1)])
def test_processes_without_a_group_are_told_once(world, warnings, monkeypatch, recwarn):
    monkeypatch.setenv("WORLD_SIZE", world)
    _warn_of_other_processes.cache_clear()
    for _ in range(2):
        assert resolve_group().size == 1
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == warnings and all("WORLD_SIZE is 4" in text and "init_process_group" in text for text in told)


def test_accepts_groups_meshes_and_nothing(workers, tp):
    workers.run(check_accepts, tp)


def test_refuses_what_is_no_group(workers):
    workers.run(check_refuses)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_of_fewer_shards_than_ranks(workers, tp, replicas):
    if tp % replicas:
        pytest.skip(f"{tp} ranks cannot hold {replicas} replicas")
    workers.run(check_replicas, tp, replicas)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_refuses_a_group_this_rank_is_not_in(workers, tp):
    workers.run(check_refuses_a_stranger)
