"""This package's own model, built whole in one process, split over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from tpfused.checkpoint import load_full_state_dict, model_entries
from tpfused.layers.transformer import ParallelTransformer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check(model: ParallelTransformer, ranks: int) -> dict[str, str]:
    """Refuse what cannot be split in place. -> No styles.

    Raises:
        ValueError: sizes that cannot be split over the ranks, parameters of several dtypes, or of which only some are
            on the meta device; a subclass, or a model that was changed since it was built.
    """
    if type(model) is not ParallelTransformer:
        raise ValueError(
            f"{type(model).__name__} is a subclass of ParallelTransformer, which only itself can be split in place: "
            f"make it with mesh=, and load its weights by load_full_state_dict or load_sharded"
        )
    model.config.check(ranks)
    params = dict(model.named_parameters())
    dtypes = {param.dtype for param in params.values()}
    if len(dtypes) > 1:
        raise ValueError(f"the model's parameters must have one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    on_meta = [name for name, param in params.items() if param.is_meta]
    if 0 < len(on_meta) < len(params):
        raise ValueError(
            f"{len(on_meta)} of the model's {len(params)} parameters are on the meta device ({on_meta[0]}, ...), and "
            f"the others have values: all must be, or none"
        )
    found, built = _parts_of(model), _parts_of(ParallelTransformer(model.config, group=model.group, device="meta"))
    for name in found | built:
        here, there = (parts.get(name, "nothing") for parts in (found, built))
        if here != there:
            raise ValueError(
                f"the model was changed since it was built: {name} is {here}, not {there}. Change what parallelize "
                f"gives, or make the model with mesh= and load its weights"
            )
    return {}


def _parts_of(model: nn.Module) -> dict[str, str]:
    """What each module, parameter and buffer is, by its name."""
    modules = {name or "the model": type(module).__name__ for name, module in model.named_modules()}
    tensors = {name: str(list(tensor.shape)) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return modules | tensors


@torch.no_grad()
def split(model: ParallelTransformer, mesh: DeviceMesh, device: torch.device) -> None:
    """`model`, of one rank, becomes what ``ParallelTransformer(config, mesh=mesh)`` with its weights is, in place."""
    dtype = model.embedding.weight.dtype
    parts = ParallelTransformer(model.config, mesh=mesh, device="meta", dtype=dtype)
    if not model.embedding.weight.is_meta:
        wholes = {}
        for entry in model_entries(model):
            wholes |= zip(entry.names, entry.unpack(entry.tensor.detach()), strict=True)
        parts.to_empty(device=device)
        load_full_state_dict(parts, wholes)
    trained = {name: entry.tensor.requires_grad for entry in model_entries(model) for name in entry.names}
    for entry in model_entries(parts):
        entry.tensor.requires_grad_(trained[entry.names[0]])
    _become(model, parts)


def _become(module: nn.Module, parts: nn.Module) -> None:
    """`module` holds what `parts` does, and is the same object still, and so are the modules in it; hooks, whether it
    is in training mode, and what others have noted on it stay.
    """
    parts.train(module.training)
    for name, child in module.named_children():
        if name in parts._modules:  # all but a packed projection whose key-value heads are shared by ranks
            _become(child, parts._modules[name])
            parts._modules[name] = child
    vars(module).update({key: value for key, value in vars(parts).items() if "hook" not in key and key != "training"})
