"""The deterministic mode: the same bits from every tier, at every run, and in a CUDA graph."""

import pytest
import torch

from tests.conftest import gpu_world
from tests.distributed import Workers
from tests.overlap.cases import DTYPES, OPERATIONS, Case
from tpfused.overlap.tiers import deterministic, tier

# Tokens, features in and out. Other modes exchange blocks of the first's rows, and multiply the last ones' together.
SIZES = [(8200, 256, 8200), (4096, 1024, 2048), (2000, 264, 520), (16, 1024, 512), (3, 64, 8), (1, 64, 8)]
OUTPUTS = "result", "dx", "dweight", "dbias"


def check_same_bits(ctx, dtype, tf32, seed):
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    for tokens, k, n in SIZES:
        for name in OPERATIONS:
            case, runs = Case(ctx, name, tokens, k, n, dtype=dtype), {}
            with deterministic():
                for run, by in enumerate(("p2p", "nccl", "p2p")):
                    with tier(by):
                        runs[f"{by}, run {run}"] = case.run(backward=True)
                with tier("p2p"):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = case.run()
                graph.replay()
            runs["a replay"] = out
            first = runs["p2p, run 0"]
            for run, results in runs.items():
                for mine, expected, what in zip(results, first, OUTPUTS, strict=False):
                    assert torch.equal(mine, expected), f"{case.name}: {what} of {run}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tf32", [*((dtype, False) for dtype in DTYPES), (torch.float32, True)])
def test_every_run_and_tier_gives_the_same_bits(dtype, tf32, seed):
    if gpu_world() < 2:
        pytest.skip("needs two GPUs")
    with Workers("cuda", gpu_world()) as workers:
        workers.run(check_same_bits, dtype, tf32, seed)
