"""Buffers on the meta device that no checkpoint holds: computed as transformers does, or refused."""

import pytest
import torch

import tpfused
from tests.compare import refuses

torch_files = pytest.importorskip("safetensors.torch")

LOWEST = torch.finfo(torch.float32).min


class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def check_lost_buffer(ctx, path):
    with torch.device("meta"):
        model = torch.nn.Sequential(Rotary())
    tpfused.parallelize(model, ctx.mesh(ctx.world), {"proj": "colwise"})
    for _ in range(2):
        with refuses(ValueError, "0.angles", "parameters only"):
            tpfused.load_sharded(model, path)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_buffers_that_nothing_computes(workers, tmp_path):
    torch_files.save_file(
        {"0.proj.weight": torch.zeros(4, 4), "0.proj.bias": torch.zeros(4)}, tmp_path / "model.safetensors"
    )
    workers.run(check_lost_buffer, tmp_path)


class Filling(torch.nn.Linear):
    """Its one buffer is filled with `expected`, where `written` is true."""

    def __init__(self, expected, written=True):
        super().__init__(2, 2)
        self.expected, self.written = expected, torch.as_tensor(written).expand(expected.shape)
        self.register_buffer("filled", expected.clone(), persistent=False)

    def _init_weights(self, module):
        module.filled[self.written] = self.expected[self.written]


def on_meta(expected, written=True):
    return Filling(expected, written).to("meta")


causal = torch.ones(4, 4, dtype=torch.bool).tril()
every_value = pytest.mark.parametrize(
    "expected",
    [causal, ~causal, torch.zeros(4, 4).masked_fill(~causal, LOWEST), causal.int(), causal.to(torch.complex64)],
    ids=["mask", "its negative", "added mask", "integers", "complex"],
)


@every_value
def test_any_value_can_be_computed(tmp_path, expected):
    tpfused.save_sharded(torch.nn.Linear(2, 2), tmp_path)
    model = on_meta(expected)
    tpfused.load_sharded(model, tmp_path)
    assert torch.equal(model.filled, expected) and model.filled.dtype == expected.dtype


@every_value
def test_what_is_computed_in_part_is_refused(tmp_path, expected):
    tpfused.save_sharded(torch.nn.Linear(2, 2), tmp_path)
    for left in (0, 1), (1, 0):  # two values
        written = torch.ones(4, 4, dtype=torch.bool)
        written[left] = False
        model = on_meta(expected, written)
        with refuses(ValueError, "that nothing computes: filled"):
            tpfused.load_sharded(model, tmp_path)
        assert model.filled.is_meta and model.weight.is_meta
