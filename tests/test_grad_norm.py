"""clip_grad_norm_ against torch's own on the dense model, in every layout."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.compare import assert_close, collectives_made
from tests.layouts import backward, batch, dense, every_case, laid_out, skip_impossible
from tpfused import ColumnParallelLinear, clip_grad_norm_, full_state_dict
from tpfused.parameter import local


@torch.no_grad()
def whole_gradients(model):
    """By parameter name, on rank 0: a state dict of the model with its gradients for parameters."""
    values = [local(param).clone() for param in model.parameters()]
    for param in model.parameters():
        local(param).copy_(local(param.grad))
    gradients = full_state_dict(model)
    for param, value in zip(model.parameters(), values, strict=True):
        local(param).copy_(value)
    return gradients


def check_against_torch(ctx, config, layout, tp, norm_types, seed):
    model, twin = laid_out(ctx, config, layout, tp, seed), dense(config, seed, ctx.device)
    totals = []
    for norm_type, max_norm in itertools.product(norm_types, (1e9, 0.37)):  # far above the norm, far below
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch(ctx, config, seed))
        expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
        totals.append(clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=True))
        assert_close(totals[-1], expected, f"norm {norm_type}")
        clipped, expected = whole_gradients(model), whole_gradients(twin)
        for name in clipped:
            assert_close(clipped[name], expected[name], f"{name} by norm {norm_type}")
    return [total.item() for total in totals]


@every_case
def test_norm_and_gradients_are_the_dense_models(workers, config, layout, tp, seed):
    skip_impossible(config, layout, tp)
    norm_types = (2.0, math.inf, 1.0, 3.5) if layout == "plain" else (2.0,)
    results = workers.run(check_against_torch, config, layout, tp, norm_types, seed)
    assert all(result == results[0] for result in results)  # the same bits on every rank


def check_collectives(ctx, config, layout, tp):
    model = laid_out(ctx, config, layout, tp, 0)
    backward(model, batch(ctx, config, 0))
    with collectives_made() as names:
        clip_grad_norm_(model.parameters(), 1.0)
    return names


@pytest.mark.parametrize(
    "config, layout, per_degree",
    [
        ("gpt", "plain", {1: 0, 2: 1, 4: 1}),
        ("gpt", "ddp", {1: 0, 2: 1, 4: 1}),
        ("gpt", "fsdp2", {1: 1, 2: 2, 4: 1}),  # tp, dp
        ("llama", "plain", {1: 0, 2: 1, 4: 2}),  # at 4 ranks, 2 key-value heads are split over 2 of them
        ("tied", "mesh", {1: 0, 2: 1, 4: 1}),  # one key-value head is whole everywhere
    ],
)
def test_one_collective_a_group(workers, tp, config, layout, per_degree):
    if workers.world != 4:
        pytest.skip("counts are for 4 ranks")
    assert workers.run(check_collectives, config, layout, tp) == [["all_gather"] * per_degree[tp]] * 4


def check_nonfinite(ctx, tp, norm_type, value):
    layer = ColumnParallelLinear(3, 2 * tp, group=ctx.group(tp), device=ctx.device)
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    if ctx.rank % tp == tp - 1:
        layer.weight.grad[0, 0] = value
    before = [param.grad.clone() for param in layer.parameters()]
    with pytest.raises(RuntimeError, match="norm"):
        clip_grad_norm_(layer.parameters(), 1.0, norm_type, error_if_nonfinite=True)
    for param, grad in zip(layer.parameters(), before, strict=True):
        assert torch.equal(param.grad.nan_to_num(7.0), grad.nan_to_num(7.0))
    return clip_grad_norm_(layer.parameters(), 1.0, norm_type).item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_known_to_all(workers, tp, norm_type, value):
    assert {str(total) for total in workers.run(check_nonfinite, tp, norm_type, value)} == {str(value)}


def check_partial_sums(ctx):
    mesh = ctx.mesh(ctx.world)
    param = nn.Parameter(DTensor.from_local(torch.zeros(4, device=ctx.device), mesh, [Replicate()]))
    addend = torch.arange(4.0, device=ctx.device) + ctx.rank
    param.grad = DTensor.from_local(addend, mesh, [Partial()])
    whole = addend.clone()
    dist.all_reduce(whole)
    total = clip_grad_norm_([param], 0.5)
    torch.testing.assert_close(total, whole.norm())
    torch.testing.assert_close(param.grad.full_tensor(), whole * 0.5 / (whole.norm() + 1e-6))


def test_a_dtensor_gradient_of_partial_sums(workers):
    workers.run(check_partial_sums)


def check_empty_shards(ctx, norm_type):
    whole = torch.arange(1.0, 4.0, dtype=torch.float64, device=ctx.device)  # of 3 rows, rank 3 of 4 has none
    plain = ColumnParallelLinear(1, 3, bias=False, group=ctx.group(ctx.world), device=ctx.device)
    plain = plain.double()
    sharded = ColumnParallelLinear(1, 3, bias=False, mesh=ctx.mesh(ctx.world), dtype=torch.float64)
    assert isinstance(sharded.weight, DTensor) and sharded.weight.placements == (Shard(0),)
    for layer in (plain, sharded):
        layer.fill_parameter("weight", whole[:, None])
        layer.weight.grad = layer.weight.detach().clone()
    total = clip_grad_norm_([plain.weight, sharded.weight], 1.0, norm_type)
    torch.testing.assert_close(total, torch.linalg.vector_norm(torch.cat((whole, whole)), norm_type))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_empty_shards(workers, norm_type):
    workers.run(check_empty_shards, norm_type)


def with_gradients(*dtypes, device="cpu"):
    params = [nn.Parameter(torch.randn(5, 3, device=device, dtype=dtype)) for dtype in dtypes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "dtypes, expected",
    [
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.float64), torch.float64),
    ],
)
def test_norm_is_computed_in_float32_at_least(dtypes, expected, device):
    params = with_gradients(*dtypes, device=device)
    exact = torch.cat([param.grad.double() for param in params]).norm()
    before = [param.grad.clone() for param in params]
    total = clip_grad_norm_(params, 0.5)
    assert total.dtype == expected
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)
    for param, grad in zip(params, before, strict=True):
        assert param.grad.dtype == grad.dtype
        torch.testing.assert_close(param.grad.double(), grad.double() * 0.5 / exact, rtol=1e-2, atol=1e-4)


def test_one_tensor_no_gradients_and_skipped_ones():
    first, second = with_gradients(torch.float32, torch.float32)
    norm = first.grad.norm()
    second.grad = None
    torch.testing.assert_close(clip_grad_norm_(first, 1e9), norm)
    torch.testing.assert_close(clip_grad_norm_(iter([second, first]), 1e9), norm)
    assert clip_grad_norm_([second], 1.0) == 0


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_norm_types_that_are_none_are_named(norm_type):
    with pytest.raises(ValueError, match=f"{float(norm_type)}"):
        clip_grad_norm_(with_gradients(torch.float32), 1.0, norm_type)


def test_float32_norms_of_large_gradients_are_exact():
    """torch adds a million float32 squares on the CPU with an error of 1e-5, and a shard's are fewer."""
    parameter = torch.nn.Parameter(torch.zeros(512, 2048))
    parameter.grad = torch.randn(512, 2048)
    exact = parameter.grad.double().norm()
    assert abs(clip_grad_norm_(parameter, 1.0) / exact - 1) < 5e-7


def test_arguments_of_another_kind_are_named():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for told, arguments in (
        ("parameters must be .* not NoneType", (None, 1.0)),
        ("each of the parameters must be a tensor, not str", ("x", 1.0)),
        ("each of the parameters must be a tensor, not float", ([1.0], 1.0)),
        ("max_norm must be a number, not '1'", (weight, "1")),
        ("norm_type must be a number, not None", (weight, 1.0, None)),
        ("error_if_nonfinite must be True or False, not 'no'", (weight, 1.0, 2.0, "no")),
    ):
        with pytest.raises(TypeError, match=told):
            clip_grad_norm_(*arguments)
    assert torch.equal(weight.grad, torch.ones(2))
    assert clip_grad_norm_(weight, 1.0, "inf") == 1.0  # as torch's function takes it


@pytest.mark.parametrize(
    "max_norm",
    [
        math.nan,
        -1.0,
        -1,
        -math.inf,
        torch.tensor(-1.0),
        pytest.param(10**400, id="10**400"),
    ],
)
def test_a_max_norm_that_makes_no_sense_is_named(max_norm):
    with pytest.raises(ValueError, match="max_norm .*(-1.0|nan|-inf|no float can hold)"):
        clip_grad_norm_(with_gradients(torch.float32), max_norm)


@pytest.mark.parametrize("number", [np.float32, np.float16, np.int64, torch.tensor])
def test_numbers_of_other_libraries(number):
    (param,) = with_gradients(torch.float32)
    param.grad *= 4  # longer than 1, however they were drawn
    expected = param.grad / param.grad.norm()
    clip_grad_norm_(param, number(1), number(2))
    torch.testing.assert_close(param.grad, expected)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("ids", [[], [1], [1, 1, 2]])
def test_sparse_gradients_are_clipped_as_torch_does(norm_type, ids):
    own, theirs = [], []
    for params in (own, theirs):
        torch.manual_seed(5)
        embedding, head = nn.Embedding(3, 3, sparse=True), nn.Linear(3, 2)
        (head(embedding(torch.tensor(ids, dtype=torch.int64))).square().sum() + head.bias.sum()).backward()
        params += [*embedding.parameters(), *head.parameters()]
    theirs[0].grad = theirs[0].grad.to_dense()  # torch's takes no empty sparse one
    expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    torch.testing.assert_close(clip_grad_norm_(own, 0.5, norm_type), expected)
    assert own[0].grad.is_sparse
    for mine, its in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), its.grad)


def test_gradients_of_other_layouts_are_named():
    weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    weight.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"gradient of shape \(3, 3\) is torch.sparse_csr"):
        clip_grad_norm_(weight, 1.0)
