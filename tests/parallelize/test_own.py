"""This package's own model of one process, split in place: every style of it, what stays, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import tpfused
from tests.compare import assert_close, refuses
from tests.parallelize.own_models import on_four
from tpfused.checkpoint import model_entries
from tpfused.collectives import all_gather
from tpfused.group import TPGroup

ALONE = TPGroup(None, 0, 1)
SIZES = {"vocab_size": 37, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "ffn_size": 24, "max_positions": 16}
CONFIGS = {
    "gpt": tpfused.TransformerConfig.gpt(**SIZES),
    "gpt-tied": tpfused.TransformerConfig.gpt(**SIZES, tie_embeddings=True, sequence_dim=1),
    "llama": tpfused.TransformerConfig.llama(**SIZES, num_kv_heads=2),  # shared by two ranks of four
    "llama-sequence": tpfused.TransformerConfig.llama(**SIZES, num_kv_heads=1, sequence_parallel=True),
    "gpt-tied-sequence": tpfused.TransformerConfig.gpt(**SIZES, tie_embeddings=True, sequence_parallel=True),
}
split = pytest.mark.parametrize("tp", [2, 4], indirect=True)


def dense_model(ctx, tp, seed, config) -> tpfused.ParallelTransformer:
    """With random weights, none of them initial ones."""
    torch.manual_seed(seed + ctx.rank // tp)
    model = tpfused.ParallelTransformer(config, group=ALONE, device=ctx.device, dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def unpacked(model, of) -> dict[str, torch.Tensor]:
    """What `of` gives for each parameter, by the names that it has at every degree."""
    found = {}
    for entry in model_entries(model):
        found |= zip(entry.names, entry.unpack(of(entry.tensor)), strict=True)
    return found


def check_own_model(ctx, tp, seed, name, on_meta):
    dense = dense_model(ctx, tp, seed, CONFIGS[name])
    frozen = "blocks.0.attention.out.weight"
    dense.get_parameter(frozen).requires_grad_(False)
    expected = unpacked(dense, torch.Tensor.detach)
    model = copy.deepcopy(dense).to("meta") if on_meta else copy.deepcopy(dense)
    assert tpfused.parallelize(model, ctx.mesh(tp)) is model and model.group.size == tp
    if on_meta:
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device=ctx.device)
        tpfused.load_full_state_dict(model, expected)
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == [frozen]
    found = unpacked(model, lambda param: param.detach().full_tensor())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

    ids = torch.randint(37, (2, 7), device=ctx.device)
    assert_close(all_gather(model(ids), -1, 37, model.group), dense(ids).detach(), "the logits")
    losses = [each.loss(ids, ids) for each in (model, dense)]
    assert_close(*losses, "the loss")
    for loss in losses:
        loss.backward()
    for each in (model, dense):
        each.get_parameter(frozen).requires_grad_(True).grad = torch.zeros_like(each.get_parameter(frozen))
    grads = unpacked(model, lambda param: param.grad.full_tensor())
    for name, grad in unpacked(dense, lambda param: param.grad).items():
        assert_close(grads[name], grad, f"the gradient of {name}")


@split
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("on_meta", [False, True])
def test_logits_loss_and_every_gradient(workers, tp, seed, name, on_meta):
    workers.run(check_own_model, tp, seed, name, on_meta)


def check_kept(ctx, tp, seed, name):
    model = dense_model(ctx, tp, seed, CONFIGS[name])
    block, called = model.blocks[0].eval(), []
    kept = {path: module for path, module in model.named_modules() if not path.endswith("qkv")}
    model.tag, block.mlp.tag = "the model's", "the layer's"
    model.register_forward_hook(lambda module, args, out: called.append(("after", module, tuple(out.shape))))
    block.register_forward_pre_hook(lambda module, args: called.append(("before", module)))
    tpfused.parallelize(model, ctx.mesh(tp))
    now = dict(model.named_modules())
    assert all(now[path] is module for path, module in kept.items())
    assert model.tag == "the model's" and block.mlp.tag == "the layer's"
    assert {module.training for module in block.modules()} == {False} and model.training and model.blocks[1].training
    ids = torch.randint(37, (2, 7), device=ctx.device)
    own = model(ids).shape[-1]
    assert own < 37 and called == [("before", block), ("after", model, (2, 7, own))]


@split
@pytest.mark.parametrize("name", ["gpt-tied", "llama"])
def test_hooks_modes_and_attributes_stay(workers, tp, seed, name):
    workers.run(check_kept, tp, seed, name)


class Derived(tpfused.ParallelTransformer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = nn.Linear(16, 16)


def check_refusals(ctx, seed):
    config, mesh = CONFIGS["gpt"], ctx.mesh(4)
    place = {"group": ALONE, "device": ctx.device}
    with refuses(ValueError, "Derived is a subclass of ParallelTransformer", "mesh="):
        tpfused.parallelize(Derived(config, **place), mesh)

    def change_meta(model):
        model.blocks[0].mlp.to("meta")

    def change_norm(model):
        model.norm = nn.Identity()

    def add(model):
        model.blocks[1].extra = nn.Linear(16, 16, device=ctx.device)

    def drop(model):
        model.blocks = model.blocks[:1]

    def tie(model):
        model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight

    for change, told in {
        change_meta: ("4 of the model's", "on the meta device (blocks.0.mlp.fc1.weight, ...)", "all must be, or none"),
        change_norm: ("norm is Identity, not Norm",),
        add: ("blocks.1.extra is Linear, not nothing",),
        drop: ("blocks.1 is nothing, not ParallelTransformerBlock",),
        tie: ("blocks.1.mlp.fc1.weight is nothing, not [24, 16]",),
    }.items():
        torch.manual_seed(seed)
        model = tpfused.ParallelTransformer(config, **place)
        change(model)
        before = {name: id(param) for name, param in model.named_parameters()}
        with refuses(ValueError, *told):
            tpfused.parallelize(model, mesh)
        assert {name: id(param) for name, param in model.named_parameters()} == before


def test_what_is_refused(workers, seed):
    workers.run(on_four, check_refusals, seed)
