"""Models that differ between the ranks of a mesh: every rank is told, whatever differs, and nothing hangs."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import tpfused
from tpfused.group import TPGroup
from tpfused.parallel.styles import Style

ALONE = TPGroup(None, 0, 1)


def dense_model(device) -> nn.Module:
    layers = {"norm": nn.LayerNorm(8), "extra": nn.Linear(8, 8), "last": nn.Linear(8, 8, bias=False)}
    return nn.Sequential(OrderedDict(layers)).to(device)


def permute(model):
    model.extra.weight.data = model.extra.weight.data.flip(0)


def swap(model):
    model.norm.weight.data, model.norm.bias.data = model.norm.bias.data, model.norm.weight.data


def lengthen(model):
    model.append(nn.Linear(8, 3))


def shorten(model):
    del model.last


def unframe(model):
    model.extra.register_parameter("bias", None)


def lose(model):
    del model.extra  # the plan matches nothing on this rank alone


CHANGES = {
    permute: r"1 of 5 parameters differ.*extra\.weight.*one seed",
    swap: r"2 of 5 parameters differ.*norm\.weight",
    lengthen: r"parameter 5 of 5 on rank 0 is \(none\), of 7 on rank \d \(3.weight \[3, 8\]",
    shorten: r"parameter 4 of 5 on rank 0 is \(last.weight .* of 4 on rank \d \(none\)",
    unframe: r"rank 0 is \(extra.bias .* rank \d \(last.weight",
    lose: r"rank 0 is \(extra.weight .* rank \d \(last.weight",
    lambda model: model.extra.to("meta"): r"extra.weight \[8, 8\] float32, with values.*, on the meta device",
    lambda model: model.extra.double(): r"extra.weight \[8, 8\] float32.* float64",
    lambda model: model.to("meta"): r"norm.weight \[8\] float32, with values.*, on the meta device",
}


def check_different(ctx, seed):
    if ctx.world < 2:
        return
    mesh, plan = ctx.mesh(ctx.world), {"extra": "colwise_gather"}
    for change, told in CHANGES.items():
        torch.manual_seed(seed)
        model = dense_model(ctx.device)
        if ctx.rank == ctx.world - 1:
            change(model)
        names = list(model.state_dict())
        with pytest.raises(ValueError, match=told):
            tpfused.parallelize(model, mesh, plan)
        assert not any(hasattr(p, "placements") for p in model.parameters()) and list(model.state_dict()) == names

    with pytest.raises(ValueError, match="on the meta device.* with values"):
        tpfused.parallelize(dense_model("cpu" if ctx.rank else "meta"), mesh, plan)
    torch.manual_seed(seed + ctx.rank)
    with pytest.raises(ValueError, match="2 of 2 parameters differ between the ranks.*weight"):
        parallelize_module(dense_model(ctx.device), mesh, {"extra": Style("colwise_gather")})
    for layers, told in ((1, "parameters differ"), (1 + ctx.rank, "different models")):
        config = tpfused.TransformerConfig(37, 8, layers, num_heads=4, ffn_size=16, max_positions=16)
        with pytest.raises(ValueError, match=told):
            tpfused.parallelize(tpfused.ParallelTransformer(config, group=ALONE), mesh)


def test_models_that_differ_between_ranks(workers, seed):
    workers.run(check_different, seed)
