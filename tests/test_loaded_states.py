"""What the functions that load a whole state are given: any mapping, odd tensors, and what does not fit."""

import weakref
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpfused
from tests.layouts import dense, laid_out
from tests.test_checkpoint import assert_equal, shared
from tpfused.checkpoint import full_state_dict, load_full_optimizer_state, load_full_state_dict


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
    numpy = pytest.importorskip("numpy")
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
    steps = {"weight.step": numpy.float32(3), "bias.step": 3.0}
    load_full_optimizer_state(layer, optimizer, moments | steps)
    assert [float(each["step"]) for each in optimizer.state.values()] == [3.0, 3.0]
    for given, told in (
        ({"weight": state["weight"].to_sparse()}, "weight, not a sparse one"),
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
