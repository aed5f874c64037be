"""The worker pool itself: results, failures and recovery."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import WorkerFailure, Workers


@pytest.fixture(scope="module")
def pool():
    with Workers("cpu", 2, timeout=4.0) as pool:
        yield pool


def check_sum(ctx, number):
    total = torch.tensor(float(ctx.rank + number))
    dist.all_reduce(total)
    return total


def check_pid(ctx):
    return ctx.rank, os.getpid()


def check_raise_on_one(ctx):
    if ctx.rank == 1:
        raise KeyError("no such thing")
    dist.barrier()


def check_die(ctx):
    if ctx.rank == 1:
        os._exit(7)


def check_hang(ctx):
    if ctx.rank == 1:
        time.sleep(600)


def check_grid(ctx, size):
    block = dist.get_process_group_ranks(ctx.group(size))
    assert ctx.mesh(size).mesh.tolist() == block and ctx.mesh(size).mesh_dim_names == ("tp",)
    assert ctx.grid(size) is ctx.grid(size)
    assert torch.get_num_threads() == 1
    return block


def test_results_come_in_rank_order_from_the_same_processes(pool):
    assert [r.item() for r in pool.run(check_sum, number=3)] == [7.0, 7.0]
    assert pool.run(check_pid) == pool.run(check_pid)


def test_blocks_of_consecutive_ranks(workers, tp):
    expected = [list(range(rank - rank % tp, rank - rank % tp + tp)) for rank in range(workers.world)]
    assert workers.run(check_grid, tp) == expected


@pytest.mark.parametrize(
    "check, told",
    [
        (check_raise_on_one, r"rank 1 of 2 raised(.|\n)*no such thing"),
        (check_die, r"rank 1 of 2 died with exit code 7"),
        (check_hang, r"rank 1 of 2 had not answered after 4 s(.|\n)*in check_hang"),
    ],
)
def test_failures_name_rank_and_reason_and_the_next_call_works(pool, check, told):
    with pytest.raises(WorkerFailure, match=told):
        pool.run(check)
    assert [r.item() for r in pool.run(check_sum, 0)] == [1.0, 1.0]


def test_close_leaves_no_process():
    pool = Workers("cpu", 2)
    pids = [pid for _, pid in pool.run(check_pid)]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
