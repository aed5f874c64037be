"""The conjugate pairs against what each rank can work out alone, since all ranks' data come from one seed."""

import pytest
import torch
import torch.distributed as dist

from tests.compare import collectives_made, refuses, strided
from tpfused import collectives as c
from tpfused.group import resolve_group, with_replicas
from tpfused.sharding import shard_range

TOTALS = (8, 7, 5, 2, 1, 0)
COMPILED = 8  # as well


def draw(ctx, seed, *shape, ranks, dtype=torch.float64):
    """One tensor for each rank of the group, the same on all of them; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).to(ctx.device, dtype) for _ in range(ranks)]


def own(whole, dim, rank, size):
    """What rank `rank` of `size` holds of `whole`."""
    start, stop = shard_range(whole.shape[dim], size, rank)
    return whole.narrow(dim, start, stop - start)


def backward(function, x, grad):
    """`function(x)` and dx; checks that neither `x` nor `grad` was written to."""
    x = x.detach().requires_grad_()
    before, grad_before = x.detach().clone(), grad.clone()
    out = function(x)
    assert out.shape == grad.shape, (out.shape, grad.shape)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(x, before) and torch.equal(grad, grad_before)
    return out.detach(), dx


def equal(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual, expected)
    assert torch.equal(actual, expected), (actual, expected)


def check_pairs(ctx, size, seed, dim, total, dtype, by_mesh):
    group = resolve_group(mesh=ctx.mesh(size)) if by_mesh else resolve_group(ctx.group(size))
    shape = [2, 3, 2]
    shape[dim] = total
    wholes, grads = (draw(ctx, seed + i, *shape, ranks=size, dtype=dtype) for i in range(2))
    x, grad, sum_x, sum_grad = wholes[group.rank], grads[group.rank], sum(wholes), sum(grads)

    def mine(whole):
        return own(whole, dim, group.rank, size)

    def joined(tensors):
        return torch.cat([own(t, dim, rank, size) for rank, t in enumerate(tensors)], dim)

    pairs = {
        "copy": (lambda x: c.copy_to_group(x, group), x, grad, x, sum_grad),
        "reduce": (lambda x: c.reduce_from_group(x, group), x, grad, sum_x, grad),
        "scatter": (lambda x: c.scatter_to_group(x, dim, group), x, mine(grad), mine(x), joined(grads)),
        "gather": (lambda x: c.gather_from_group(x, dim, total, group), mine(x), grad, joined(wholes), mine(grad)),
        "tokens": (lambda x: c.all_gather_tokens(x, dim, total, group), mine(x), grad, joined(wholes), mine(sum_grad)),
        "reduce_tokens": (
            lambda x: c.reduce_scatter_tokens(x, dim, group),
            x,
            mine(grad),
            mine(sum_x),
            joined(grads),
        ),
    }
    for name, (function, given, given_grad, expected, expected_grad) in pairs.items():
        for x_layout in (given, strided(given)):
            for grad_layout in (given_grad, strided(given_grad)):
                out, dx = backward(function, x_layout, grad_layout)
                equal(out, expected), equal(dx, expected_grad)
        ones = given_grad.new_ones(()).expand(given_grad.shape)  # the gradient of a sum has stride 0
        _, dx = backward(function, given, ones)
        equal(dx, torch.full_like(given, size if name in ("copy", "tokens") else 1))
        if total == COMPILED:
            torch._dynamo.reset()

            def viewed(x, function=function):
                return function(x).view(-1)  # it is the gradient of a view that torch.compile may lose

            compiled = torch.compile(viewed, fullgraph=True, backend="aot_eager")
            out, dx = backward(compiled, given, given_grad.reshape(-1))
            equal(out.view_as(expected), expected), equal(dx, expected_grad)


def check_bare(ctx, size, seed):
    group = resolve_group(ctx.group(size))
    xs = draw(ctx, seed, 3, 5, ranks=size)
    x = xs[group.rank].clone().requires_grad_()
    for out, expected in (
        (c.all_reduce(x, group), sum(xs)),
        (c.all_reduce(x, group, dist.ReduceOp.MAX), torch.stack(xs).amax(0)),
        (c.all_gather(x[:1], 0, size, group), torch.cat([each[:1] for each in xs])),
        (c.reduce_scatter(x, 1, group), own(sum(xs), 1, group.rank, size)),
        (c.own_slice(x.detach(), 1, group), own(xs[group.rank], 1, group.rank, size)),
    ):
        assert not out.requires_grad
        equal(out, expected)
    ids = torch.arange(size * 2, device=ctx.device).view(size, 2)
    equal(c.all_gather(ids[group.rank], 0, 2 * size, group), ids.flatten())


def check_replicas(ctx, size, replicas, seed):
    group = with_replicas(resolve_group(ctx.group(size)), replicas)
    for total in (2 * group.size, 2 * group.size - 1):
        whole = draw(ctx, seed, total, 3, ranks=1)[0]
        equal(c.all_gather(own(whole, 0, group.rank, group.size), 0, total, group), whole)
    xs, grads = (draw(ctx, seed + i, 2, 3, ranks=size) for i in (1, 2))
    mine = range(group.rank * replicas, (group.rank + 1) * replicas)
    out, dx = backward(lambda x: c.copy_to_replicas(x, group), xs[group.rank], grads[ctx.rank % size])
    equal(out, xs[group.rank]), equal(dx, sum(grads[rank] for rank in mine))


def check_counts(ctx, size):
    group = resolve_group(ctx.group(size))
    x = torch.ones(size, 2, dtype=torch.float64, device=ctx.device, requires_grad=True)
    with collectives_made() as names:
        for function, forward, back in (
            (lambda: c.copy_to_group(x, group), [], ["all_reduce"]),
            (lambda: c.reduce_from_group(x, group), ["all_reduce"], []),
            (lambda: c.scatter_to_group(x, 0, group), [], ["all_gather"]),
            (lambda: c.gather_from_group(x[:1], 0, size, group), ["all_gather"], []),
            (lambda: c.all_gather_tokens(x[:1], 0, size, group), ["all_gather"], ["reduce_scatter"]),
            (lambda: c.reduce_scatter_tokens(x, 0, group), ["reduce_scatter"], ["all_gather"]),
        ):
            out = function()
            assert names == (forward if size > 1 else []), names
            names.clear()
            out.sum().backward()
            assert names == (back if size > 1 else []), names
            names.clear()


def check_observer(ctx):
    group = resolve_group()
    calls = []

    def callback(name, tensor):
        calls.append(("start", name, tuple(tensor.shape)))
        return lambda: calls.append(("done", name))

    x = torch.ones(3, device=ctx.device)
    with c.observe(callback):
        c.all_reduce(x, group)
        assert calls == [("start", "all_reduce", (3,)), ("done", "all_reduce")]
    c.all_reduce(x, group)
    assert len(calls) == 2


def check_refuses(ctx, size):
    group = resolve_group(ctx.group(size))
    wrong = torch.zeros(3, 4, dtype=torch.float64, device=ctx.device)
    with refuses(ValueError, 3, 10, 10 * size, (3, 4)):
        c.gather_from_group(wrong, 0, 10 * size, group)
    with refuses(ValueError, 4, 7, 7 * size):
        c.all_gather_tokens(wrong, 1, 7 * size, group)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_forward_and_gradient_of_every_pair(workers, tp, seed, dim, total):
    workers.run(check_pairs, tp, seed, dim, total, torch.float64, by_mesh=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_and_mesh_groups(workers, tp, seed, dtype):
    workers.run(check_pairs, tp, seed, 0, 7, dtype, by_mesh=True)


def test_bare_collectives_carry_no_gradient(workers, tp, seed):
    workers.run(check_bare, tp, seed)


def test_each_pair_makes_only_its_own_collectives(workers, tp):
    workers.run(check_counts, tp)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_observers_see_start_and_end_of_each_collective(workers, tp):
    workers.run(check_observer)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_shards_that_several_ranks_own(workers, tp, seed, replicas):
    if tp % replicas:
        pytest.skip(f"{tp} ranks cannot hold {replicas} replicas")
    workers.run(check_replicas, tp, replicas, seed)


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_a_shard_of_the_wrong_size_is_refused(workers, tp):
    workers.run(check_refuses, tp)
