"""What the ranks of a loss agree on: how wide their shards are without `vocab_size`, and which labels there are."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compare import Block, assert_close, refuses
from tests.overlap.test_agreement import debugging
from tpfused import vocab_parallel_cross_entropy
from tpfused.layers import loss as module
from tpfused.sharding import shard_sizes

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
            with refuses(ValueError, "vocab_size=", vocab_size, *set(shard_sizes(vocab_size, tp))):
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
        vocab_parallel_cross_entropy(shard, target, vocab_size=23 * tp, group=block.group)
        assert asked.call_count == 2


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
    assert (group, 31) in module._equal_widths
    dist.destroy_process_group(group)
    vocab_parallel_cross_entropy(torch.ones(2, 37, device=ctx.device), target)
    assert (group, 31) not in module._equal_widths and (dist.group.WORLD, 37) in module._equal_widths


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
    assert (dist.group.WORLD, 43) not in module._equal_widths
    assert_close(loss, vocab_parallel_cross_entropy(shard, target))


@several_ranks
def test_uneven_shards_without_the_vocabularys_size_are_refused(workers, tp, seed):
    workers.run(check_forgotten_size, tp, seed)


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
