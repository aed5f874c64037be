"""Ranks that read checkpoints of one shape, but not the same one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tpfused
from tests.compare import refuses
from tpfused.agreement import by_rank, raise_together
from tpfused.placement import local

pytest.importorskip("safetensors")


def build() -> torch.nn.Module:
    """With a scalar, and nothing at all, among what is compared."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("empty", torch.ones(0, 3))
    return model


def check_other_folder(ctx, tp, folder):
    """The last rank's is another one; under FSDP2 the ranks of other blocks hear of it, too."""
    with torch.device("meta"):
        model = build()
    tpfused.parallelize(model, ctx.mesh(tp), {"0": "colwise", "1": "rowwise"})
    fully_shard(model, mesh=ctx.grid(tp)["dp"])
    path = folder / ("other" if ctx.rank == ctx.world - 1 else "one")
    told = "different checkpoints: 3 of 6 tensors begin with other entries on rank"
    with refuses(ValueError, told, "\n  0.bias", "\n  1.bias", "\n  scale"):
        tpfused.load_sharded(model, path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    tpfused.load_sharded(model, folder / "one")


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_checkpoints_that_differ_between_ranks_are_refused(workers, tp, tmp_path):
    one = build()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].bias += 1
        other[1].bias += 1
        other.scale += 1
    for name, model in ("one", one), ("other", other):
        tpfused.save_sharded(model, tmp_path / name)
    workers.run(check_other_folder, tp, tmp_path)


def zeros(name: str, kind=torch.nn.Linear, **options) -> torch.nn.Module:
    model = torch.nn.ModuleDict({name: kind(6, 8, **options)})
    for param in model.parameters():
        torch.nn.init.zeros_(local(param))
    return model


def check_other_model(ctx, folder):
    """What the last rank reads fits its model, which is not the others': the names differ, and no entry does."""
    name = "its" if ctx.rank == ctx.world - 1 else "ours"
    model = zeros(name, tpfused.ColumnParallelLinear, device=ctx.device)
    told = f"4 of 4 tensors begin with other entries on rank {ctx.world - 1} than on rank 0, or have another dtype"
    with refuses(ValueError, told, "ours.weight", "ours.bias", "its.weight", "its.bias"):
        tpfused.load_sharded(model, folder / name)


def test_another_model_on_one_rank_is_refused(workers, tmp_path):
    if workers.world > 1:
        for name in ("ours", "its"):
            tpfused.save_sharded(zeros(name), tmp_path / name)
        workers.run(check_other_model, tmp_path)


def check_unsplit(ctx, folder):
    """The last rank's model is whole. It is loaded by that rank alone, whose next call meets the others' load."""
    last, mesh = ctx.rank == ctx.world - 1, ctx.mesh(ctx.world)
    torch.manual_seed(5)
    split = tpfused.parallelize(build(), mesh, {"0": "colwise", "1": "rowwise"})
    before = [local(param).clone() for param in split.parameters()]

    def load_and_save(model):
        tpfused.load_sharded(model, folder / "one")
        tpfused.save_sharded(model, folder / "new")

    def split_again(model):
        tpfused.parallelize(model, mesh, {"0": "colwise"})

    for call, there in (load_and_save, "save_sharded"), (split_again, "parallelize"):
        with refuses(ValueError, "not in the same call: load_sharded on rank 0", f"{there} on rank {ctx.world - 1}"):
            call(build()) if last else tpfused.load_sharded(split, folder / "one")
    if last:
        dist.all_gather_object([None] * ctx.world, "done")
    else:
        with refuses(ValueError, f"load_sharded on rank 0, a collective of its program's own on rank {ctx.world - 1}"):
            tpfused.load_sharded(split, folder / "one")
    assert all(map(torch.equal, map(local, split.parameters()), before)) and not (folder / "new").exists()
    tpfused.load_sharded(split, folder / "one")  # all of them do, and all is well


def test_a_model_that_is_split_on_the_others_only(workers, tmp_path):
    if workers.world > 1:
        tpfused.save_sharded(build(), tmp_path / "one")
        workers.run(check_unsplit, tmp_path)


def check_crossed_on_a_grid(ctx):
    """The last rank's call crosses with its neighbours'; rank 0, which is in no group with it, hears from them."""
    grid = ctx.grid(ctx.world // 2)
    groups = [grid[name].get_group() for name in ("dp", "tp")]
    with refuses(ValueError, "not in the same call", f"other on rank {ctx.world - 1}"):
        raise_together(None, groups, "other" if ctx.rank == ctx.world - 1 else "one")
    for group in groups:
        assert set(by_rank("go on", group).values()) == {"go on"}


def test_crossed_calls_are_told_over_all_groups(workers):
    if workers.world == 4:
        workers.run(check_crossed_on_a_grid)
