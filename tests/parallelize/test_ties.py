"""Parameters of several modules: they stay one within a model, and apart in two models that share them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import tpfused
from tests.compare import assert_close
from tests.parallelize.models import whole
from tests.parallelize.own_models import HEADS, WIDTH, Attention
from tpfused.parallel.styles import Style

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)
PARTS = {"q": "colwise", "k": "colwise_kv", "v": "colwise_kv", "norm": "replicate_sum", "out": "rowwise"}


def tied_attention(kv_heads: int) -> nn.Module:
    """Keys and values by one weight."""
    attention = Attention()
    attention.num_key_value_heads = kv_heads
    attention.k, attention.v = nn.Linear(20, kv_heads * WIDTH), nn.Linear(20, kv_heads * WIDTH, bias=False)
    attention.v.weight = attention.k.weight
    return nn.Sequential(attention)


def by_styles(model, mesh):
    """The module itself after its projections, which look at its head counts."""
    heads = {"num_heads": HEADS, "num_key_value_heads": model[0].num_key_value_heads}
    parallelize_module(model, mesh, {f"0.{name}": Style(style, **heads) for name, style in PARTS.items()})
    return parallelize_module(model, mesh, {"0": Style("attention")})


def by_plan(model, mesh):
    return tpfused.parallelize(model, mesh, {"0": "attention", **PARTS})


def check_tied_keys_and_values(ctx, tp, seed, kv_heads):
    for how in (by_plan, by_styles):
        torch.manual_seed(seed + ctx.rank // tp)
        dense = tied_attention(kv_heads).to(ctx.device, torch.float64)
        model = how(copy.deepcopy(dense), ctx.mesh(tp))
        assert model[0].k.weight is model[0].v.weight
        x = torch.randn(2, 7, 20, dtype=torch.float64, device=ctx.device)
        expected, actual = dense(x), model(x)
        assert_close(actual, expected.detach(), "the output")
        expected.square().mean().backward()
        actual.square().mean().backward()
        found = dict(model.named_parameters())
        for name, param in dense.named_parameters():
            assert_close(whole(found[name].grad, param), param.grad, name)


@split
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_keys_and_values_of_one_weight(workers, tp, seed, kv_heads):
    """Fewer heads than ranks, too: their parameters lie on a mesh of another shape."""
    workers.run(check_tied_keys_and_values, tp, seed, kv_heads)


def check_two_models(ctx, tp, seed):
    torch.manual_seed(seed + ctx.rank // tp)
    shared = nn.Linear(8, 12, device=ctx.device, dtype=torch.float64)
    first, second = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12)).to(ctx.device, torch.float64) for _ in range(2))
    norm = first[0].weight
    for model in (first, second):
        model[0].weight, model[1].weight = norm, shared.weight
    mesh = ctx.mesh(tp)
    tpfused.parallelize(first, mesh, {"1": "colwise_gather"})
    with torch.no_grad():
        for param in first.parameters():
            param.zero_()
    tpfused.parallelize(second, mesh, {"1": "colwise_gather"})
    for index, dense in ((0, norm), (1, shared.weight)):
        assert second[index].weight is not first[index].weight
        assert torch.equal(second[index].weight.full_tensor(), dense)
    assert not vars(norm) and not vars(shared.weight)


@split
def test_two_models_that_share_parameters(workers, tp, seed):
    """The second one is of the dense weights, whatever has become of the first one's."""
    workers.run(check_two_models, tp, seed)
