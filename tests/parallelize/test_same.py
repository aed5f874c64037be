"""Models that differ between the ranks of a mesh: every rank is told, whatever differs, and nothing hangs."""

import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import tpfused
from tests.parallelize.models import build
from tpfused.group import TPGroup
from tpfused.parallel import region, same
from tpfused.parallel.plan import auto_plan, match
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
    permute: r"1 of 5 tensors differ.*extra\.weight.*one seed",
    swap: r"2 of 5 tensors differ.*norm\.weight",
    lengthen: r"parameter 5 of 5 on rank 0 is \(none\), of 7 on rank \d \(3.weight \[3, 8\]",
    shorten: r"parameter 4 of 5 on rank 0 is \(last.weight .* of 4 on rank \d \(none\)",
    unframe: r"rank 0 is \(extra.bias .* rank \d \(last.weight",
    lose: r"rank 0 is \(extra.weight .* rank \d \(last.weight",
    lambda model: model.extra.to("meta"): r"extra.weight \[8, 8\] float32, with values.*, on the meta device",
    lambda model: model.extra.double(): r"extra.weight \[8, 8\] float32.* float64",
    lambda model: model.extra.requires_grad_(False): r"extra.weight \[8, 8\] float32, with values\), of .* frozen\)",
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
    with pytest.raises(ValueError, match="2 of 2 tensors differ between the ranks.*weight"):
        parallelize_module(dense_model(ctx.device), mesh, {"extra": Style("colwise_gather")})
    for layers, told in ((1, "tensors differ"), (1 + ctx.rank, "different models")):
        config = tpfused.TransformerConfig(37, 8, layers, num_heads=4, ffn_size=16, max_positions=16)
        with pytest.raises(ValueError, match=told):
            tpfused.parallelize(tpfused.ParallelTransformer(config, group=ALONE), mesh)


def test_models_that_differ_between_ranks(workers, seed):
    workers.run(check_different, seed)


def check_other_computation(ctx, seed):
    """The same weights, but what is computed with them differs on the last rank."""
    last, mesh, told = ctx.rank == ctx.world - 1, ctx.mesh(ctx.world), "different configs"

    def own(**changes) -> nn.Module:
        torch.manual_seed(seed)
        return tpfused.ParallelTransformer(tpfused.TransformerConfig(**OWN, **changes), group=ALONE)

    with pytest.raises(ValueError, match=f"{told}: causal is True on rank 0, but False on rank {ctx.world - 1}"):
        tpfused.parallelize(own(causal=not last), mesh)
    model = dense_model(ctx.device)
    model.register_buffer("scale", torch.ones(3) + last, persistent=False)
    torch.manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param)
    with pytest.raises(ValueError, match="1 of 6 tensors differ between the ranks of the mesh .scale"):
        tpfused.parallelize(model, mesh, {"extra": "colwise_gather"})


def test_computations_that_differ_between_ranks(workers, seed):
    if workers.world > 1:
        workers.run(check_other_computation, seed)


def check_other_config(ctx, seed, name, changes):
    torch.manual_seed(seed)
    model = build(name, **changes if ctx.rank == ctx.world - 1 else {})
    with pytest.raises(ValueError, match=f"different configs: {next(iter(changes))} is"):
        tpfused.parallelize(model, ctx.mesh(ctx.world))


@pytest.mark.parametrize("name, changes", [("llama", {"rms_norm_eps": 1.0}), ("gpt2", {"activation_function": "relu"})])
def test_configs_of_transformers_that_differ_between_ranks(workers, seed, name, changes):
    pytest.importorskip("transformers")
    if workers.world > 1:
        workers.run(check_other_config, seed, name, changes)


def check_ranks_named(ctx, seed):
    """Two groups side by side: what differs is on ranks of the program, not of the group."""
    mesh, plan = ctx.mesh(2), {"extra": "colwise_gather"}
    first, last = ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1
    torch.manual_seed(seed)
    model = dense_model(ctx.device)
    with pytest.raises(ValueError, match=rf"extra is 'colwise' on rank {first}, but 'colwise_gather' on rank {last}$"):
        tpfused.parallelize(model, mesh, plan if ctx.rank == last else {"extra": "colwise"})
    with pytest.raises(ValueError, match=rf"parameter 4 of 5 on rank {first} is .*, of 4 on rank {last} "):
        tpfused.parallelize(model[:2] if ctx.rank == last else model, mesh, plan)
    model.append(nn.LSTM(2, 2) if ctx.rank == last else nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=rf"on rank {first} .*on rank {last} .*; rank {last} raised ValueError: 3 is a"
    ):
        tpfused.parallelize(model, mesh, plan)


def test_ranks_are_named_by_their_global_numbers(workers, seed):
    if workers.world > 2:
        workers.run(check_ranks_named, seed)


class Doubled(nn.Linear):
    """The parameters of an nn.Linear, and another forward."""

    def forward(self, x):
        return 2 * super().forward(x)


class Unlike(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)


PLAN = {"extra": "colwise_gather"}


def double(model):
    model.extra.__class__ = Doubled
    return model, PLAN


# What the last rank alone is given, from a model as the others' -> the error, and what both it and the others say.
REFUSED = {
    lambda model: (model, {"extras": "colwise_gather"}): (ValueError, "match no module of Sequential: 'extras'"),
    lambda model: (model, {"extra": "colwize"}): (ValueError, "unknown styles.*colwize"),
    lambda model: (model, "automatic"): (TypeError, "'automatic'"),
    lambda model: (model, "auto"): (ValueError, "knows no place for"),
    lambda model: (model, {"norm": "colwise"}): (ValueError, "norm is a LayerNorm"),
    double: (ValueError, "extra is a Doubled"),
    lambda model: (Unlike(), PLAN): (ValueError, "lstm is a torch.nn.LSTM"),
    # Its parameters have no shapes yet.
    lambda model: (nn.Sequential(OrderedDict(extra=nn.LazyLinear(8))), PLAN): (
        ValueError,
        "an uninitialized parameter",
    ),
    lambda model: (None, PLAN): (TypeError, "nn.Module, not None"),
    lambda model: (nn.Sequential(tpfused.ColumnParallelLinear(8, 8, group=ALONE)), PLAN): (
        ValueError,
        "0 is a parallel layer of tpfused already",
    ),
}


def no_memory(param):
    raise RuntimeError("no memory for 64-bit integers")


def check_refused_on_one(ctx, seed):
    """Each of these the last rank finds out by itself: the others hear of it, and name that rank."""
    mesh, last = ctx.mesh(ctx.world), ctx.rank == ctx.world - 1
    for change, (kind, told) in REFUSED.items():
        torch.manual_seed(seed)
        model, plan = dense_model(ctx.device), PLAN
        if last:
            model, plan = change(model)
        with pytest.raises((kind, ValueError), match=told) as error:
            tpfused.parallelize(model, mesh, plan)
        if not last:
            assert f"rank {ctx.world - 1} raised {kind.__name__}: " in str(error.value)
            assert not any(hasattr(p, "placements") for p in model.parameters())

    torch.manual_seed(seed)
    with pytest.raises(
        ValueError, match=rf"extra is 'colwise' on rank 0, but 'colwise_gather' on rank {ctx.world - 1}"
    ):
        tpfused.parallelize(dense_model(ctx.device), mesh, PLAN if last else {"extra": "colwise"})

    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no memory for 64-bit integers"):
        if last:
            patch.setattr(same, "_bits", no_memory)
        tpfused.parallelize(dense_model(ctx.device), mesh, PLAN)

    for style, layer, told in (("rowwise", nn.Linear, "different styles"), ("colwise", Doubled, "is a Doubled")):
        torch.manual_seed(seed)
        model = nn.Sequential(layer(8, 8) if last else nn.Linear(8, 8))
        with pytest.raises(ValueError, match=told):
            parallelize_module(model, mesh, {"0": Style(style if last else "colwise")})
        assert not hasattr(model[0].weight, "placements")

    config = tpfused.TransformerConfig(37, 8, 1, num_heads=4, ffn_size=16, max_positions=16)
    model = tpfused.ParallelTransformer(config, group=ALONE)
    if last:
        model.norm.double()
    with pytest.raises(ValueError, match="float64"):
        tpfused.parallelize(model, mesh)


def test_what_one_rank_is_refused_all_hear_of(workers, seed):
    if workers.world > 1:
        workers.run(check_refused_on_one, seed)


def columns(**place) -> nn.Module:
    return nn.Sequential(*(tpfused.ColumnParallelLinear(4, 8, **place) for _ in range(2)))


def check_files(ctx, folder, seed):
    """A checkpoint that one rank cannot read, or a model that one cannot save: nobody waits for it."""
    grid, last = ctx.grid(ctx.world // 2 or 1), ctx.rank == ctx.world - 1
    told = f"rank {ctx.world - 1} raised " * (not last)
    torch.manual_seed(seed)
    model = columns(mesh=grid["tp"])
    if ctx.world > 1:
        fully_shard(model, mesh=grid["dp"])
    tpfused.save_sharded(model, folder)
    nn.init.zeros_(model[0].bias)
    with pytest.raises(FileNotFoundError, match=f"{told}.*nowhere"):
        tpfused.load_sharded(model, folder / "nowhere" if last else folder)
    assert not model[0].bias.to_local().any(), "the others have loaded"
    with pytest.raises(ValueError, match=f"(?s){told}.*2.weight"):
        if last:
            model.append(nn.Linear(2, 2))
        tpfused.load_sharded(model, folder)

    plain = columns(group=ctx.group(ctx.world), device=ctx.device)
    with pytest.raises(FileNotFoundError, match=f"{told}.*nowhere"):
        tpfused.load_sharded(plain, folder / "nowhere" if last else folder)

    with pytest.raises(TypeError, match=f"{told}.*5GB"):
        tpfused.save_sharded(plain, folder, **({"max_file_bytes": "5GB"} if last else {}))
    with pytest.raises(ValueError, match=rf"parameter 2 of 4 on rank 0 is .*, of 2 on rank {ctx.world - 1} "):
        tpfused.save_sharded(plain[:1] if last else plain, folder)
    with pytest.raises(OSError, match=r"rank 0 raised (File|NotADir)" if ctx.rank else "model.safetensors"):
        tpfused.save_sharded(plain, folder / "model.safetensors")


def test_files_that_one_rank_cannot_read_or_write(workers, seed, tmp_path):
    pytest.importorskip("safetensors")
    if workers.world > 1:
        workers.run(check_files, tmp_path, seed)


OWN = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 4, "ffn_size": 8, "max_positions": 8}
ATTENDS = {"attention": "attention", "attention.q": "colwise", "attention.out": "rowwise"}


class Attends(nn.Module):
    """Dropout on the hidden states, and of an attention module: a number and two modules, as libraries have them."""

    def __init__(self, hidden=0.0, attention_dropout=0.0, attn_dropout=0.0, resid_dropout=0.0):
        super().__init__()
        self.attention, self.after_attention = nn.Module(), nn.Dropout(hidden)
        self.attention.num_heads, self.attention.attention_dropout = 8, attention_dropout
        self.attention.attn_dropout, self.attention.resid_dropout = nn.Dropout(attn_dropout), nn.Dropout(resid_dropout)
        self.attention.q, self.attention.out = nn.Linear(8, 8), nn.Linear(8, 8)


def check_seeds(ctx, seed):
    """The last rank is seeded apart. A warning only in training mode, with dropout on what is whole on each rank."""

    def own(**changes) -> nn.Module:
        config = tpfused.TransformerConfig(**OWN, **changes)
        return tpfused.ParallelTransformer(config, group=ALONE, device=ctx.device)

    def warned(model: nn.Module, tp: int = ctx.world, rank_seed: int = seed + (ctx.rank == ctx.world - 1)) -> bool:
        torch.manual_seed(rank_seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpfused.parallelize(model, ctx.mesh(tp), "auto" if hasattr(model, "config") else ATTENDS)
        told = [warning for warning in caught if "torch.manual_seed(the same" in str(warning.message)]
        assert all(warning.filename == __file__ for warning in told)
        return bool(told)

    def built(make, *args, **kwargs) -> nn.Module:
        torch.manual_seed(seed)
        return make(*args, **kwargs).to(ctx.device)

    first = ctx.rank == 0
    for make, none in ((partial(Attends, hidden=0.1), Attends), (partial(own, dropout=0.1), own)):
        assert warned(built(make)) == first
        assert not warned(built(make).eval())
        assert not warned(built(none))
        assert not warned(built(make), rank_seed=seed)
    assert not warned(built(Attends, hidden=0.1), tp=1)

    assert not warned(built(Attends, attention_dropout=0.1)) and not warned(built(Attends, attn_dropout=0.1))
    assert warned(built(Attends, resid_dropout=0.1)) == first
    assert warned(built(Attends, hidden=0.1, attention_dropout=0.1)) == first
    assert not warned(built(own, attention_dropout=0.1))
    assert not warned(built(own, dropout=0.1, sequence_parallel=True))
    half = built(Attends, hidden=0.1)
    half.after_attention.eval()
    assert not warned(half)


RATES = [
    ("llama", {"attention_dropout": 0.1}, False),
    ("gpt2", {"attn_pdrop": 0.1}, False),
    ("gpt2", {"resid_pdrop": 0.1}, True),
    ("gpt2", {"embd_pdrop": 0.1}, True),
    ("bert", {"hidden_dropout_prob": 0.1}, True),
]


@pytest.mark.parametrize("name, rates, whole", RATES)
def test_which_dropout_of_transformers_must_be_common(name, rates, whole):
    pytest.importorskip("transformers")
    model = build(name, **rates).train()
    styles = match(model, auto_plan(model))
    assert region.drops_whole(model, styles) == whole and region.has_dropout(model)
    assert not region.drops_whole(model.eval(), styles) and region.has_dropout(model)


def test_dropout_of_ranks_that_are_seeded_apart(workers, seed):
    if workers.world > 1:
        workers.run(check_seeds, seed)
