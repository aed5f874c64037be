"""Copies of whole layers and models: pickled, in a state dict, from the meta device; and the end of their group."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.compare import Block, collectives_made
from tests.distributed import connected
from tests.layers.paths import assert_near, gradients, make_model, paths
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tpfused import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelGatedMLP,
    ParallelMLP,
    ParallelTransformer,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather_matmul,
    full_state_dict,
    vocab_parallel_cross_entropy,
)
from tpfused.group import TPGroup, _unpickle, resolve_group
from tpfused.layers.norm import Norm
from tpfused.placement import local, shard_info

CONFIGS = [replace(GPT, sequence_parallel=True, init="xavier"), replace(LLAMA, tie_embeddings=True, num_kv_heads=1)]
two_ranks = pytest.mark.parametrize("tp", [2], indirect=True)
modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def assert_same_model(block, model, other, what):
    """The same weights, shards, losses and gradients."""
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local(param), local(twin)) and param.requires_grad == twin.requires_grad, (what, name)
        mine, theirs = shard_info(param), shard_info(twin)
        assert (mine is None) == (theirs is None) and (mine is None or mine[:2] == theirs[:2]), (what, name)
    ids = draw_ids(block, model.config, 6)
    for each in (model, other):
        each.zero_grad()
        each.loss(ids, ids.roll(1, 1)).backward()
    assert_near(gradients(other), gradients(model), what)
    assert full_state_dict(model).keys() == full_state_dict(other).keys()


def check_pickling(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        for name in paths(ctx, tp):
            model = make_model(block, config)
            model.blocks[0].requires_grad_(False)
            ids = draw_ids(block, config, 6)
            model.loss(ids, ids.roll(1, 1))  # what a call leaves behind must not stand in the way
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for other in (
                pickle.loads(pickle.dumps(model)),
                torch.load(file, weights_only=False),
                copy.deepcopy(model),
            ):
                assert_same_model(block, model, other, f"{name} {config}")
                assert other.group.process_group is model.group.process_group
                assert other.blocks[0].mlp is not model.blocks[0].mlp


def check_gradients_of_shared_heads(ctx, tp, mode, seed):
    """They are summed in slots of all shards, of which none but the own one is kept; torch copies a DTensor's too."""
    block = Block(ctx, tp, mode, seed)
    layer = ParallelAttention(8, 4, num_kv_heads=2, device=ctx.device, **block.place)
    layer(block.randn(3, 2, 8, dtype=torch.float32)).sum().backward()
    grad = local(layer.k.weight.grad)
    assert grad.untyped_storage().nbytes() == grad.nbytes
    copied = copy.deepcopy(layer)  # of other parameters, without their gradients
    if mode == "mesh":
        assert_near(gradients(copied), gradients(layer), "copied")


def check_pickled_elsewhere(ctx, tp):
    """A layer of another group than those that there are, and of the default one, by whatever name."""
    group = resolve_group(None)
    assert pickle.loads(pickle.dumps(group)).process_group is dist.group.WORLD
    again = connected(dist.new_group(range(ctx.world)))
    pickled = pickle.dumps(resolve_group(again))
    assert pickle.loads(pickled).process_group is again
    dist.destroy_process_group(again)
    assert pickle.loads(pickled).process_group is dist.group.WORLD
    short_lived = dist.new_group([0, 3]), dist.new_group([1, 2])
    (process_group,) = (group for group in short_lived if group is not dist.GroupMember.NON_GROUP_MEMBER)
    mine = resolve_group(connected(process_group))
    pickled = pickle.dumps(ColumnParallelLinear(4, 6, group=mine, device=ctx.device))
    assert pickle.loads(pickled).group.process_group is process_group
    dist.destroy_process_group(process_group)
    told = rf"part {mine.rank} of 2 .* ranks \[{'0, 3' if ctx.rank in (0, 3) else '1, 2'}\].*full_state_dict"
    with pytest.raises(RuntimeError, match=told):
        pickle.loads(pickled)
    with pytest.raises(RuntimeError, match="pickled.*2 ranks was destroyed"):
        pickle.dumps(mine)
    return pickle.dumps(ColumnParallelLinear(4, 6, device=ctx.device))


def check_another_rank(ctx, pickled):
    """A rank loads its own part only."""
    if ctx.rank == 0:
        with pytest.raises(RuntimeError, match="part 1 of"):
            pickle.loads(pickled[1])


def check_states(ctx, tp, mode, seed):
    """A state dict assigned to a model on the meta device, and copied into one that was emptied and drawn anew."""
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        model = make_model(block, config)
        empty = ParallelTransformer(config, device="meta", **block.place)
        empty.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        drawn = ParallelTransformer(config, device="meta", **block.place).to_empty(device=ctx.device)
        torch.manual_seed(block.seed)
        for module in drawn.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for path in paths(ctx, tp):
            assert_same_model(block, model, empty, f"assigned {path}")
            assert_same_model(block, model, drawn, f"drawn anew {path}")
        with torch.no_grad():
            for param in drawn.parameters():
                local(param).zero_()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            drawn.load_state_dict(model.state_dict())
            assert_same_model(block, model, drawn.double().float(), "swapped")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


def check_destroyed(ctx, tp):
    groups = [dist.new_group(range(first, first + tp)) for first in range(0, ctx.world, tp)]
    group = next(g for g in groups if g is not dist.GroupMember.NON_GROUP_MEMBER)
    block = Block(ctx, tp, "group", 0)
    place = {"device": ctx.device, "group": group}
    x, ids = torch.ones(2, 1, 8, device=ctx.device), torch.zeros(2, 2, dtype=torch.int64, device=ctx.device)
    shard = block.own(x, -1)
    calls = [
        (ColumnParallelLinear(8, 8, **place), x),
        (ColumnParallelLinear(8, 8, sequence_parallel=True, backend="reference", **place), x),
        (RowParallelLinear(8, 8, **place), shard),
        (VocabParallelEmbedding(8, 8, **place), ids),
        (Norm("rmsnorm", 8, sequence_parallel=True, **place), x),
        (ParallelMLP(8, 8, **place), x),
        (ParallelGatedMLP(8, 8, **place), x),
        (ParallelAttention(8, 4, **place), x),
        (ParallelTransformer(GPT, **place), ids),
        (lambda x: all_gather_matmul(x, torch.ones(4, 8, device=ctx.device), group=group), x),
        (lambda x: vocab_parallel_cross_entropy(x, ids[:, :1], group=group), x),
    ]
    for _ in paths(ctx, tp):
        for layer, given in calls:
            layer(given)
    dist.destroy_process_group(group)
    for name in paths(ctx, tp):
        for layer, given in calls:
            with collectives_made() as made, pytest.raises(RuntimeError, match="process group.* was destroyed"):
                layer(given)
            assert not made, (name, layer)
    with pytest.raises(RuntimeError, match="was destroyed"):
        ColumnParallelLinear(8, 8, **place)


@modes
@pytest.mark.parametrize("tp", [4], indirect=True)
def test_gradients_of_shared_heads(workers, tp, mode, seed):
    workers.run(check_gradients_of_shared_heads, tp, mode, seed)


@modes
@two_ranks
def test_pickled_models(workers, tp, mode, seed):
    workers.run(check_pickling, tp, mode, seed)


@two_ranks
def test_pickled_layers_find_their_group(workers, tp):
    if workers.world < 4:
        pytest.skip("needs four ranks")
    workers.run(check_another_rank, workers.run(check_pickled_elsewhere, tp))


def test_a_pickled_shard_is_not_loaded_alone():
    group = TPGroup(None, 0, 1)
    assert pickle.loads(pickle.dumps(group)).size == 1
    with pytest.raises(RuntimeError, match="part 1 of 2 .*without a process group"):
        _unpickle("0", (0, 1), 1, 2, None, 1)


@modes
@two_ranks
def test_state_dicts(workers, tp, mode, seed):
    workers.run(check_states, tp, mode, seed)


@two_ranks
def test_a_destroyed_group_is_told(workers, tp):
    workers.run(check_destroyed, tp)
