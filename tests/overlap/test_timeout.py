"""A rank that never arrives: an error that names it, in time, and a GPU that goes on."""

import time

import pytest
import torch

from tests.conftest import gpu_world
from tests.distributed import Workers
from tpfused.overlap import communicator
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.tiers import tier


def check_missing_rank(ctx, name):
    x, weight = torch.randn(64, 128, device="cuda"), torch.randn(32, 128, device="cuda")
    communicator.set_timeout(1.5)
    with tier(name):
        all_gather_matmul(x, weight)
        torch.cuda.synchronize()
        if ctx.rank == ctx.world - 1:
            time.sleep(8)  # as if it were busy with something else, or dead
            return
        start = time.monotonic()
        all_gather_matmul(x, weight)
        torch.cuda.synchronize()
        assert time.monotonic() - start < 6
        missing = f"rank {ctx.world - 1}'s rows have not arrived" if name == "p2p" else ""
        with pytest.raises(RuntimeError, match=f"all_gather_matmul on rank {ctx.rank}.*{missing}"):
            for _ in range(20):  # the watchdog may need a moment to say so
                time.sleep(0.1)
                all_gather_matmul(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["p2p", "nccl"])
def test_a_missing_rank_is_named(name):
    if gpu_world() < 2:
        pytest.skip("needs two GPUs")
    with Workers("cuda", gpu_world()) as workers:
        workers.run(check_missing_rank, name, timeout=60)
