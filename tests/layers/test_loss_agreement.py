"""What the ranks of a loss and an argmax agree on: how wide their shards are, and which labels there are."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compare import Block, assert_close, refuses
from tests.overlap.test_agreement import debugging
from tpfused import vocab_parallel_argmax, vocab_parallel_cross_entropy
from tpfused.layers import vocabulary as module
from tpfused.sharding import shard_size

several_ranks = pytest.mark.parametrize("tp", [2, 4], indirect=True)


def draw(block, vocab_size):
    logits, target = block.randn(6, vocab_size), torch.randint(vocab_size, (6,), device=block.device)
    return logits, target, block.own(logits, -1)


def check_forgotten_size(ctx, tp, seed):
    """GPT-2's vocabulary and small ones, uneven with the last shards narrower or empty; then what is right."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for vocab_size in (50257, 41 * tp - 1, 1):
        logits, target, shard = draw(block, vocab_size)
        for _ in range(2):  # a width that is refused is not remembered
            widths = {shard_size(vocab_size, tp, rank) for rank in range(tp)}
            with refuses(ValueError, "vocab_size=", vocab_size, *widths):
                vocab_parallel_cross_entropy(shard, target, group=block.group)
        loss = vocab_parallel_cross_entropy(shard, target, vocab_size=vocab_size, group=block.group)
        assert_close(loss, F.cross_entropy(logits, target))
    logits, target, shard = draw(block, 50260)
    assert_close(vocab_parallel_cross_entropy(shard, target, group=block.group), F.cross_entropy(logits, target))


def check_asked_once(ctx, tp, seed):
    """The ranks compare a width at its first call, and at each call under DETAIL; compiled code never does."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    logits, target, shard = draw(block, 23 * tp)

    def loss():
        return vocab_parallel_cross_entropy(shard, target, group=block.group)

    with patch.object(module, "by_rank", side_effect=module.by_rank) as asked:
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert_close(compiled(), F.cross_entropy(logits, target))
        assert asked.call_count == 0
        for _ in range(3):
            loss()
        assert asked.call_count == 1
        with debugging():
            loss()
        assert asked.call_count == 2
        for _ in range(3):
            vocab_parallel_cross_entropy(shard, target, vocab_size=23 * tp, group=block.group)
            vocab_parallel_argmax(shard, 23 * tp, block.group)
        assert asked.call_count == 3


def check_wrong_size(ctx, tp, seed):
    """Sizes that the last rank's shard alone does not fit, or that one rank gives, are refused on all of them."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    size = 19 * tp - 1
    logits, target, shard = draw(block, size)

    def loss(vocab_size):
        return vocab_parallel_cross_entropy(shard, target, vocab_size=vocab_size, group=block.group)

    def argmax(vocab_size):
        return vocab_parallel_argmax(shard, vocab_size, block.group)

    for call in (loss, argmax):
        for _ in range(2):  # a size that is refused is not remembered
            with refuses(ValueError, f"rank {tp - 1} of {tp} owns 19", size + 1, "18 wide"):
                call(size + 1)
            with refuses(ValueError, f"rank 0's {size}", f"rank {tp - 1}'s {size + tp}"):
                call(size + tp * (block.rank == tp - 1))
    assert_close(loss(size), F.cross_entropy(logits, target))
    assert torch.equal(argmax(size), logits.argmax(-1))


def check_alone(ctx):
    """Whoever waits for ranks that do not come, is told what for, or what it has done itself."""
    group = dist.new_group(timeout=timedelta(seconds=1))

    def loss(**options):
        target = torch.zeros(2, dtype=torch.int64)
        return vocab_parallel_cross_entropy(torch.ones(2, 3), target, vocab_size=3 * ctx.world, group=group, **options)

    if ctx.rank == 0:
        with pytest.raises(RuntimeError) as told:
            loss()
        (note,) = told.value.__notes__
        assert f"vocab_size {3 * ctx.world} of 3 entries" in note and "refused its arguments, or has died" in note
        with pytest.raises(ValueError, match="median"):
            loss(reduction="median")
    dist.barrier()


def check_refused_by_one(ctx, tp):
    """At the first call of a size, all ranks hear of other arguments that one of them is refused."""
    block = Block(ctx, tp, "group", 0)
    target = torch.zeros(6, dtype=torch.int64, device=block.device)
    last = dist.get_process_group_ranks(block.group)[-1]
    for vocab_size in (47 * tp, None):
        shard = block.randn(6, 53 if vocab_size is None else 47).requires_grad_()
        for error, told, bad in (
            (ValueError, (5,), {"target": target[:5]}),
            (TypeError, "float32", {"target": target.float()}),
            (TypeError, "list", {"target": [0] * 6}),
            (ValueError, "median", {"reduction": "median"}),
            (ValueError, "later", {"check": "later"}),
            (ValueError, "triton", {"backend": "triton"}),
            (ValueError, -0.5, {"z_loss": -0.5}),
            (ValueError, "leaf", {"overwrite_logits": True}),
            (TypeError, "overwrite_logits must be True or False", {"overwrite_logits": "no"}),
        ):
            whose = () if block.rank == tp - 1 else (f"rank {last} raised {error.__name__}",)
            with refuses(error, told, *whose):
                options = {"target": target} | (bad if block.rank == tp - 1 else {})
                vocab_parallel_cross_entropy(shard, **options, vocab_size=vocab_size, group=block.group)
        vocab_parallel_cross_entropy(shard, target, vocab_size=vocab_size, group=block.group)


def check_known_sizes(ctx, tp):
    """Sizes that differ, but are known to all, raise on all ranks where labels are checked at once."""
    block = Block(ctx, tp, "group", 0)
    target = torch.zeros(6, dtype=torch.int64, device=block.device)

    def loss(vocab_size, check):
        width = shard_size(vocab_size, tp, block.rank)
        return vocab_parallel_cross_entropy(
            block.randn(6, width), target, vocab_size=vocab_size, check=check, group=block.group
        )

    size = 59 * tp
    for check in ("async", "sync") if ctx.device.type == "cpu" else ("sync",):
        loss(size, check)
        loss(size - 1, check)
        for odd in (0, tp - 1):
            with refuses(ValueError, "labels", "different sizes", f"from {size - 1} to {size}"):
                loss(size - (block.rank == odd), check)


def check_forgotten_later(ctx, tp):
    """Where one rank's width is known by then, DETAIL tells."""
    block = Block(ctx, tp, "group", 0)
    for vocab_size in (29 * tp, 29 * tp - 1):
        _, target, shard = draw(block, vocab_size)
        with debugging():
            if vocab_size % tp:
                with refuses(ValueError, 29, 28):
                    vocab_parallel_cross_entropy(shard, target.zero_(), group=block.group)
            else:
                vocab_parallel_cross_entropy(shard, target.zero_(), group=block.group)


def check_groups_that_are_gone(ctx):
    group = dist.new_group()
    target = torch.zeros(2, dtype=torch.int64, device=ctx.device)
    vocab_parallel_cross_entropy(torch.ones(2, 31, device=ctx.device), target, group=group)
    assert (group, None, 31) in module._known
    dist.destroy_process_group(group)
    vocab_parallel_cross_entropy(torch.ones(2, 37, device=ctx.device), target)
    assert (group, None, 31) not in module._known and (dist.group.WORLD, None, 37) in module._known


def check_labels_of_one_rank(ctx, tp, bad):
    """Where it is told at once, every rank hears of it, and all can go on."""
    block = Block(ctx, tp, "group", 0)
    torch.manual_seed(block.seed)
    _, target, shard = draw(block, 13)
    other = target.clone()
    if block.rank == tp - 1:
        other[2] = bad
    for check in ("async", "sync") if ctx.device.type == "cpu" else ("sync",):
        with refuses(ValueError, "labels", bad, 13, f"{tp} ranks"):
            vocab_parallel_cross_entropy(shard, other, vocab_size=13, check=check, group=block.group)
        vocab_parallel_cross_entropy(shard, target, vocab_size=13, check=check, group=block.group)


def check_captured(ctx):
    """A capture compares nothing, and remembers nothing."""
    torch.manual_seed(0)
    _, target, shard = draw(Block(ctx, ctx.world, "group", 0), 43 * ctx.world)
    vocab_parallel_cross_entropy(shard, target, vocab_size=43 * ctx.world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = vocab_parallel_cross_entropy(shard, target)
    graph.replay()
    assert (dist.group.WORLD, None, 43) not in module._known
    assert_close(loss, vocab_parallel_cross_entropy(shard, target))


@several_ranks
def test_uneven_shards_without_the_vocabularys_size_are_refused(workers, tp, seed):
    workers.run(check_forgotten_size, tp, seed)


@several_ranks
def test_a_size_that_one_rank_refuses_is_told_to_all(workers, tp, seed):
    workers.run(check_wrong_size, tp, seed)


def test_a_rank_that_waits_alone_is_told_what_for(workers):
    if workers.world == 1 or workers.device != "cpu":
        pytest.skip("needs other ranks, and a process group whose time-out raises")
    workers.run(check_alone)


@several_ranks
def test_other_arguments_that_one_rank_refuses_are_told_to_all(workers, tp):
    workers.run(check_refused_by_one, tp)


@several_ranks
def test_known_sizes_that_differ_are_refused(workers, tp):
    workers.run(check_known_sizes, tp)


@several_ranks
def test_ranks_compare_a_width_once(workers, tp, seed):
    workers.run(check_asked_once, tp, seed)


@several_ranks
def test_debugging_compares_what_is_known(workers, tp):
    workers.run(check_forgotten_later, tp)


def test_destroyed_groups_are_forgotten(workers):
    if workers.world == 1:
        pytest.skip("one rank asks no one")
    workers.run(check_groups_that_are_gone)


@several_ranks
@pytest.mark.parametrize("bad", [13, -1, 2**63 - 1, -(2**63)])
def test_labels_that_one_rank_refuses_are_told_to_all(workers, tp, bad):
    workers.run(check_labels_of_one_rank, tp, bad)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_a_capture_asks_no_one(workers):
    if workers.world == 1:
        pytest.skip("one rank asks no one")
    workers.run(check_captured)
