"""Overlapped operations in CUDA graphs: thousands of replays with new inputs, beside eager calls and other graphs."""

import random
from itertools import cycle

import pytest
import torch
import torch.distributed as dist

from tests.overlap.cases import (
    ACTIVATIONS,
    DTYPES,
    OPERATIONS,
    TOLERANCE,
    Captured,
    Case,
    Errors,
    largest,
    largest_error,
    make_graphed,
    perhaps_late,
    poisoned,
)
from tests.overlap.test_agreement import debugging
from tpfused.overlap import communicator
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier

pytestmark = pytest.mark.gpu
on_gpus = pytest.mark.parametrize("workers", ["cuda"], indirect=True)
tiers = pytest.mark.parametrize("name", ["p2p", "nccl"])

TIERS = "p2p", "nccl"
INPUTS = 5  # of each graph: no multiple or divisor of the three slots that operations use in turn
# Tokens, in and out features. Of the first, one rank has all; the last, of several blocks, needs more memory for the
# peers than there was when the others were captured.
SIZES = [(1, 64, 3), (301, 264, 520), (8200, 2304, 4608)]


def check_replays(ctx, names, operations, sizes, replays, seed):
    """Graphs of all `names` (tiers), `operations` and `sizes`, in random order, and eager calls in between."""
    communicator.set_timeout(20)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    with poisoned():
        graphs, dtypes = [], cycle(rng.sample(DTYPES, len(DTYPES)))
        for size in sizes:
            for operation in operations:
                activation, dtype = rng.choice(ACTIVATIONS), next(dtypes)
                cases = [Case(ctx, operation, *size, activation, dtype) for _ in range(INPUTS)]
                graphs += [Captured(cases, name, backward) for name in names for backward in (False, True)]
        replayed, eager = (Errors(ctx, [graph.name for graph in graphs]) for _ in range(2))
        for step in range(1, replays + 1):
            index = rng.randrange(len(graphs))
            case = rng.choice(graphs[index].cases)
            perhaps_late(ctx, rng)
            replayed.add(index, case.error(graphs[index].replay(case)))
            if rng.random() < 0.1:
                index, name, backward = rng.randrange(len(graphs)), rng.choice(TIERS), rng.random() < 0.5
                case = rng.choice(graphs[index].cases)
                perhaps_late(ctx, rng)
                with tier(name):
                    eager.add(index, case.error(case.run(backward=backward)))
            if step % 100 == 0 or step == replays:
                replayed.check(f"after {step} replays")
                eager.check(f"eager, after {step} replays")


def check_graphed_callable(ctx, name, steps, seed):
    """A layer whose forward and backward passes torch captures, as a user would have it."""
    communicator.set_timeout(20)
    torch.manual_seed(seed + ctx.rank)  # every rank's tokens and features are its own
    rng = random.Random(seed)
    tokens, width = 64, 256  # of one rank

    def layer(x, up, bias, down):
        return matmul_reduce_scatter(all_gather_matmul(x, up, bias, "gelu_tanh"), down)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, device=ctx.device) * scale).bfloat16().requires_grad_()

    def some_inputs():
        scale = width**-0.5
        return randn(tokens, width), randn(width, width, scale=scale), randn(width), randn(width, width, scale=scale)

    def results(function, inputs, grad):
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    grad, many = randn(tokens, width).detach(), [some_inputs() for _ in range(INPUTS)]
    with tier("reference"):
        expected = [results(layer, inputs, grad) for inputs in many]
    scales = [[largest(x) for x in each] for each in expected]
    with poisoned():
        with tier(name):
            graphed = make_graphed(layer, some_inputs())
        errors = Errors(ctx, [name])
        for _ in range(steps):
            index = rng.randrange(INPUTS)
            perhaps_late(ctx, rng)
            errors.add(0, largest_error(results(graphed, many[index], grad), expected[index], scales[index]))
        errors.check(f"after {steps} steps")


def check_captured_too_early(ctx, operation):
    """What has not run before: the first operation of a group, and one that is larger than the others."""
    communicator.set_timeout(20)
    group = dist.new_group()
    torch.manual_seed(0)
    small, large = Case(ctx, operation, 64, 64, 64), Case(ctx, operation, 8192, 4096, 4096)
    with tier("p2p"):
        with pytest.raises(ValueError, match="run one before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            small.run(group)
        small.run(group)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=r"\d (bytes|MiB)"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            large.run(group)
        for case in (small, large):  # now it has the memory, and can be captured
            assert case.error(case.run(group)).item() <= TOLERANCE
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = large.run(group)
        for _ in range(5):
            graph.replay()
            assert large.error(results).item() <= TOLERANCE
    dist.destroy_process_group(group)


def check_captured_under_detail(ctx, name):
    """Outside of captures ranks compare their calls, which no graph can hold."""
    communicator.set_timeout(20)
    torch.manual_seed(0)
    for operation in OPERATIONS:
        case = Case(ctx, operation, *SIZES[1])
        with debugging():
            captured = Captured([case], name, backward=True)
        assert case.error(captured.replay(case)).item() <= TOLERANCE, operation


@on_gpus
@tiers
@pytest.mark.parametrize("operation", OPERATIONS)
def test_replays(ranks, name, operation, seed):
    ranks.run(check_replays, [name], [operation], SIZES, ranks.times(1000), seed, timeout=60)


@on_gpus
def test_graphs_of_all_operations_and_tiers_in_turn(ranks, seed):
    ranks.run(check_replays, TIERS, list(OPERATIONS), SIZES[1:2], ranks.times(2000), seed, timeout=60)


@on_gpus
@tiers
def test_graphed_callable(ranks, name, seed):
    ranks.run(check_graphed_callable, name, ranks.times(1000), seed, timeout=60)


@on_gpus
@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_all_reduce"])
def test_captured_too_early(ranks, operation):
    ranks.run(check_captured_too_early, operation, timeout=60)


@on_gpus
@tiers
def test_captured_under_detail(ranks, name):
    ranks.run(check_captured_under_detail, name, timeout=60)
