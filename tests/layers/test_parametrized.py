"""Layers whose parameters torch computes from others: parametrized or pruned ones."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.compare import Block, refuses
from tpfused import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, clip_grad_norm_, full_state_dict


class Twice(nn.Module):
    def forward(self, tensor):
        return 2 * tensor


def twice(layer):
    parametrize.register_parametrization(layer, "weight", Twice())


HIDING = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "elementwise": twice,
    "pruned": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
}
hiding = pytest.mark.parametrize("how", HIDING)


def layers_of(block):
    """Each with an input."""
    place = {"device": block.device, **block.place}
    yield ColumnParallelLinear(4, 8, **place), torch.ones(3, 4, device=block.device)
    yield RowParallelLinear(4, 8, **place), torch.ones(3, 4 // block.tp, device=block.device)
    yield VocabParallelEmbedding(4, 8, **place), torch.tensor([0, 3], device=block.device)


def check_shards(ctx, tp, how):
    """Clipped by their own norms, or saved as whole tensors, shards would be wrong without a word."""
    block = Block(ctx, tp, "group", 0)
    for layer, x in layers_of(block):
        HIDING[how](layer)
        told = type(layer).__name__, "weight", f"{tp} ranks", "parametrized or pruned", "mesh="
        with refuses(ValueError, *told):
            layer(x)
        with torch.no_grad(), refuses(ValueError, *told):
            layer(x)
        with refuses(ValueError, "weight is parametrized or pruned"):
            full_state_dict(layer)


@hiding
@pytest.mark.parametrize("tp", [2], indirect=True)
def test_shards_that_cannot_be_seen_are_refused(workers, tp, how):
    workers.run(check_shards, tp, how)


def check_tensors_of_the_programs_own(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    for layer, x in layers_of(block):
        layer.accumulate_main_grad = True
        expected, weight = layer(x), layer.weight.detach().clone()
        del layer.weight
        layer.weight = weight
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_a_program_may_put_a_tensor_in_a_shards_place(workers, tp):
    workers.run(check_tensors_of_the_programs_own, tp)


def check_alone(ctx, tp, how):
    for layer, x in layers_of(Block(ctx, tp, "group", 0)):
        HIDING[how](layer)
        layer(x).square().sum().backward()
        grads = [param.grad for param in layer.parameters()]
        expected = nn.utils.get_total_norm(grads)
        torch.testing.assert_close(clip_grad_norm_(layer.parameters(), 1e-3), expected)


@hiding
@pytest.mark.parametrize("tp", [1], indirect=True)
def test_one_rank_alone_takes_them(workers, tp, how):
    workers.run(check_alone, tp, how)


def check_whole_parameters(ctx, tp, seed):
    """What each rank has whole has the same gradient on each, parametrized or not."""
    block, norms = Block(ctx, tp, "group", seed), []
    x = block.randn(3, 4, dtype=torch.float32)
    for changes in (False, True):
        torch.manual_seed(block.seed)
        layer = RowParallelLinear(4, 8, device=block.device, **block.place)
        if changes:
            parametrize.register_parametrization(layer, "bias", nn.Identity())
        layer(block.own(x, -1)).square().sum().backward()
        norms.append(clip_grad_norm_(layer.parameters(), 1.0))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_parameters_that_are_whole_may_be_parametrized(workers, tp, seed):
    workers.run(check_whole_parameters, tp, seed)


def check_dtensors(ctx, tp, seed):
    norms = []
    for mode, factor in (("group", 1), ("mesh", 2)):
        block = Block(ctx, tp, mode, seed)
        torch.manual_seed(block.seed)
        layer = ColumnParallelLinear(4, 8, bias=False, device=block.device, **block.place)
        if mode == "mesh":
            twice(layer)
        layer(block.randn(3, 4, dtype=torch.float32) / factor).square().sum().backward()
        norms.append(clip_grad_norm_(layer.parameters(), 1.0))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_dtensors_know_how_they_are_split(workers, tp, seed):
    workers.run(check_dtensors, tp, seed)
