"""Plans for models of one's own, dropout, and everything that is refused."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import tpfused
from tests.compare import assert_close, refuses
from tests.parallelize.models import build, whole
from tests.parallelize.own_models import (
    HEADS,
    PLAN,
    WIDTH,
    Attention,
    Model,
    check_equals,
    dense_model,
    on_four,
)
from tpfused import random
from tpfused.group import TPGroup
from tpfused.layers.embedding import VocabParallelEmbedding
from tpfused.layers.linear import ColumnParallelLinear
from tpfused.parallel.styles import Style

ALONE = TPGroup(None, 0, 1)
split = pytest.mark.parametrize("tp", [2, 4], indirect=True)


def check_custom(ctx, tp, seed):
    dense, model = dense_model(ctx, tp, seed), dense_model(ctx, tp, seed)
    names = list(model.state_dict())
    assert tpfused.parallelize(model, ctx.mesh(tp), PLAN) is model
    assert list(model.state_dict()) == names
    check_equals(ctx, dense, model)


class OtherNames(Attention):
    """The counts under the names that other code bases give them: torchtitan's and torchtune's."""

    def __init__(self, heads, kv_heads, kv_count):
        super().__init__()
        del self.num_heads, self.num_key_value_heads
        for layer in (self.k, self.v):
            layer.weight = nn.Parameter(layer.weight[: kv_count * WIDTH].detach().clone())
        self.k.bias = nn.Parameter(self.k.bias[: kv_count * WIDTH].detach().clone())
        self.names = heads, kv_heads
        setattr(self, heads, HEADS)
        setattr(self, kv_heads, kv_count)
        self.n_rep = HEADS // kv_count

    def forward(self, x):
        heads, kv_heads = (getattr(self, name) for name in self.names)
        q, k, v = (
            layer(x).unflatten(-1, (count, WIDTH)).transpose(1, 2)
            for layer, count in ((self.q, heads), (self.k, kv_heads), (self.v, kv_heads))
        )
        k, v = (part.repeat_interleave(self.n_rep, 1) for part in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def check_other_names(ctx, tp, seed):
    plan = {"0": "attention", "q": "colwise", "k": "colwise_kv", "v": "colwise_kv", "out": "rowwise"}
    for names in (("n_heads", "n_kv_heads"), ("num_heads", "num_kv_heads")):
        for kv_count in (1, 2):
            torch.manual_seed(seed + ctx.rank // tp)
            dense = nn.Sequential(OtherNames(*names, kv_count)).to(ctx.device, torch.float64)
            model = tpfused.parallelize(copy.deepcopy(dense), ctx.mesh(tp), plan)
            x = torch.randn(2, 7, 20, dtype=torch.float64, device=ctx.device)
            expected, actual = dense(x), model(x)
            assert_close(actual, expected.detach(), f"{names} of {kv_count}")
            expected.square().mean().backward()
            actual.square().mean().backward()
            found = dict(model.named_parameters())
            for name, param in dense.named_parameters():
                if param.grad is not None:
                    assert_close(whole(found[name].grad, param), param.grad, name)


@split
def test_head_counts_under_other_names(workers, tp, seed):
    workers.run(check_other_names, tp, seed)


@split
def test_a_plan_for_ones_own_model(workers, tp, seed):
    workers.run(check_custom, tp, seed)


def check_compiled(ctx, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(20), Attention()).to(ctx.device, torch.float64)
    plan = {"1": "attention", "q": "colwise", "k": "colwise_kv", "v": "colwise_kv", "1.norm": "replicate_sum"}
    tpfused.parallelize(model, ctx.mesh(ctx.world), plan | {"out": "rowwise"})
    x = torch.randn(2, 7, 20, dtype=torch.float64, device=ctx.device)
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = call(x)
        out.square().mean().backward()
        assert all(p.grad.placements == p.placements for p in model.parameters())
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results.append({"out": out.detach(), **grads})
    for name, value in results[0].items():
        assert_close(results[1][name], value, f"{name}, compiled")


def test_torch_compile(workers, seed):
    workers.run(check_compiled, seed)


def check_several_places(ctx, seed):
    torch.manual_seed(seed)
    dense = nn.ModuleDict({"embed": nn.Embedding(37, 20), "inner": nn.ModuleDict({"up": nn.Linear(20, 24)})})
    dense.update({"table": dense["embed"], "again": dense["inner"]["up"]})
    for plan in (
        {"table": "vocab_embedding", "again": "colwise_gather"},
        {"embed": "vocab_embedding", "up": "colwise"},
    ):
        model = tpfused.parallelize(copy.deepcopy(dense), ctx.mesh(4), plan)
        assert isinstance(model["embed"], VocabParallelEmbedding) and isinstance(model["again"], ColumnParallelLinear)
        assert model["table"] is model["embed"] and model["again"] is model["inner"]["up"]
    with refuses(ValueError, "inner.up", "colwise", "rowwise"):
        tpfused.parallelize(dense, ctx.mesh(4), {"again": "colwise", "up": "rowwise"})


def test_a_module_that_stands_in_several_places(workers, seed):
    workers.run(on_four, check_several_places, seed)


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 32)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        self.part = self.inside(torch.ones_like(self.up(x)))
        return self.outside(torch.ones_like(self.down(self.part)))


def check_half_a_pair(ctx, tp, seed):
    """A "colwise" layer before one that has no style: what the other gets is this rank's part."""
    torch.manual_seed(seed)
    for features in (16, 10):  # of 10, four ranks have 3, 3, 3 and 1
        layers = OrderedDict(up=nn.Linear(8, features), act=nn.ReLU(), down=nn.Linear(features, 8))
        model = tpfused.parallelize(nn.Sequential(layers).to(ctx.device), ctx.mesh(tp), {"up": "colwise"})
        with pytest.raises(ValueError, match=f"{features} inputs, whole on each rank, got .*'rowwise'"):
            model(torch.ones(3, 8, device=ctx.device))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):  # of no rank's part
            model.down(torch.ones(3, 7, device=ctx.device))
        assert model.down(torch.ones(3, features, device=ctx.device)).shape == (3, 8)


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_half_a_pair(workers, tp, seed):
    workers.run(check_half_a_pair, tp, seed)


def check_dropout(ctx, tp, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(Dropouts()).to(ctx.device)
    tpfused.parallelize(model.eval(), ctx.mesh(tp), {"up": "colwise", "down": "rowwise"}).train()
    torch.manual_seed(seed)
    x = torch.randn(16, 8, device=ctx.device)
    out = [model(x) for _ in range(2)]
    result = model[0].part.detach().cpu(), [o.detach().cpu() for o in out], torch.rand(3, device=ctx.device).cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match=f"CUDA graph .* of {tp}.* eval mode .* parallelize"):
            model(x)
        model.eval()(x)
    model.train()[0].inside = None  # fails with the region open
    with pytest.raises(TypeError):
        model(x)
    return result, torch.rand(3, device=ctx.device).cpu()


@split
def test_ranks_draw_dropout_apart_inside_and_alike_outside(workers, tp, seed):
    (first, after), (second, after_second) = workers.run(check_dropout, tp, seed)[:2]
    assert not torch.equal(first[0][:, : 32 // tp], second[0][:, : 32 // tp])
    assert 0.2 < (first[0] == 0).float().mean() < 0.8
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert not torch.equal(first[1][0], first[1][1])
    assert torch.equal(first[2], second[2]) and torch.equal(after, after_second)


def check_refusals(ctx, seed):
    mesh = ctx.mesh(4)

    def split(model, plan="auto", over=mesh):
        return tpfused.parallelize(model, over, plan)

    with refuses(ValueError, "one-dimensional", 'mesh["tp"]', (1, 4)):
        split(Model(), PLAN, ctx.grid(4))
    with refuses(TypeError, "DeviceMesh", "int"):
        split(Model(), PLAN, 4)
    with refuses(TypeError, "init_device_mesh"):
        split(Model(), PLAN, None)
    with refuses(TypeError, "automatic"):
        split(Model(), "automatic")
    with refuses(ValueError, "colwize", "colwise_gather"):
        split(Model(), {"extra": "colwize"})
    # Torch's own styles, and `Style`, are for its parallelize_module.
    for style, name in (
        (ColwiseParallel(), "colwise"),
        (ColwiseParallel(output_layouts=Replicate()), "colwise_gather"),
        (RowwiseParallel(), "rowwise"),
        (Style("vocab_embedding"), "vocab_embedding"),
    ):
        with refuses(ValueError, f"'extra' has a {type(style).__name__}", f"write {name!r}", f"Style({name!r})"):
            split(Model(), {"extra": style})
    with refuses(ValueError, "unknown styles", "SequenceParallel", "replicate"):
        split(Model(), {"extra": SequenceParallel()})
    with refuses(ValueError, "layers.*.gateup", "gate_up", "Model"):
        split(Model(), {**PLAN, "layers.*.gateup": "colwise"})
    with refuses(ValueError, "layers.1.out", "rowwise", "colwise"):
        split(Model(), {**PLAN, "layers.1.o*": "colwise"})
    with refuses(ValueError, "norm", "LayerNorm", "colwise"):
        split(Model(), {"norm": "colwise"})
    with refuses(ValueError, "embed is a", "'rowwise', but 'vocab_embedding'"):
        split(Model(), {"embed": "rowwise"})
    with refuses(ValueError, "vocab_head", "loss_function", "cross_entropy"):
        split(Model(), {**PLAN, "head": "vocab_head"})
    with refuses(ValueError, "embed is 'vocab_embedding'", "head is 'replicate'"):
        split(Model(), {key: PLAN[key] for key in ("embed",)})
    with refuses(ValueError, "0", "mesh=", "ParallelTransformer"):
        split(nn.Sequential(tpfused.ColumnParallelLinear(8, 8, group=ctx.group(4))), {})
    twice = split(nn.Sequential(nn.Linear(8, 8)).to(ctx.device), {"0": "colwise_gather"})
    with refuses(ValueError, "0 is a parallel layer", "already: parallelize a model once"):
        split(twice, {"0": "colwise_gather"})
    config = tpfused.TransformerConfig(37, 6, 1, 6, 16, 16)
    with refuses(ValueError, "6 attention heads and 6 key-value heads", "over 4 tensor-parallel", "over 1, 2, 3, 6"):
        split(tpfused.ParallelTransformer(config, group=ALONE))
    with refuses(ValueError, "6 attention heads and 3 key-value heads", "over 2 tensor-parallel", "over 1, 3, 6"):
        split(tpfused.ParallelTransformer(replace(config, num_kv_heads=3), group=ALONE), over=ctx.mesh(2))
    with refuses(ValueError, "float32", "float64"):
        mixed = tpfused.ParallelTransformer(replace(config, hidden_size=8, num_heads=4), group=ALONE)
        mixed.norm.double()
        split(mixed)
    odd = Model()
    odd.layers[2].gate_up = nn.Linear(20, 61)
    with refuses(ValueError, 61, 8, "gate_up"):
        split(odd, PLAN)
    odd = Model()
    odd.layers[1].n_head = 6
    with refuses(ValueError, "layers.1", 6, 4, "1, 2, 3, 6"):
        split(odd, PLAN)
    changed = Model()
    changed.embed = nn.Embedding(37, 20, max_norm=1.0)
    with refuses(ValueError, "max_norm"):
        split(changed, {"embed": "vocab_embedding"})
    hooked = Model()
    hooked.extra.forward = hooked.extra.forward
    with refuses(ValueError, "extra", "Linear's", "accelerate"):
        split(hooked, PLAN)
    with refuses(ValueError, "the model", "Model", "colwise"):
        split(Model(), {"*": "colwise"})
    with refuses(TypeError, "names of modules", 3):
        split(Model(), {3: "colwise"})
    with refuses(ValueError, "the model", "DistributedDataParallel", "fully_shard"):
        split(nn.parallel.DistributedDataParallel(Model().to(ctx.device), process_group=ctx.group(4)), PLAN)
    odd = Model()
    odd.head = nn.Linear(20, 37)
    odd.extra.gain = nn.Parameter(torch.ones(1))
    with refuses(ValueError, "extra", "gain", "colwise_gather"):
        split(odd, PLAN)
    odd.extra = nn.Linear(20, 20).requires_grad_(False)
    odd.extra.weight.data = odd.extra.weight.data.to(torch.float8_e4m3fn)
    with refuses(ValueError, "extra", "float8", "16 bits"):
        split(odd, PLAN)
    assert type(odd.embed) is nn.Embedding  # nothing was changed before
    with refuses(ValueError, "0", "torch.nn.LSTM"):
        split(nn.Sequential(nn.LSTM(4, 4)), {})
    with refuses(ValueError, "extra", "parametrized"):
        odd = Model()
        nn.utils.parametrizations.weight_norm(odd.extra)
        odd.extra.__class__.forward = nn.Linear.forward
        split(odd, {"extra": "colwise_gather"})
    nameless = torch.distributed.device_mesh.DeviceMesh.from_group(ctx.group(4), ctx.device.type)
    split(Model(), PLAN, nameless)  # two key-value heads on all ranks of the program: no name is needed


def test_what_is_refused(workers, seed):
    workers.run(on_four, check_refusals, seed)


def check_transformers_refusals(ctx, seed):
    import transformers

    mesh = ctx.mesh(4)
    with refuses(ValueError, "12 attention heads", "3 key-value heads", "4 tensor-parallel", "1, 3, 6, 12"):
        tpfused.parallelize(build("llama", hidden_size=48, num_attention_heads=12, num_key_value_heads=3), mesh)
    with refuses(ValueError, "6 attention heads", "1, 2, 3, 6"):
        tpfused.parallelize(build("gpt2", n_embd=24, n_head=6), mesh)
    sizes = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    unknown = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, intermediate_size=16))
    with refuses(ValueError, "GPTNeoXForCausalLM", "gpt_neox", "llama, mistral"):
        tpfused.parallelize(unknown, mesh)
    crossed = build("gpt2", add_cross_attention=True)
    with refuses(ValueError, "transformer.h.*.crossattention.q_attn: Conv1D"):
        tpfused.parallelize(crossed, mesh)
    model = tpfused.parallelize(build("bert"), mesh)
    with refuses(ValueError, "already"):
        tpfused.parallelize(model, mesh)


def test_what_is_refused_of_transformers(workers, seed):
    pytest.importorskip("transformers")
    workers.run(on_four, check_transformers_refusals, seed)


def check_parameters_between(ctx):
    """What "auto" does not know, in the midst of what is split, would have a part of its gradient on each rank."""
    mesh, model = ctx.mesh(ctx.world), build("llama")
    attention = model.model.layers[1].self_attn
    attention.q_norm = type(model.model.norm)(attention.head_dim)
    with refuses(ValueError, "model.layers.*.self_attn.q_norm: LlamaRMSNorm", "self_attn.q_norm': 'replicate_sum'"):
        tpfused.parallelize(model, mesh)
    del attention.q_norm
    attention.temperature = nn.Parameter(torch.ones(()))
    with refuses(ValueError, "temperature of model.layers.1.self_attn"):
        tpfused.parallelize(model, mesh)


def test_parameters_between_what_is_split(workers):
    pytest.importorskip("transformers")
    workers.run(check_parameters_between)


class Called(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def check_other_calls(ctx):
    mesh, pair = ctx.mesh(ctx.world), OrderedDict(up=Called(8, 8), down=nn.Linear(8, 8))
    with refuses(ValueError, "up is a Called, which has a __call__ of its own"):
        tpfused.parallelize(nn.Sequential(pair), mesh, {"up": "colwise", "down": "rowwise"})
    model = nn.Sequential(OrderedDict(up=nn.Linear(8, 8), down=nn.Linear(8, 8)))
    model.down.weight.data = model.up.weight.data
    with refuses(ValueError, "up.weight and down.weight are two parameters in the same memory"):
        tpfused.parallelize(model, mesh, {"up": "colwise", "down": "rowwise"})


def test_layers_that_are_called_or_tied_otherwise(workers):
    workers.run(check_other_calls)
