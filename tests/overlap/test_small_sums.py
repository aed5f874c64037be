"""Sums of few numbers through peers' memory, in place of torch's all-reduce."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.compare import Block, assert_within_rule
from tests.overlap.cases import check_in_turn, poisoned
from tests.overlap.test_operations import forced
from tpfused.collectives import all_reduce
from tpfused.group import resolve_group
from tpfused.layers.norm import Norm
from tpfused.overlap import calls
from tpfused.overlap.choice import peers_of, tiers_of
from tpfused.overlap.tiers import deterministic, tier

MOST = calls.MOST_REDUCED


def counted(patch):
    """The list of the sums that are made through peers' memory from now on."""
    made, call = [], calls.all_reduce
    patch.setattr(calls, "all_reduce", lambda *args: (made.append(args), call(*args))[1])
    return made


def given(block, n, dtype):
    """Each rank's numbers, the same on all of them, and this one's."""
    torch.manual_seed(block.seed + n)
    whole = block.randn(block.tp, n, dtype=dtype)
    return whole, whole[block.rank].clone()


@contextmanager
def without_memory(group, x):
    """After the ranks failed to get more memory that peers write; a stand-in only says so."""
    communicator = peers_of(group, x)
    with pytest.MonkeyPatch.context() as patch:
        if x.is_cuda:
            patch.setattr(
                communicator, "module", SimpleNamespace(**(vars(communicator.module) | {"group_allocate": None}))
            )
            with pytest.warns(UserWarning, match="no memory that peers can write"), pytest.raises(RuntimeError):
                communicator.reserve(communicator._slot_bytes + 1, "a test")
        else:
            patch.setattr(communicator, "has_peers", False)
        yield
    if x.is_cuda:
        communicator.reserve(1, "a test")


def check_sums(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    with pytest.MonkeyPatch.context() as patch, forced(ctx, tp, "first"):
        made = counted(patch)
        if ctx.device.type == "cpu":  # else an earlier test's group may have memory for it already
            all_reduce(given(block, 8, torch.float32)[1], group)
            assert not made
        tiers_of(group, ctx.device)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            size = dtype.itemsize
            for n, fits in ((16 // size, 1), (4096, 1), (MOST // size, 1), (MOST // size + 16 // size, 0), (3, 0)):
                fits = fits and dtype != torch.float64
                whole, mine = given(block, n, dtype)
                exact, eager = whole.double().sum(0), whole.sum(0)
                odd = torch.empty(n + 1, dtype=dtype, device=ctx.device)[1:].copy_(mine)
                apart = torch.stack((mine, mine), -1)[:, 0]
                for name, x in {"": mine, "not aligned": odd, "not contiguous": apart, "view": mine.view(1, n)}.items():
                    made.clear()
                    with poisoned():
                        y = all_reduce(x, group)
                    where = f"{n} numbers of {dtype} {name}"
                    assert len(made) == fits and y.shape == x.shape and y.data_ptr() != x.data_ptr(), where
                    assert_within_rule(y.view(-1), exact, eager, lambda x: x, where)
                    assert torch.equal(x.view(-1) if name == "view" else x, mine), where


def check_tiers(ctx, tp, seed):
    """Some leave all to torch's collective, as what is no sum is left to it."""
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    whole, mine = given(block, 64, torch.float32)
    with pytest.MonkeyPatch.context() as patch, forced(ctx, tp, "first"):
        tiers_of(group, ctx.device)
        made = counted(patch)
        others = [tier(name) for name in ("nccl", "sequential", "reference")]
        for otherwise in (*others, deterministic(), without_memory(group, mine)):
            with otherwise:
                torch.testing.assert_close(all_reduce(mine, group), whole.sum(0))
        with pytest.MonkeyPatch.context() as detail:
            detail.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
            torch.testing.assert_close(all_reduce(mine, group), whole.sum(0))
        assert torch.equal(all_reduce(mine, group, dist.ReduceOp.MAX), whole.amax(0))
        assert not made
        for name in ("p2p", "measured"):
            with tier(name):
                torch.testing.assert_close(all_reduce(mine, group), whole.sum(0))
        assert len(made) == 2


def check_norms(ctx, tp, seed):
    """What a norm's weights get: a sum each."""
    block = Block(ctx, tp, "group", seed)
    with pytest.MonkeyPatch.context() as patch, forced(ctx, tp, "first"):
        tiers_of(resolve_group(block.group), ctx.device)
        made = counted(patch)
        torch.manual_seed(block.seed)
        norm = Norm("layernorm", 64, sequence_parallel=True, device=ctx.device, **block.place)
        x, grad = (block.randn(4 * tp, 64, dtype=torch.float32) for _ in range(2))
        norm(block.own(x, 0)).backward(block.own(grad, 0))
        assert len(made) == 2
        torch.testing.assert_close(norm.bias.grad, grad.sum(0))


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
@pytest.mark.parametrize("check", [check_sums, check_tiers, check_norms])
def test_small_sums(workers, tp, seed, check):
    workers.run(check, tp, seed)


def check_replays(ctx, steps, seed):
    """In graphs and eager, in turn, with ranks that are late."""
    rng, block = random.Random(seed), Block(ctx, ctx.world, "group", seed)
    group = resolve_group(block.group)
    with poisoned(), torch.no_grad(), tier("p2p"):
        tiers_of(group, ctx.device)
        runs = []
        for n in (8, 4096, MOST // 2):
            whole, mine = given(block, n, torch.bfloat16)
            runs.append((lambda mine=mine: [all_reduce(mine, group)], [whole.sum(0)]))
        check_in_turn(ctx, rng, runs, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_replays(ranks, seed):
    ranks.run(check_replays, ranks.times(500), seed)
