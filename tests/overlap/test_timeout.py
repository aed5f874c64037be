"""A rank that never arrives: an error that names operation and rank, in time, and a GPU and a process that go on."""

import os
import re
import time
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed import WorkerFailure
from tests.overlap.cases import TOLERANCE, Captured, Case, assert_given_up
from tpfused.group import resolve_group
from tpfused.overlap import calls, communicator
from tpfused.overlap.tiers import tier

pytestmark = pytest.mark.gpu
on_gpus = pytest.mark.parametrize("workers", ["cuda"], indirect=True)
tiers = pytest.mark.parametrize("name", ["p2p", "nccl"])
ROWS, PART = "rank {}'s rows have not arrived", "rank {}'s part has not arrived"
BLOCK = "block 1 of rank {}'s rows has not arrived"  # as a graph does not tell
UNHEARD = "nothing has been heard of rank {}"  # which NCCL does not tell of
CASES = {  # and what p2p tells of the missing rank
    "copied rows": ("all_gather_matmul", 4096, 1024, 64, ROWS),
    "copied blocks": ("matmul_all_reduce", 8192, 64, 2304, BLOCK),
    "few rows": ("all_gather_matmul", 64, 128, 64, PART),
    "tiny sum": ("matmul_all_reduce", 2, 128, 64, PART),
    "small sum": ("matmul_all_reduce", 256, 128, 1024, PART),
}


def finish_together(group, heard_after=3.0):
    """All that is under way; from now on, what takes 1.5 s is given up, and so many seconds later others are heard."""
    torch.cuda.synchronize()
    dist.barrier(group)
    communicator.set_timeout(1.5)
    communicator.HEARD_AFTER = heard_after


def check_missing_rank(ctx, name, what, replayed):
    communicator.set_timeout(20)
    torch.manual_seed(0)
    *sizes, missing = CASES[what]
    group, case, last = dist.new_group(), Case(ctx, *sizes), ctx.world - 1
    told = f"{sizes[0]} on rank {ctx.rank} of {ctx.world} has not ended after \\d\\.\\d s"
    missing = UNHEARD if name == "nccl" else ROWS if replayed and missing == BLOCK else missing
    told += f"; {missing.format(last)}"
    with tier(name):
        case.run(group)
        if replayed:
            operate = partial(Captured([case], name, False, group).replay, case)
            operate()
        else:
            operate = partial(case.run, group)
        finish_together(group)
        if ctx.rank == last:
            time.sleep(6)  # as if it were busy with something else, or dead
        else:
            # A program that replays its graphs, and no more, has to ask.
            assert_given_up(told, operate, communicator.check_alive if replayed else partial(case.run, group))

        # The processes can go on, with a new group.
        dist.barrier()
        dist.destroy_process_group(group)
        communicator.set_timeout(20)
        group = dist.new_group()
        assert case.error(case.run(group, backward=True)).item() <= TOLERANCE
        dist.destroy_process_group(group)


def check_memory_freed_meanwhile(ctx, name):
    communicator.set_timeout(20)
    torch.manual_seed(0)
    group, case = dist.new_group(), Case(ctx, *CASES["copied rows"][:4])

    def operate():
        unused = torch.empty(2**26, dtype=torch.uint8, device=ctx.device)
        case.run(group)
        del unused
        torch.cuda.empty_cache()  # waits for the GPU, and most of CUDA's functions for it

    with tier(name):
        case.run(group)
        finish_together(group)
        if ctx.rank == ctx.world - 1:
            time.sleep(6)
        else:
            told = f"not ended after \\d\\.\\d s; ({UNHEARD}|{ROWS})".format(*2 * [ctx.world - 1])
            assert_given_up(told, operate, partial(case.run, group))
        dist.barrier()
        dist.destroy_process_group(group)


def check_group_destroyed_meanwhile(ctx, name):
    communicator.set_timeout(20)
    torch.manual_seed(0)
    group, case = dist.new_group(), Case(ctx, *CASES["copied rows"][:4])
    with tier(name):
        case.run(group)
        finish_together(group)
        if ctx.rank != ctx.world - 1:
            case.run(group)  # waits for the last rank, which never calls it
        dist.destroy_process_group(group)
        group = dist.new_group()
        assert case.error(case.run(group)).item() <= TOLERANCE
        dist.destroy_process_group(group)


def check_dead_rank(ctx, name):
    communicator.set_timeout(20)
    torch.manual_seed(0)
    case = Case(ctx, "all_gather_matmul", 64, 128, 64)
    with tier(name):
        case.run()
        finish_together(dist.group.WORLD, heard_after=1.0)  # the pool waits a few seconds for the others
        if ctx.rank == ctx.world - 1:
            torch.cuda._sleep(10**9)  # half a second, so that it dies in the middle
            case.run()
            os._exit(9)
        assert_given_up(f"all_gather_matmul on rank {ctx.rank} of {ctx.world}", case.run, case.run)


def check_broken_off(ctx, name):
    """An operation that fails while it is enqueued: its peers count on the rest of it."""
    communicator.set_timeout(20)
    torch.manual_seed(0)
    group, case = dist.new_group(), Case(ctx, *CASES["copied rows"][:4])
    told = "all_gather_matmul was broken off: the workspace is too small"
    with tier(name):
        with patch.dict(calls.WORKSPACE, dict.fromkeys(calls.WORKSPACE, 0)), pytest.raises(RuntimeError, match=told):
            case.run(group)
        with pytest.raises(RuntimeError, match=told):
            case.run(group)
        dist.destroy_process_group(group)
        group = dist.new_group()
        assert case.error(case.run(group)).item() <= TOLERANCE
        dist.destroy_process_group(group)


def check_broken_off_halfway(ctx):
    """Rows are on their way from and to memory that the caller frees: its stream waits for them."""
    communicator.set_timeout(20)
    torch.manual_seed(0)
    group, case, last = dist.new_group(), Case(ctx, *CASES["copied rows"][:4]), ctx.world - 1
    no_matrix = [(case.inputs[1], (case.inputs[1].data_ptr(), 1, False))]  # rows that would overlap
    with tier("nccl"):
        case.run(group)
        torch.cuda.synchronize()
        dist.barrier()
        if ctx.rank == last:
            time.sleep(2)
        with (
            patch.object(calls, "_matrix", side_effect=no_matrix),
            pytest.raises(RuntimeError, match="all_gather_matmul was broken off: cublas"),
        ):
            case.run(group)
        assert ctx.rank == last or not torch.cuda.current_stream().query()
        torch.cuda.current_stream().synchronize()
    dist.barrier()
    dist.destroy_process_group(group)


def check_a_rank_without_nccl(ctx):
    """NCCL itself would wait for it for ever."""
    communicator.set_timeout(3)
    torch.manual_seed(0)
    group, case, last = dist.new_group(), Case(ctx, *CASES["copied rows"][:4]), ctx.world - 1
    with tier("first"):
        case.run(group)
    made = communicator.communicator_of(resolve_group(group), ctx.device)
    told = f"rank {last} could not make an NCCL communicator: no NCCL"
    if ctx.rank != last:
        told = f"rank {ctx.rank} could not make an NCCL communicator: NCCL has waited for other ranks for 3.0 s.*{told}"
    broken = Mock(wraps=made.module, group_connect_nccl=Mock(side_effect=OSError("no NCCL")))
    with tier("nccl"):
        with patch.object(made, "module", broken if ctx.rank == last else made.module):
            with pytest.raises(RuntimeError, match=told):
                case.run(group)
        assert case.error(case.run(group)).item() <= TOLERANCE
    dist.destroy_process_group(group)


@on_gpus
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name, what", [("nccl", "copied rows"), *(("p2p", what) for what in CASES)])
def test_a_missing_rank_is_named(ranks, name, what, replayed):
    ranks.run(check_missing_rank, name, what, replayed, timeout=60)


@on_gpus
@tiers
def test_a_dead_rank_leaves_no_other_waiting(ranks, name):
    died = f"rank {ranks.world - 1} of {ranks.world} died with exit code 9"
    with pytest.raises(WorkerFailure, match=died) as failure:
        ranks.run(check_dead_rank, name, timeout=60)
    # The others got their error, and answered, within the few seconds that the pool then gives them.
    assert not re.search(r"ranks? [\d, ]+ of \d+ (raised|had not)", str(failure.value)), failure.value


@on_gpus
@tiers
def test_an_operation_that_breaks_off_ends_its_group(ranks, name):
    ranks.run(check_broken_off, name, timeout=60)


@on_gpus
def test_what_an_operation_that_breaks_off_has_begun_is_waited_for(ranks):
    ranks.run(check_broken_off_halfway, timeout=60)


@on_gpus
def test_a_rank_that_can_not_join_nccl_is_named(ranks):
    ranks.run(check_a_rank_without_nccl, timeout=60)


@on_gpus
@tiers
def test_memory_is_freed_while_an_operation_waits(ranks, name):
    ranks.run(check_memory_freed_meanwhile, name, timeout=30)


@on_gpus
@tiers
def test_a_group_is_destroyed_while_an_operation_waits(ranks, name):
    ranks.run(check_group_destroyed_meanwhile, name, timeout=30)
