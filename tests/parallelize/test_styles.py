"""The styles in torch's `parallelize_module`, and as transformers' `tp_plan`."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.compare import assert_close, refuses
from tests.parallelize.models import build, whole
from tests.parallelize.own_models import HEADS, KV_HEADS, dense_model, on_four
from tpfused.parallel.styles import Style, tp_plan

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)


def check_torch_styles(ctx, tp, seed):
    """The same through torch's own entry point, and only what has a style becomes a DTensor."""
    dense, model = dense_model(ctx, tp, seed), dense_model(ctx, tp, seed)
    heads = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS}
    plan = {"embed": "vocab_embedding", "layers.0": "attention", "layers.1": "attention", "layers.0.q": "colwise"}
    plan |= {"layers.0.k": "colwise_kv", "layers.0.v": "colwise_kv", "layers.0.norm": "replicate_sum"}
    plan |= {"layers.*.out": "rowwise", "layers.1.qkv": "fused_qkv", "layers.2.gate_up": "fused_gate_up"}
    plan |= {"layers.2.down": "rowwise", "head": "colwise_gather"}
    # The module itself after what it holds: each attention's head counts are looked at for its projections first.
    styles = {name: Style(style, **heads if style == "colwise_kv" else {}) for name, style in plan.items()}
    own = [name for name in plan if plan[name] == "attention"]
    styles["layers.1.qkv"] = Style("fused_qkv", num_heads=HEADS)
    assert parallelize_module(model, ctx.mesh(tp), {n: s for n, s in styles.items() if n not in own}) is model
    parallelize_module(model, ctx.mesh(tp), {n: styles[n] for n in own})
    assert model.head.weight is model.embed.weight and not hasattr(model.norm.weight, "placements")
    ids = torch.randint(37, (2, 7), device=ctx.device)
    expected, actual = dense(ids), model(ids)
    assert_close(actual, expected, "the output")
    expected.square().mean().backward()
    actual.square().mean().backward()
    found = dict(model.named_parameters())
    for name, param in dense.named_parameters():
        if param.grad is not None:
            grad = found[name].grad
            assert_close(whole(grad, param) if hasattr(grad, "full_tensor") else grad, param.grad, name)
    with refuses(ValueError, "colwize", "rowwise"):
        Style("colwize")
    for count in (2.5, "a", 0, -2, True):
        with refuses(ValueError, f"num_heads must be a positive integer, not {count!r}"):
            Style("colwise_kv", num_heads=count)
        with refuses(ValueError, f"num_key_value_heads must be a positive integer, not {count!r}"):
            Style("colwise_kv", num_heads=4, num_key_value_heads=count)
    with refuses(ValueError, "num_key_value_heads=2", "without num_heads"):
        Style("colwise_kv", num_key_value_heads=2)
    with refuses(ValueError, "Embedding", "colwise"):
        parallelize_module(dense, ctx.mesh(tp), {"embed": Style("colwise")})


@split
def test_styles_for_torchs_parallelize_module(workers, tp, seed):
    workers.run(check_torch_styles, tp, seed)


def check_dtensor_inputs(ctx, tp, seed):
    """What torch's own styles leave before ours: a DTensor, laid out in whatever way."""
    mesh, columns = ctx.mesh(tp), {"colwise": -1, "colwise_gather": None, "rowwise": None, "vocab_embedding": None}
    for style, split_dim in {**columns, "replicate": None}.items():
        torch.manual_seed(seed + ctx.rank // tp)
        embedding = style == "vocab_embedding"
        dense = (nn.Embedding(37, 12) if embedding else nn.Linear(8, 12)).to(ctx.device, torch.float64)
        x = torch.rand(8, 8, dtype=torch.float64, device=ctx.device)
        x = torch.randint(37, (8, 8), device=ctx.device) if embedding else x.requires_grad_()
        expected = dense(x)
        for layout in (Replicate(), Shard(0), Shard(1)):
            layer = parallelize_module(copy.deepcopy(dense), mesh, Style(style))
            part = distribute_tensor(x.detach(), mesh, [layout])
            part = part if embedding else part.requires_grad_()
            out = layer(input=part) if layout == Shard(0) else layer(part)
            rank = mesh.get_local_rank()
            own = expected if split_dim is None else expected.chunk(tp, split_dim)[rank]
            assert_close(out, own.detach(), f"{style} of {layout}")
            grads = torch.autograd.grad(expected.square().sum(), [*dense.parameters(), *([] if embedding else [x])])
            expected = dense(x)
            out.square().sum().backward()
            for (name, param), grad in zip(dense.named_parameters(), grads, strict=False):
                assert_close(whole(layer.get_parameter(name).grad, param), grad, f"{name} of {style} of {layout}")
            if not embedding:
                assert_close(part.grad.full_tensor(), grads[-1], f"the input of {style} of {layout}")


@split
def test_styles_take_what_torchs_own_leave(workers, tp, seed):
    workers.run(check_dtensor_inputs, tp, seed)


def check_without_communication(ctx, tp, seed):
    torch.manual_seed(seed + ctx.rank)  # weights that differ: nobody has compared them
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(ctx.device)
    own = model[1].bias.detach().clone()
    parallelize_module(model, ctx.mesh(tp), {"0": Style("colwise"), "1": Style("rowwise")}, src_data_rank=None)
    assert isinstance(model[0].weight, DTensor) and torch.equal(model[1].bias.to_local(), own)
    torchs = parallelize_module(nn.Sequential(nn.Linear(8, 8)).to(ctx.device), ctx.mesh(tp), {"0": ColwiseParallel()})
    with refuses(ValueError, "weight is a DTensor already"):
        parallelize_module(torchs, ctx.mesh(tp), {"0": Style("colwise")})


@split
def test_styles_communicate_nothing_when_told_so(workers, tp, seed):
    workers.run(check_without_communication, tp, seed)


def check_tp_plan(ctx, seed):
    with torch.device("meta"):
        skeleton = build("llama")
    with refuses(ValueError, "colwize", "colwise_gather"):
        tp_plan(skeleton, {"mlp.up_proj": "colwize"})
    with refuses(TypeError, "automatic"):
        tp_plan(skeleton, "automatic")
    with refuses(TypeError, "3"):
        tp_plan(skeleton, 3)


def test_what_tp_plan_refuses(workers, seed):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    workers.run(on_four, check_tp_plan, seed)
