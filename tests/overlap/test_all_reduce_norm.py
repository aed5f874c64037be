"""`matmul_all_reduce_norm`: residual, sum over the ranks and norm in one kernel, beside the three operations."""

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block, assert_close, assert_within_rule, refuses
from tests.overlap.cases import check_in_turn, poisoned
from tests.overlap.test_operations import forced, poison
from tpfused import reference
from tpfused.overlap import calls
from tpfused.overlap.matmul_all_reduce import MOST_TOKENS, matmul_all_reduce, matmul_all_reduce_norm
from tpfused.overlap.plans import NormOperands
from tpfused.overlap.tiers import tier

EPS = 1e-5
KINDS = "rmsnorm", "layernorm"
# Leading dimensions, in and out features. The last rows are the longest that the kernel takes, and longer.
SIZES = [((1,), 8, 16), ((1, 2), 6, 8), ((MOST_TOKENS,), 64, 136), ((MOST_TOKENS + 1,), 8, 16), ((3, 2), 8, 20)]
LARGE = [((1, 1), 2048, 4096), ((64,), 264, 5120), ((8,), 64, 8192), ((4,), 64, 16384), ((2,), 64, 16392)]
# Rows, a rank's in features and out features.
FEW_ROWS = [(1, 8, 8), (2, 1032, 4104), (2, 264, 72), (1, 2312, 24), (3, 64, 16), (1, 24576, 4096), (2, 7168, 8192)]


class Data:
    """This rank's operands of all ranks' random ones, and the results in float64 and in eager PyTorch."""

    def __init__(self, block, leading, k, n, dtype, with_bias):
        self.block, self.n = block, n
        self.whole = {
            "x": block.randn(*leading, k, dtype=dtype),
            "weight": block.randn(n, k, dtype=dtype) * k**-0.5,
            "bias": block.randn(n, dtype=dtype) if with_bias else None,
            "residual": block.randn(*leading, n, dtype=dtype),
            "scale": block.randn(n, dtype=dtype),
            "shift": block.randn(n, dtype=dtype),
        }

    def dense(self, kind, dtype):
        whole = {name: None if x is None else x.to(dtype) for name, x in self.whole.items()}
        total = whole["residual"] + F.linear(whole["x"], whole["weight"], whole["bias"])
        shift = whole["shift"] if kind == "layernorm" else None
        return total, reference.normalize(total, kind, whole["scale"], shift, EPS)

    def run(self, kind):
        whole, block = self.whole, self.block
        norm = NormOperands(kind, whole["scale"], whole["shift"] if kind == "layernorm" else None, EPS)
        x, weight = block.own(whole["x"], -1).contiguous(), block.own(whole["weight"], 1)
        return matmul_all_reduce_norm(x, weight, whole["bias"], whole["residual"], norm, **block.place)


def check(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    on_gpu, fused = ctx.device.type == "cuda", []
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if on_gpu else (torch.float32, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        call = calls.matmul_all_reduce_norm
        patch.setattr(calls, "matmul_all_reduce_norm", lambda *args: (fused.append(args), call(*args))[1])
        for (leading, k, n), dtype, kind in product(SIZES + LARGE * on_gpu, dtypes, KINDS):
            data = Data(block, leading, k, n, dtype, with_bias=kind == "layernorm")
            expected, eager = data.dense(kind, torch.float64), data.dense(kind, dtype)
            for name in ("p2p", "nccl", "reference"):
                fused.clear()
                poison(ctx, eager[0])
                with forced(ctx, tp, name), torch.no_grad():
                    actual = data.run(kind)
                where = f"{name} {dtype} {kind} {leading, k, n}"
                for index, what in enumerate(("sum", "norm")):
                    if dtype == torch.float64:
                        assert_close(actual[index], expected[index], f"{what} of {where}")
                    else:
                        one = expected[index], eager[index], lambda whole: whole, f"{what} of {where}"
                        assert_within_rule(actual[index], *one, chain=True)
                fits = torch.Size(leading).numel() <= MOST_TOKENS and n * dtype.itemsize <= 32768
                fits &= n * dtype.itemsize % 16 == 0 and dtype != torch.float64
                assert len(fused) == (name == "p2p" and tp > 1 and fits), where


def check_layouts(ctx, tp, seed):
    """Operands that begin in the middle of 16 bytes, or are not contiguous."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    data = Data(block, (2, 3), 8, 16, torch.float32, True)
    with forced(ctx, tp, "p2p"), torch.no_grad():
        expected = data.run("layernorm")
        for name in ("residual", "scale", "shift", "bias"):
            value = data.whole[name]
            odd = torch.empty(value.numel() + 1, device=ctx.device)[1:].view(value.shape).copy_(value)
            apart = torch.stack((value, value), -1)[..., 0]
            for other in (odd, apart):
                data.whole[name] = other
                for mine, theirs in zip(data.run("layernorm"), expected, strict=True):
                    assert torch.equal(mine, theirs), name
            data.whole[name] = value


def check_gradients(ctx, tp, seed):
    """With them it is the three operations."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    data = Data(block, (2, 3), 8, 16, torch.float32, True)
    leaves = [data.whole[name].requires_grad_() for name in ("residual", "scale", "shift", "bias")]
    found = []
    for name in ("reference", "p2p"):
        with forced(ctx, tp, name):
            total, y = data.run("layernorm")
            found.append(torch.autograd.grad(total.square().sum() + y.square().sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def check_refusals(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    data = Data(block, (2, 3), 8, 16, torch.float32, False)
    right = data.whole["residual"]
    for residual, told in ((right[:1], (1, 3, 16)), (right[..., :8], (2, 3, 8)), (right.to("meta"), "meta")):
        data.whole["residual"] = residual
        with refuses(ValueError, "residual", told, (2, 3, 16)):
            data.run("rmsnorm")
    data.whole["residual"], right = right, data.whole["scale"]
    for scale, told in ((right[:8], (8,)), (right[:1], (1,)), (right.to("meta"), "meta")):
        data.whole["scale"] = scale
        with refuses(ValueError, "norm's weight", told):
            data.run("rmsnorm")
    data.whole["scale"] = right.double()
    with refuses(TypeError, "norm's weight", "float64", "float32"):
        data.run("layernorm")
    data.whole["scale"] = right
    with refuses(ValueError, "layernorm, rmsnorm", "'batchnorm'"):
        data.run("batchnorm")
    x, weight = block.own(data.whole["x"], -1).contiguous(), block.own(data.whole["weight"], 1)
    for error, norm, *told in (
        (TypeError, None, "NormOperands", "NoneType"),
        (TypeError, NormOperands("layernorm", None, right, EPS), "norm's weight", "NoneType"),
        (TypeError, NormOperands("rmsnorm", right, None, "1"), "eps", "'1'"),
        (ValueError, NormOperands("rmsnorm", right, right, EPS), "RMSNorm has no bias"),
    ):
        with refuses(error, *told):
            matmul_all_reduce_norm(x, weight, None, data.whole["residual"], norm, **block.place)
    with refuses(TypeError, "residual", "NoneType"):
        matmul_all_reduce_norm(x, weight, None, None, NormOperands("rmsnorm", right, None, EPS), **block.place)


def check_replays(ctx, steps, seed):
    """In turn with the sums alone, which use the same memory, replayed and eager, with ranks that are late."""
    torch.manual_seed(seed)
    rng, block = random.Random(seed), Block(ctx, ctx.world, "group", seed)
    with poisoned(), torch.no_grad(), tier("p2p"):
        runs = []
        for leading, k, n in (((1, 1), 64, 4096), ((5,), 64, 512), ((64,), 128, 1024)):
            data = Data(block, leading, k, n, torch.bfloat16, False)
            x, weight = block.own(data.whole["x"], -1).contiguous(), block.own(data.whole["weight"], 1)

            def alone(x=x, weight=weight):
                return (matmul_all_reduce(x, weight, **block.place),)

            def joined(data=data):
                return data.run("rmsnorm")

            for run in (alone, joined):
                with tier("reference"):
                    expected = [y.clone() for y in run()]
                runs.append((run, expected))
        check_in_turn(ctx, rng, runs, steps)


@torch.no_grad()
def check_few_rows(ctx, seed):
    """Whose matmul pushes what it multiplies, unless a rank's operands are not aligned: the others wait for neither."""
    block = Block(ctx, ctx.world, "group", seed)
    torch.manual_seed(seed)
    last = ctx.rank == ctx.world - 1
    for dtype, (m, k, n), with_norm in product((torch.float16, torch.bfloat16), FEW_ROWS, (False, True)):
        data = Data(block, (m,), k * ctx.world, n, dtype, with_bias=m % 2 == 0)
        expected, eager = data.dense("rmsnorm", torch.float64), data.dense("rmsnorm", dtype)
        if not with_norm:
            x, weight = data.whole["x"], data.whole["weight"]
            expected, eager = ([F.linear(x.to(to), weight.to(to))] for to in (torch.float64, dtype))
        for odd in (False, last, True):
            x, weight = (block.own(data.whole[name], -1).contiguous() for name in ("x", "weight"))
            if odd:
                x = torch.empty(x.numel() + 1, device=ctx.device, dtype=dtype)[1:].view(x.shape).copy_(x)
            norm = NormOperands("rmsnorm", data.whole["scale"], None, EPS)
            poison(ctx, eager[0])
            with tier("p2p"):
                if with_norm:
                    actual = matmul_all_reduce_norm(
                        x, weight, data.whole["bias"], data.whole["residual"], norm, **block.place
                    )
                else:
                    actual = (matmul_all_reduce(x, weight, **block.place),)
            for one in zip(actual, expected, eager, strict=True):
                assert_within_rule(*one, lambda whole: whole, f"{dtype} {m, k, n} {with_norm} {odd}", chain=True)


def test_equals_the_three_operations(workers, tp, seed):
    workers.run(check, tp, seed)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_layouts(workers, tp, seed):
    workers.run(check_layouts, tp, seed)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_gradients(workers, tp, seed):
    workers.run(check_gradients, tp, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_few_rows(ranks, seed):
    ranks.run(check_few_rows, seed)


def test_bad_input_is_refused_before_any_collective(workers, tp):
    workers.run(check_refusals, tp)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_replays_and_late_ranks(ranks, seed):
    ranks.run(check_replays, ranks.times(2000), seed, timeout=60)
