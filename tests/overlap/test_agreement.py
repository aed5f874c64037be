"""With TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks that are about to do different things are told so, not left waiting."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.compare import refuses
from tests.overlap.cases import OPERATIONS, Case, tiers_of
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul, matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import deterministic, tier
from tpfused.sharding import shard_size


@contextmanager
def debugging():
    """As TORCH_DISTRIBUTED_DEBUG=DETAIL, but for torch's own checks, which begin with a process group."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def check_disagreements(ctx):
    last = ctx.rank == ctx.world - 1

    def ones(*shape, dtype=torch.float32):
        return torch.ones(shape, device=ctx.device, dtype=dtype)

    def own(total):
        return shard_size(total, ctx.world, ctx.rank)

    tokens, features = 8 - last, 6 + last  # here the last rank thinks otherwise
    half = torch.float16 if last else torch.float32
    with debugging():
        with refuses(ValueError, "matmul_reduce_scatter", 8, 7, f"rank {ctx.world - 1}"):
            matmul_reduce_scatter(ones(tokens, 3), ones(6, 3))
        with refuses(ValueError, "matmul_reduce_scatter", 6, 7):
            matmul_reduce_scatter(ones(8, 3), ones(features, 3))
        with refuses(ValueError, "matmul_all_reduce", 8, 7):
            matmul_all_reduce(ones(tokens, 3), ones(6, 3))
        with refuses(ValueError, "all_gather_matmul", 8, 7):
            all_gather_matmul(ones(own(tokens), 3), ones(5, 3), total_len=tokens)
        with refuses(ValueError, "all_gather_matmul", 6, 7):
            all_gather_matmul(ones(own(8), features), ones(5, features), total_len=8)
        with refuses(ValueError, "matmul_reduce_scatter", "64 rows (1 x 8 tokens of 8)", "(8 x 8 tokens of 1)"):
            matmul_reduce_scatter(ones(8, 8, 3), ones(6, 3), sequence_dim=int(last))
        with refuses(ValueError, "all_gather_matmul", "(1 x 8 tokens of 2)", "(2 x 8 tokens of 1)"):
            shape = (2, own(8)) if last else (own(8), 2)
            all_gather_matmul(ones(*shape, 3), ones(5, 3), total_len=8, sequence_dim=int(last))
        with refuses(ValueError, "matmul_all_gather", 6, 7):
            matmul_all_gather(ones(8, 3), ones(own(features), 3), out_features=features)
        with refuses(ValueError, "column_matmul", 8, 7):  # whose backward pass would wait
            column_matmul(ones(tokens, 3), ones(5, 3))
        with refuses(ValueError, "matmul_all_reduce", "float32", "float16"):
            matmul_all_reduce(ones(8, 3, dtype=half), ones(6, 3, dtype=half))
        with refuses(ValueError, "matmul_all_reduce", "column_matmul"):
            (column_matmul if last else matmul_all_reduce)(ones(8, 3), ones(6, 3))
        with refuses(ValueError, "p2p", "nccl"), tier("nccl" if last else "p2p"):
            matmul_all_reduce(ones(8, 3), ones(6, 3))
        with refuses(ValueError, "deterministic"), deterministic() if last else nullcontext():
            matmul_all_reduce(ones(8, 3), ones(6, 3))


def check_agreements(ctx, seed):
    """Different shares of tokens and features are no disagreement, and nobody is asked unless debugging is on."""
    torch.manual_seed(seed)
    cases = [Case(ctx, operation, *size) for operation in OPERATIONS for size in ((7, 5, 9), (1, 4, 3), (8, 1, 1))]

    def run_all():
        for case in cases:
            for name in tiers_of(ctx):
                with tier(name):
                    case.run(backward=True)

    with debugging():
        run_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "all_gather_object")
        run_all()


def test_disagreeing_ranks_are_told(ranks):
    ranks.run(check_disagreements, timeout=60)


def test_agreeing_ranks_are_not(ranks, seed):
    ranks.run(check_agreements, seed, timeout=60)
