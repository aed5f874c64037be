"""What the functions that load a whole state are given: any mapping, odd tensors, and what does not fit."""

import re
import weakref
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor

import tpfused
from tests.layouts import dense, laid_out
from tests.test_checkpoint import assert_equal, shared
from tpfused.checkpoint import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)


class Reader(Mapping):
    """Makes each tensor when it is asked for, as a file reader does, and counts those alive."""

    def __init__(self, state, fails=False):
        self.state, self.alive, self.most, self.fails = state, 0, 0, fails
        self.asked = Counter()

    def __getitem__(self, name):
        self.asked[name] += 1
        if self.fails and self.asked[name] == 3 and name == "norm.weight":
            raise OSError("the disk went away")
        tensor = self.state[name].clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self):
        self.alive -= 1

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


def test_a_lazy_mapping_is_read_a_tensor_at_a_time():
    reader, model = Reader(full_state_dict(dense("llama", 0))), dense("llama", 1)
    load_full_state_dict(model, reader)
    assert_equal(full_state_dict(model), reader.state)
    assert reader.most <= 3  # q, k and v of one projection
    assert set(reader.asked.values()) == {2}


def check_reading(ctx, tp, seed):
    model, state = laid_out(ctx, "llama", "plain", tp, seed), shared(full_state_dict(dense("llama", 1)))
    reader = Reader(state)
    load_full_state_dict(model, reader)
    assert set(reader.asked.values()) == {3}  # as its docstring says, and once less of one rank
    first = dist.get_rank(ctx.group(tp)) == 0
    with pytest.raises(OSError, match="the disk went away" if first else "^rank . raised OSError: the disk went away"):
        load_full_state_dict(model, Reader(state, fails=first))


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_what_reading_fails_with_is_raised_on_every_rank(workers, tp, seed):
    workers.run(check_reading, tp, seed)


def check_refusals(ctx, tp, seed):
    model = laid_out(ctx, "llama", "plain", tp, seed)
    before = [param.clone() for param in model.parameters()]
    state = shared(full_state_dict(model))
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    del state["blocks.0.attention.k.weight"], state["norm.weight"]
    state["blocks.0.mlp.gate.weight"] = torch.zeros(15, 8)
    state["head.weight"] = torch.zeros(13)
    state["blocks.0.attention.qkv.weight"] = torch.zeros(16, 8)
    with pytest.raises(ValueError) as raised:
        load_full_state_dict(model, state)
    assert all(map(torch.equal, model.parameters(), before))
    return str(raised.value)


def test_one_error_lists_all_that_does_not_fit_and_nothing_changes(workers, tp, seed):
    for message in workers.run(check_refusals, tp, seed):
        assert message.splitlines() == [
            "the checkpoint does not fit the model: 2 tensors missing, 1 extra, 2 of another shape",
            "  missing: blocks.0.attention.k.weight (4, 8)",
            "  missing: norm.weight (8,)",
            "  extra: blocks.0.attention.qkv.weight",
            "  of another shape: blocks.0.mlp.gate.weight (15, 8), not (16, 8)",
            "  of another shape: head.weight (13,), not (13, 8)",
        ]


def check_other_states(ctx, tp, seed):
    """What each rank has drawn for itself: of no one model."""
    torch.manual_seed(seed + ctx.rank)
    layer = tpfused.ColumnParallelLinear(4, 8, group=ctx.group(tp), device=ctx.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    state, before = nn.Linear(4, 8).state_dict(), layer.weight.detach().clone()
    told = "the ranks give different states: 2 of 2 tensors begin with other entries on rank"
    with pytest.raises(ValueError, match=told):
        load_full_state_dict(layer, state)
    with pytest.raises(ValueError, match=told):
        load_full_optimizer_state(layer, optimizer, {f"{name}.momentum_buffer": each for name, each in state.items()})
    assert torch.equal(layer.weight, before) and not optimizer.state


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_states_that_differ_between_ranks(workers, tp, seed):
    workers.run(check_other_states, tp, seed)


def check_odd_states(ctx, tp):
    """Views, and numbers of other libraries."""
    layer = tpfused.ColumnParallelLinear(4, 8, group=ctx.group(tp), device=ctx.device)
    negative = torch.arange(8.0).mul(1j).conj().imag
    assert negative.is_neg()
    state = {"weight": torch.arange(64.0).reshape(4, 16)[:, ::2].t(), "bias": negative}
    load_full_state_dict(layer, state)
    restored = full_state_dict(layer)
    if ctx.rank == 0:
        assert_equal(restored, state)
    optimizer = torch.optim.Adam(layer.parameters())
    moments = {f"{name}.exp_avg{which}": tensor for name, tensor in state.items() for which in ("", "_sq")}
    steps = {"weight.step": np.float32(3), "bias.step": 3.0}
    load_full_optimizer_state(layer, optimizer, moments | steps)
    assert [float(each["step"]) for each in optimizer.state.values()] == [3.0, 3.0]
    for given, told in (
        ({"weight": state["weight"].to_sparse()}, "weight, not a sparse_coo one"),
        ({"bias": state["bias"].to("meta")}, "bias, not one on the meta device"),
    ):
        with pytest.raises(ValueError, match=f"a tensor is wanted: {told}"):
            load_full_state_dict(layer, state | given)
    for given, told in (
        ({"weight.step": None}, "a tensor is wanted: weight.step, not NoneType"),
        ({"bias.step": "x"}, "a tensor is wanted: bias.step, not str"),
        ({5: 1.0}, "extra: 5"),
    ):
        with pytest.raises(ValueError, match=told):
            load_full_optimizer_state(layer, optimizer, moments | steps | given)


def test_states_of_views_and_of_numbers_of_other_libraries(workers, tp):
    workers.run(check_odd_states, tp)


class Lazy:
    """What is sliced as a tensor is, and is none."""

    shape, dtype = (4, 2), torch.float32

    def __getitem__(self, box):
        return torch.ones(self.shape)[box]


class Labelled(torch.Tensor):
    """A subclass that computes as its base does."""


def odd_tensors(mesh):
    """By what they are called: none of these can be loaded as it is, in place of ``torch.ones(4, 2)``."""
    ones = torch.ones(4, 2)
    with FakeTensorMode():
        fake = torch.ones(4, 2)
    return [
        ("a DTensor: give its full_tensor()", distribute_tensor(ones.to(mesh.device_type), mesh, [Replicate()])),
        ("a DTensor: give its full_tensor()", distribute_tensor(ones.to(mesh.device_type), mesh, [Shard(0)])),
        ("a nested one", torch.nested.nested_tensor([ones, ones])),
        ("a nested one", torch.nested.nested_tensor([ones, ones], layout=torch.jagged)),
        ("a sparse_coo one", ones.to_sparse()),
        ("a quantized one", torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8)),
        ("an uninitialised one", nn.UninitializedParameter()),
        ("one on the meta device", ones.to("meta")),
        ("torch._subclasses.fake_tensor.FakeTensor", fake),
        ("torch.masked.maskedtensor.core.MaskedTensor", masked_tensor(ones, ones > 0)),
        ("dict", {"weight": ones}),
        ("list", [ones]),
        ("list", ones.tolist()),
        ("numpy.ndarray", ones.numpy()),
        ("tests.test_loaded_states.Lazy", Lazy()),
        ("NoneType", None),
        ("str", "weight"),
        ("torch._C._TensorMeta", torch.Tensor),  # its shape is none
    ]


def odd_numbers():
    return [
        ("list", [1.0]),
        ("complex", 1j),
        ("int", 2**70),
        ("fractions.Fraction", Fraction(1, 2)),
        ("decimal.Decimal", Decimal(1)),
        ("numpy.ndarray", np.array(1.0)),
        ("a quantized one", torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.quint8)),
    ]


def check_kinds(ctx, tp):
    """On all ranks, or on one of each group alone: all raise, and nothing has changed."""
    layer = tpfused.ColumnParallelLinear(2, 4, bias=False, group=ctx.group(tp), device=ctx.device)
    optimizer = torch.optim.Adam(layer.parameters())
    before = layer.weight.detach().clone()
    ones = torch.ones(4, 2)
    moments = {f"weight.{key}": ones for key in ("exp_avg", "exp_avg_sq")} | {"weight.step": 1.0}

    def load_model(odd):
        load_full_state_dict(layer, {"weight": odd})

    def load_moment(odd):
        load_full_optimizer_state(layer, optimizer, moments | {"weight.exp_avg": odd})

    def load_number(odd):
        load_full_optimizer_state(layer, optimizer, moments | {"weight.step": odd})

    tensors = [(f"a tensor is wanted: weight{{}}, not {kind}", odd) for kind, odd in odd_tensors(ctx.mesh(tp))]
    numbers = [(f"a tensor is wanted: weight{{}}, not {kind}", odd) for kind, odd in odd_numbers()]
    complex_one, bits = torch.complex(ones, ones), torch.zeros(4, 2, dtype=torch.uint8).view(torch.bits8)
    dtypes = [(f"weight{{}} {odd.dtype}, not torch.float32", odd) for odd in (complex_one, bits)]
    for load, key, fine, cases in (
        (load_model, "", ones, tensors + dtypes),
        (load_moment, ".exp_avg", ones, tensors + dtypes),
        (load_number, ".step", 1.0, numbers),
    ):
        for told, odd in cases:
            for here in (True, dist.get_rank(ctx.group(tp)) == tp - 1):
                with pytest.raises(ValueError, match=re.escape(told.format(key))) as raised:
                    load(odd if here else fine)
                assert here or re.match(r"rank \d raised ValueError: ", str(raised.value))
    assert torch.equal(layer.weight, before) and not optimizer.state


def test_odd_values_are_named_on_every_rank(workers, tp):
    workers.run(check_kinds, tp)


def check_fine_kinds(ctx, tp):
    torch.manual_seed(0)
    layer = tpfused.ColumnParallelLinear(2, 4, bias=False, group=ctx.group(tp), device=ctx.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    value = torch.arange(8.0).reshape(4, 2)
    leaf = value.clone().requires_grad_()
    with torch.inference_mode():
        inferred = value.clone()
    kinds = nn.Parameter(value.clone()), leaf, 1 * leaf, value.as_subclass(Labelled), inferred, value.to(torch.bfloat16)
    for odd in kinds:
        load_full_state_dict(layer, {"weight": odd})
        load_full_optimizer_state(layer, optimizer, {"weight.momentum_buffer": odd})
        assert type(layer.weight) is nn.Parameter and layer.weight.is_leaf
        saved = full_state_dict(layer) | full_optimizer_state(layer, optimizer)
        if ctx.rank == 0:
            assert_equal(saved, {"weight": value, "weight.momentum_buffer": value})
        with torch.no_grad():
            layer.weight.zero_()


def test_values_that_only_look_odd(workers, tp):
    workers.run(check_fine_kinds, tp)


def check_kept_by_an_optimizer(ctx, tp):
    """On one rank alone, too, what cannot be saved is named on all."""
    layer = tpfused.ColumnParallelLinear(2, 4, bias=False, mesh=ctx.mesh(tp), device=ctx.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    number = distribute_tensor(torch.ones((), device=ctx.device), ctx.mesh(tp), [Replicate()])
    quantized = torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.quint8)
    for odd in ([1.0], {"a": 1.0}, "x", 1j, 2**70, number, torch.nested.nested_tensor([torch.ones(2)]), quantized):
        for here in (True, ctx.rank == ctx.world - 1):
            optimizer.state[layer.weight] = {"kept": odd if here else 1.0}
            with pytest.raises(TypeError, match=r"weight.kept must be a dense tensor( or a number)?, not"):
                full_optimizer_state(layer, optimizer)


def test_odd_values_that_an_optimizer_keeps(workers, tp):
    workers.run(check_kept_by_an_optimizer, tp)


def test_models_of_odd_tensors():
    model = nn.Linear(2, 2)
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))
    for odd, name, kind in ((model, "codes", "quantized"), (nn.LazyLinear(2), "weight", "uninitialised")):
        for call in (full_state_dict, lambda odd: load_full_state_dict(odd, {"weight": torch.ones(2, 2)})):
            with pytest.raises(TypeError, match=f"{name} must be a dense tensor, not an? {kind} one"):
                call(odd)


def test_floating_point_dtypes_are_cast_and_no_others():
    model = nn.BatchNorm1d(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    odd = {"weight": state["weight"].int(), "num_batches_tracked": torch.ones(()), "bias": torch.ones(3)}
    with pytest.raises(ValueError) as raised:
        load_full_state_dict(model, state | odd)
    assert str(raised.value).splitlines() == [
        "the checkpoint does not fit the model: 0 tensors missing, 0 extra, 1 of another shape, 2 of another dtype "
        "(only floating-point ones are cast)",
        "  of another shape: bias (3,), not (2,)",
        "  of another dtype: weight torch.int32, not torch.float32",
        "  of another dtype: num_batches_tracked torch.float32, not torch.int64",
    ]
    no_tensors = {"num_batches_tracked": 1, "weight": state["weight"].numpy()}
    with pytest.raises(ValueError) as raised:
        load_full_state_dict(model, state | no_tensors)
    assert str(raised.value).splitlines()[1:] == [
        "  a tensor is wanted: weight, not numpy.ndarray",
        "  a tensor is wanted: num_batches_tracked, not int",
    ]
    assert_equal(model.state_dict(), before)
    load_full_state_dict(model, state | {"weight": state["weight"].bfloat16(), "bias": state["bias"].double()})
    assert_equal(model.state_dict(), state)
