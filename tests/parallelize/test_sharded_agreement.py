"""What is whole of no model, or of none any more: refused on every rank, before anything is gathered or written."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tpfused
from tests.compare import collectives_made, refuses
from tests.distributed import Workers
from tpfused.checkpoint import full_optimizer_state, load_full_optimizer_state
from tpfused.placement import local

pytest.importorskip("safetensors")


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """That has made a step."""
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def savers(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> list:
    return [
        lambda: tpfused.save_sharded(model, folder),
        lambda: tpfused.full_state_dict(model),
        lambda: full_optimizer_state(model, optimizer),
    ]


def check_split_differently(ctx, folder):
    last = ctx.rank == ctx.world - 1
    place = {"group": ctx.group(ctx.world), "device": ctx.device}
    kinds = {
        "row": lambda: tpfused.RowParallelLinear(8, 8, bias=False, **place),
        "column": lambda: tpfused.ColumnParallelLinear(8, 8, bias=False, **place),
        "whole": lambda: nn.Linear(8, 8, bias=False, device=ctx.device),
    }
    columns = f" [8, 8] torch.float32, dimension 0 in {ctx.world} parts"
    for others, its, *told in (
        ("column", "row", columns, f"dimension 1 in {ctx.world} parts"),
        ("whole", "column", " [8, 8] torch.float32)", columns),
    ):
        model = kinds[its if last else others]()
        for save in savers(model, momentum(model), folder):
            with refuses(ValueError, "different models", *told):
                save()
    # As many parts, of other ranks.
    if ctx.world == 4:
        first, second, pair = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 3]))
        own = pair if last else (first, first, second)[ctx.rank]
        model = tpfused.ColumnParallelLinear(8, 8, group=own, device=ctx.device)
        for save in savers(model, momentum(model), folder):
            with refuses(ValueError, "different groups: rank 2 over the ranks [2, 3], but rank 3 over [0, 3]"):
                save()
    assert not folder.exists()
    model = kinds["row"]()
    for save in savers(model, momentum(model), folder):
        save()


def test_models_that_are_split_differently(workers, tmp_path):
    if workers.world > 1:
        workers.run(check_split_differently, tmp_path / "out")


def check_refused_whole(ctx, folder):
    """On the last rank alone, too: nobody waits for it."""
    last = ctx.rank == ctx.world - 1
    place = {"group": ctx.group(ctx.world)}
    for odd in (True, last):
        meta = tpfused.ColumnParallelLinear(4, 8, device="meta" if odd else ctx.device, **place)
        sparse = tpfused.ColumnParallelLinear(4, 8, device=ctx.device, **place)
        sparse.register_buffer("links", torch.eye(2, device=ctx.device).to_sparse() if odd else torch.eye(2))
        for call in (tpfused.full_state_dict, lambda model: tpfused.save_sharded(model, folder)):
            with refuses(ValueError, "2 tensors are on the meta device (weight, ...): there is nothing to save"):
                call(meta)
            with refuses(TypeError, "links must be a dense tensor, not a sparse_coo one"):
                call(sparse)
    assert not folder.exists()


def test_what_cannot_be_gathered_is_told_before(workers, tmp_path):
    workers.run(check_refused_whole, tmp_path / "out")


def test_a_sparse_buffer_is_not_loaded(tmp_path):
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = nn.Linear(2, 2)
    for each, adjacency in (model, torch.eye(2).to_sparse()), (other, torch.eye(2)):
        each.register_buffer("adjacency", adjacency)
    tpfused.save_sharded(other, tmp_path)
    for load in (
        lambda: tpfused.load_full_state_dict(model, other.state_dict()),
        lambda: tpfused.load_sharded(model, tmp_path),
    ):
        with refuses(TypeError, "adjacency must be a dense tensor, not a sparse_coo one"):
            load()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def check_loaded_by_all_or_none(ctx, tp):
    last = ctx.rank == ctx.world - 1
    grid = ctx.grid(tp)
    plain = tpfused.ColumnParallelLinear(4, 8, group=ctx.group(ctx.world), device=ctx.device)
    both = tpfused.ColumnParallelLinear(4, 8, mesh=grid["tp"])
    fully_shard(both, mesh=grid["dp"])
    for model in (plain, both):
        optimizer = momentum(model)
        state = box_of(tpfused.full_state_dict(model))
        kept = box_of(full_optimizer_state(model, optimizer))
        with refuses(ValueError, "the state is empty: full_state_dict gives it to rank 0 only"):
            tpfused.load_full_state_dict(model, {name: 0 * each for name, each in state.items()} if not last else {})
        odd = {"weight.momentum_buffer": torch.ones(3)} if last else {}
        with refuses(ValueError, "weight.momentum_buffer (3,), not (8, 4)"):
            zeros = {name: 0 * each for name, each in kept.items()}
            load_full_optimizer_state(model, optimizer, zeros | odd)
        for before, after in (
            (state, tpfused.full_state_dict(model)),
            (kept, full_optimizer_state(model, optimizer)),
        ):
            assert all(torch.equal(before[name], each) for name, each in after.items())
    if last:  # alone, in no collective
        whole = nn.Linear(2, 2)
        tpfused.load_full_state_dict(whole, whole.state_dict())


def box_of(state: dict) -> dict:
    box = [state]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_a_state_is_loaded_by_all_ranks_or_none(workers, tp):
    workers.run(check_loaded_by_all_or_none, tp)


def check_destroyed(ctx, folder):
    """Every process group, so that no rank knows of the others any more; and one of the model's, beside the default."""
    group = dist.new_group(range(ctx.world))
    grid = ctx.grid(1)
    plain = tpfused.ColumnParallelLinear(4, 8, group=group, device=ctx.device)
    sharded = nn.Linear(4, 8, device=ctx.device)
    fully_shard(sharded, mesh=grid["dp"])
    models = [(plain, momentum(plain)), (sharded, momentum(sharded))]
    states = [box_of(tpfused.full_state_dict(model)) for model, _ in models]
    tpfused.save_sharded(plain, folder / "there")
    told = f"its process group of {ctx.world} ranks was destroyed"

    def check(model, optimizer, state):
        before = [local(param).clone() for param in model.parameters()]
        for call in (
            *savers(model, optimizer, folder / "out"),
            lambda: tpfused.clip_grad_norm_(model.parameters(), 1.0),
            lambda: tpfused.load_sharded(model, folder / "there"),
            lambda: tpfused.load_full_state_dict(model, {name: 0 * each for name, each in state.items()}),
            lambda: load_full_optimizer_state(model, optimizer, {}),
        ):
            with collectives_made() as made, pytest.raises(RuntimeError, match=told):
                call()
            assert not made
        assert all(map(torch.equal, map(local, model.parameters()), before))

    dist.destroy_process_group(group)
    check(plain, models[0][1], states[0])
    dist.destroy_process_group()
    for (model, optimizer), state in zip(models, states, strict=True):
        check(model, optimizer, state)
    assert not (folder / "out").exists()


def test_destroyed_groups_are_told(workers, tmp_path):
    if workers.world > 1:
        with Workers(workers.device, 2) as pool:  # which no other check can use afterwards
            pool.run(check_destroyed, tmp_path)
