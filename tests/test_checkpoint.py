"""Whole state dicts out of and into every layout, at every degree, and the optimizer's beside them."""

import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import tpfused
from tests.compare import assert_close
from tests.layouts import (
    backward,
    batch,
    dense,
    every_case,
    laid_out,
    skip_impossible,
)
from tpfused.checkpoint import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from tpfused.group import TPGroup
from tpfused.parallel.layers import StoredColumnParallelLinear

# A large eps: the gradient of the keys' biases is zero but for rounding, which Adam would blow up.
OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-4, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-4, fused=True, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd_plain": lambda params: torch.optim.SGD(params, lr=0.1),
}


def shared(state):
    """Rank 0's result, on every rank."""
    box = [state]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def assert_equal(state, expected):
    assert list(state) == list(expected)
    different = [name for name in expected if not torch.equal(state[name], expected[name])]
    assert not different, different


# Models


def check_no_safetensors(ctx, folder):
    """On all ranks, or on the last one alone: all are told before anything is read or written."""
    model = tpfused.ColumnParallelLinear(4, 8, device=ctx.device)
    tpfused.save_sharded(model, folder)
    before = sorted(file.name for file in folder.iterdir())
    for hidden in (True, ctx.rank == ctx.world - 1):
        with patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None} if hidden else {}):
            for call in (tpfused.load_sharded, tpfused.save_sharded):
                with pytest.raises(ImportError, match=f"{call.__name__} .*pip install safetensors"):
                    call(model, folder)
            assert len(full_state_dict(model)) == (2 if ctx.rank == 0 else 0)  # which needs none
    assert sorted(file.name for file in folder.iterdir()) == before
    tpfused.load_sharded(model, folder)


def test_without_safetensors(workers, tmp_path):
    pytest.importorskip("safetensors")
    workers.run(check_no_safetensors, tmp_path)


def check_layout(ctx, config, layout, tp, seed):
    expected = full_state_dict(dense(config, seed, ctx.device))
    saved = full_state_dict(laid_out(ctx, config, layout, tp, seed))
    assert saved == {} or ctx.rank == 0
    expected, saved = shared(expected), shared(saved)
    assert_equal(saved, expected)
    other = laid_out(ctx, config, layout, tp, seed + 1)
    load_full_state_dict(other, expected)
    assert_equal(shared(full_state_dict(other)), expected)
    return expected


@every_case
def test_every_layout_saves_and_loads_the_dense_models_tensors(workers, config, layout, tp, seed):
    skip_impossible(config, layout, tp)
    workers.run(check_layout, config, layout, tp, seed)


def test_names_and_shapes_are_unpacked():
    assert {name: tuple(tensor.shape) for name, tensor in full_state_dict(dense("tied", 0)).items()} == {
        "embedding.weight": (5, 8),
        "blocks.0.attention_norm.weight": (8,),
        "blocks.0.attention.q.weight": (8, 8),
        "blocks.0.attention.k.weight": (2, 8),
        "blocks.0.attention.v.weight": (2, 8),
        "blocks.0.attention.out.weight": (8, 8),
        "blocks.0.mlp_norm.weight": (8,),
        "blocks.0.mlp.gate.weight": (16, 8),
        "blocks.0.mlp.up.weight": (16, 8),
        "blocks.0.mlp.down.weight": (8, 16),
        "norm.weight": (8,),
    }


def test_any_module_is_saved_as_its_state_dict_in_memory_of_its_own():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    saved, expected = full_state_dict(model), model.state_dict()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[n], expected[n]) for n in saved)
    assert all(saved[n].dtype == expected[n].dtype for n in saved)
    model.requires_grad_(False)[0].weight.zero_()
    assert saved["0.weight"].any()


@pytest.mark.parametrize("state, error", [({}, ValueError), (None, TypeError)])
def test_what_other_ranks_than_the_first_have_of_a_state_is_refused(state, error):
    with pytest.raises(error, match="every rank"):
        load_full_state_dict(nn.Linear(2, 2), state)


def test_a_model_on_the_meta_device_is_refused():
    for call in (full_state_dict, lambda model: full_optimizer_state(model, meta_sgd(model))):
        with pytest.raises(ValueError, match="2 tensors are on the meta device .*nothing to save"):
            call(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="to_empty"):
        load_full_state_dict(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).state_dict())


def meta_sgd(model):
    """An SGD with momentum beside a model on the meta device, where it keeps its own."""
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model(torch.ones(2, device="meta")).sum().backward()
    optimizer.step()
    return optimizer


def check_gathered_for_forward(ctx, tp, seed):
    """Without a backward, FSDP2 leaves the root's parameters gathered."""
    model = laid_out(ctx, "gpt", "fsdp2", tp, seed)
    expected = shared(full_state_dict(dense("gpt", seed, ctx.device)))
    ids = batch(ctx, "gpt", seed)
    with torch.no_grad():
        before = model(ids)
        assert_equal(shared(full_state_dict(model)), expected)
        model(ids)
        load_full_state_dict(model, {name: 2 * tensor for name, tensor in expected.items()})
        doubled = model(ids)
        model(ids)
        load_full_state_dict(model, expected)
        assert torch.equal(model(ids), before) and not torch.equal(doubled, before)


def test_fsdp2_after_a_forward_without_backward(workers, tp, seed):
    workers.run(check_gathered_for_forward, tp, seed)


def check_compiled(ctx, seed):
    model = laid_out(ctx, "llama", "plain", ctx.world, seed)
    model.blocks[0] = torch.compile(model.blocks[0])
    expected = shared(full_state_dict(dense("llama", seed, ctx.device)))
    model = nn.parallel.DistributedDataParallel(
        torch.compile(model), process_group=ctx.grid(ctx.world)["dp"].get_group()
    )
    assert_equal(shared(full_state_dict(model)), expected)


def test_wrappers_leave_no_trace(workers, seed):
    workers.run(check_compiled, seed)


class Forwarding(nn.Module):
    """A wrapper of a program's own, with a parameter of its own; it gives all attributes of what is in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


WRAPPERS = {
    "compile": torch.compile,
    "checkpoint": checkpoint_wrapper,
    "offload": offload_wrapper,
    "both": lambda module: torch.compile(checkpoint_wrapper(module)),
    "own": Forwarding,
}


def wrap_all(module, wrap, but=()):
    """Each module in it that has parameters in it, but those of some names."""
    for name, child in list(module.named_children()):
        wrap_all(child, wrap, but)
        if name not in but and any(True for _ in child.parameters()):
            setattr(module, name, wrap(child))


def check_wrapped_layers(ctx, config, layout, wrapper, seed):
    expected = shared(full_state_dict(dense(config, seed, ctx.device)))
    model = laid_out(ctx, config, layout, ctx.world, seed)
    leaves_trace = wrapper == "own"  # as in its own state_dict, where packed projections have another name
    wrap_all(model, WRAPPERS[wrapper], ("qkv", "gate_up") if leaves_trace else ())
    saved = shared(full_state_dict(model))
    plain = {name.replace("inner.", ""): each for name, each in saved.items() if not name.endswith("scale")}
    assert_equal(plain, expected)
    assert (list(plain) != list(saved)) == leaves_trace
    load_full_state_dict(model, {name: 2 * tensor for name, tensor in saved.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = 3 * param.detach()
    optimizer.step()
    moments = shared(full_optimizer_state(model, optimizer))
    assert_equal(moments, {f"{name}.momentum_buffer": 6 * tensor for name, tensor in saved.items()})
    load_full_optimizer_state(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), moments)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("config, layout", [("gpt", "plain"), ("llama", "plain"), ("llama", "mesh")])
def test_each_layer_in_a_wrapper(workers, config, layout, wrapper, seed):
    workers.run(check_wrapped_layers, config, layout, wrapper, seed)


def test_a_wrapper_around_a_layer_that_stores_several_tensors_in_one():
    layer = StoredColumnParallelLinear(2, 6, parts=3, group=TPGroup(None, 0, 1))
    assert {name: tuple(each.shape) for name, each in full_state_dict(Forwarding(layer)).items()} == {
        "scale": (6,),
        "inner.weight": (6, 2),
        "inner.bias": (6,),
    }


def test_a_parametrized_layer_is_still_refused():
    layer = tpfused.ColumnParallelLinear(2, 6, group=TPGroup(None, 0, 1))
    layer._shards["weight"] = None  # as of several ranks
    nn.utils.parametrizations.weight_norm(layer)
    for wrap in (lambda module: module, *WRAPPERS.values()):
        with pytest.raises(ValueError, match="weight is parametrized or pruned"):
            full_state_dict(wrap(layer))


# Optimizers


def train(ctx, model, optimizer, config, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, batch(ctx, config, seed))
        optimizer.step()


def check_optimizer(ctx, optimizer, config, first, second, used, seed):
    model, other = laid_out(ctx, config, *first, seed), laid_out(ctx, config, *second, seed + 1)
    make = OPTIMIZERS[optimizer]
    own, others = make(model.parameters()), make(other.parameters())
    train(ctx, model, own, config, [1, 2])
    if used:
        train(ctx, other, others, config, [3, 4, 5])
    saved = shared(full_state_dict(model)), shared(full_optimizer_state(model, own))
    load_full_state_dict(other, saved[0])
    load_full_optimizer_state(other, others, saved[1])
    assert_equal(shared(full_state_dict(other)), saved[0])
    restored = shared(full_optimizer_state(other, others))
    assert restored.keys() == saved[1].keys() and all(map(torch.equal, map(restored.get, saved[1]), saved[1].values()))
    train(ctx, model, own, config, [6])
    train(ctx, other, others, config, [6])
    states = shared(full_state_dict(model)), shared(full_state_dict(other))
    if first == second and ctx.device.type == "cpu":
        assert_equal(*states)
    for name in states[0]:
        assert_close(states[1][name], states[0][name], name)
    return list(saved[1])


@pytest.mark.parametrize(
    "optimizer, config, first, second, used",
    [
        ("adam", "gpt", ("plain", 4), ("plain", 4), False),
        ("adam", "gpt", ("plain", 4), ("fsdp2", 2), True),
        ("adam", "tied", ("plain", 1), ("mesh", 4), True),
        ("adam", "tied", ("fsdp2", 2), ("plain", 1), False),
        ("adam", "llama", ("fsdp2", 2), ("fsdp2", 2), False),
        ("adam", "llama", ("fsdp2", 1), ("ddp", 2), False),
        ("adamw_fused", "llama", ("mesh", 4), ("plain", 2), True),
        ("adamw_fused", "gpt", ("plain", 1), ("fsdp2", 2), False),
        ("sgd", "tied", ("plain", 4), ("fsdp2", 1), True),
        ("sgd_plain", "llama", ("plain", 2), ("plain", 4), False),
    ],
)
def test_optimizer_state_moves_and_the_next_step_is_the_same(workers, optimizer, config, first, second, used, seed):
    if workers.world < 4:
        pytest.skip("needs 4 ranks")
    keys = {"adam": 3, "adamw_fused": 4, "sgd": 1, "sgd_plain": 0}[optimizer]
    names = workers.run(check_optimizer, optimizer, config, first, second, used, seed)[0]
    assert len(names) == keys * len(full_state_dict(dense(config, 0)))


def trained(optimizer, seed=0, config="llama"):
    model = dense(config, seed)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_are_the_parameters_with_a_key():
    state = full_optimizer_state(*trained("adam"))
    assert state["blocks.0.attention.v.weight.exp_avg"].shape == (4, 8)
    assert state["blocks.0.attention.v.weight.step"] == 1


def test_hyper_parameters_stay():
    model, optimizer = trained("adam")
    state = full_optimizer_state(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    load_full_optimizer_state(model, optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_parameter_without_state_starts_afresh():
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = OPTIMIZERS["adam"](layers.parameters())
    layers[1](torch.ones(2)).sum().backward()
    optimizer.step()
    state = full_optimizer_state(layers, optimizer)
    assert all(name.startswith("1.") for name in state)
    layers[0](torch.ones(2)).sum().backward()
    optimizer.step()
    load_full_optimizer_state(layers, optimizer, state)
    assert_equal(full_optimizer_state(layers, optimizer), state)


def test_one_error_lists_all_that_does_not_fit_the_optimizer_and_nothing_changes():
    model, optimizer = trained("adam")
    before = full_optimizer_state(model, optimizer)
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    del state["blocks.0.attention.k.weight.exp_avg"], state["norm.weight.step"]
    state["head.weight.exp_avg_sq"] = torch.zeros(8, 13)
    state["positions.weight.step"] = torch.zeros(())
    with pytest.raises(ValueError) as raised:
        load_full_optimizer_state(model, optimizer, state)
    assert str(raised.value).splitlines() == [
        "the checkpoint does not fit the model: 2 tensors missing, 1 extra, 1 of another shape",
        "  missing: blocks.0.attention.k.weight.exp_avg (4, 8)",
        "  missing: norm.weight.step (8,)",
        "  extra: positions.weight.step",
        "  of another shape: head.weight.exp_avg_sq (8, 13), not (13, 8)",
    ]
    assert_equal(full_optimizer_state(model, optimizer), before)


def test_parameters_of_another_model_are_refused():
    (model, _), (_, optimizer) = trained("adam"), trained("adam")
    for call in (full_optimizer_state, lambda *pair: load_full_optimizer_state(*pair, {})):
        with pytest.raises(ValueError, match="9 of the optimizer's 9 parameters"):
            call(model, optimizer)


def test_factored_state_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="weight.row_var"):
        full_optimizer_state(model, optimizer)


@pytest.mark.parametrize("odd", [None, "x", 3, [1.0], {}])
def test_what_is_no_model_optimizer_or_state_is_named(odd, tmp_path):
    model, kind = nn.Linear(2, 2), type(odd).__name__
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        lambda: full_state_dict(odd),
        lambda: load_full_state_dict(odd, {}),
        lambda: full_optimizer_state(odd, optimizer),
        lambda: load_full_optimizer_state(odd, optimizer, {}),
        lambda: tpfused.load_sharded(odd, tmp_path),
        lambda: tpfused.save_sharded(odd, tmp_path),
    ):
        with pytest.raises(TypeError, match=f"the model must be an nn.Module, not {kind}"):
            call()
    for call in (
        lambda: full_optimizer_state(model, odd),
        lambda: load_full_optimizer_state(model, odd, {}),
    ):
        with pytest.raises(TypeError, match=f"optimizer must be .*, not {kind}"):
            call()
    if odd == {}:
        return
    for call in (
        lambda: load_full_state_dict(model, odd),
        lambda: load_full_optimizer_state(model, optimizer, odd),
    ):
        with pytest.raises(TypeError, match=f"state must be a mapping .*, not {kind}"):
            call()
