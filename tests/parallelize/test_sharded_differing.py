"""Ranks that read checkpoints of one shape, but not the same one."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import tpfused
from tests.compare import refuses

pytest.importorskip("safetensors")


def build() -> torch.nn.Module:
    """With a scalar, and nothing at all, among what is compared."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("empty", torch.ones(0, 3))
    return model


def check_other_folder(ctx, tp, folder):
    """The last rank's is another one; under FSDP2 the ranks of other blocks hear of it, too."""
    with torch.device("meta"):
        model = build()
    tpfused.parallelize(model, ctx.mesh(tp), {"0": "colwise", "1": "rowwise"})
    fully_shard(model, mesh=ctx.grid(tp)["dp"])
    path = folder / ("other" if ctx.rank == ctx.world - 1 else "one")
    with refuses(ValueError, "different checkpoints: 3 of 6 tensors", "\n  0.bias", "\n  1.bias", "\n  scale"):
        tpfused.load_sharded(model, path)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    tpfused.load_sharded(model, folder / "one")


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_checkpoints_that_differ_between_ranks_are_refused(workers, tp, tmp_path):
    one = build()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].bias += 1
        other[1].bias += 1
        other.scale += 1
    for name, model in ("one", one), ("other", other):
        tpfused.save_sharded(model, tmp_path / name)
    workers.run(check_other_folder, tp, tmp_path)
