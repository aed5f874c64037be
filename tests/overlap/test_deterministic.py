"""The deterministic mode: the same bits from every tier, at every run, and in a CUDA graph."""

from functools import partial

import pytest
import torch

from tests.overlap.cases import DTYPES, OPERATIONS, Captured, Case
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import deterministic, tier
from tpfused.sharding import shard_size

pytestmark = pytest.mark.gpu
on_gpus = pytest.mark.parametrize("workers", ["cuda"], indirect=True)
# Tokens, features in and out. Other modes exchange blocks of the first's rows, and multiply the last ones' together.
SIZES = [(8200, 256, 8200), (4096, 1024, 2048), (2000, 264, 520), (16, 1024, 512), (3, 64, 8), (1, 64, 8)]
OUTPUTS = "result", "dx", "dweight", "dbias"


def check_same_bits(ctx, dtype, tf32, seed):
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    for tokens, k, n in SIZES:
        for name in OPERATIONS:
            case, runs, captured = Case(ctx, name, tokens, k, n, dtype=dtype), {}, []
            with deterministic():
                for run, by in enumerate(("p2p", "nccl", "p2p")):
                    with tier(by):
                        runs[f"{by}, run {run}"] = case.run(backward=True)
                for by, backward in (("p2p", False), ("p2p", True), ("nccl", True)):
                    captured.append(Captured([case], by, backward))
                    runs[f"{by}, a replay, {backward=}"] = captured[-1].replay(case)
            first = runs["p2p, run 0"]
            for run, results in runs.items():
                for mine, expected, what in zip(results, first, OUTPUTS, strict=False):
                    assert torch.equal(mine, expected), f"{case.name}: {what} of {run}"


def check_same_bits_of_options(ctx, seed):
    """Batch-first rows that ranks do not share alike, several weights, of columns too, and all else that may come."""
    torch.manual_seed(seed)
    make = partial(torch.randn, device=ctx.device, dtype=torch.bfloat16, requires_grad=True)
    tokens, k, n = 64 * ctx.world + 1, 128, 264
    own = shard_size(tokens, ctx.world, ctx.rank)
    x, h, residual = make(2, own, k), make(2, tokens, k), make(2, own, n)
    weight, stored, bias, sums = make(n, k), make(k, n), make(n), torch.zeros(n, k, device=ctx.device)
    of_tokens = {"sequence_dim": 1, "total_len": tokens}
    calls = {
        "several weights": (lambda: all_gather_matmul(x, (weight, stored.t()), **of_tokens), (x, weight, stored)),
        "what was gathered": (
            lambda: all_gather_matmul(x, weight, bias, "gelu_tanh", save_gathered=True, **of_tokens),
            (x, weight, bias),
        ),
        "main_grad": (lambda: all_gather_matmul(x, weight, main_grad=sums, **of_tokens), (x,)),
        "residual": (
            lambda: matmul_reduce_scatter(h, stored.t(), bias, sequence_dim=1, residual=residual),
            (h, stored, bias, residual),
        ),
        "columns": (lambda: matmul_all_reduce(h, stored.t(), bias), (h, stored, bias)),
    }
    for name, (call, inputs) in calls.items():
        runs = []
        for by in ("p2p", "nccl", "p2p"):
            sums.zero_()
            with deterministic(), tier(by):
                out = call()
                outs = out if isinstance(out, tuple) else (out,)
                grads = torch.autograd.grad(outs, inputs, [y.detach() for y in outs])
            runs.append([*outs, *grads, sums.clone()])
        for run in runs[1:]:
            for index, (mine, expected) in enumerate(zip(run, runs[0], strict=True)):
                assert torch.equal(mine, expected), f"{name}: tensor {index}"


@on_gpus
@pytest.mark.parametrize("dtype, tf32", [*((dtype, False) for dtype in DTYPES), (torch.float32, True)])
def test_every_run_and_tier_gives_the_same_bits(ranks, dtype, tf32, seed):
    ranks.run(check_same_bits, dtype, tf32, seed)


@on_gpus
def test_options_give_the_same_bits(ranks, seed):
    ranks.run(check_same_bits_of_options, seed)
