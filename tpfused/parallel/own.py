"""This package's own model, built whole in one process, split over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpfused.checkpoint import load_full_state_dict, model_entries
from tpfused.layers.transformer import ParallelTransformer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check(model: ParallelTransformer, ranks: int) -> dict[str, str]:
    """Refuse sizes that cannot be split over the ranks, and parameters of several dtypes. -> No styles."""
    model.config.check(ranks)
    dtypes = {param.dtype for param in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(f"the model's parameters must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    return {}


@torch.no_grad()
def split(model: ParallelTransformer, mesh: DeviceMesh, device: torch.device) -> None:
    """`model`, of one rank, becomes what ``ParallelTransformer(config, mesh=mesh)`` with its weights is, in place."""
    dtype = model.embedding.weight.dtype
    parts = ParallelTransformer(model.config, mesh=mesh, device="meta", dtype=dtype)
    wholes = {}
    for entry in model_entries(model):
        wholes |= zip(entry.names, entry.unpack(entry.tensor.detach()), strict=True)
    if not any(whole.is_meta for whole in wholes.values()):
        parts.to_empty(device=device)
        load_full_state_dict(parts, wholes)
    trained = {name: entry.tensor.requires_grad for entry in model_entries(model) for name in entry.names}
    for entry in model_entries(parts):
        entry.tensor.requires_grad_(trained[entry.names[0]])
    parts.train(model.training)
    vars(model).clear()
    vars(model).update(vars(parts))
