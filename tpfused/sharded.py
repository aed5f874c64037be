"""Checkpoints in safetensors files, of which each rank reads only its own slices, into any parallel model.

The files hold whole tensors under the dense model's names, as those of transformers do: several files with a
``model.safetensors.index.json``, or one. They are independent of the degree of parallelism.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.agreement import attempt, raise_together, together
from tpfused.checkpoint import check_state
from tpfused.checks import check_module
from tpfused.parameter import check_size, empty_on
from tpfused.parts import (
    Entry,
    Part,
    agree_on_parts,
    check_dense_entries,
    check_same_beginnings,
    model_entries,
    model_parts,
    save_part,
    unwrapped,
)
from tpfused.placement import groups_of, local
from tpfused.sharded_files import INDEX, SINGLE, Writer, indexed

_COMPUTED = (r"rotary_emb\.inv_freq$", r"attn\.masked_bias$")  # that older checkpoints hold, and models now compute
_LOAD = "load_sharded"  # what its ranks tell each other that they are in


@torch.no_grad()
def load_sharded(model: nn.Module, path: str | Path, *, device: torch.device | str | None = None) -> None:
    """Read this rank's part of each parameter and persistent buffer from a folder of safetensors files, or one file.

    Of a folder, ``model.safetensors`` is read, else the files of its index, as transformers does; else all.

    Besides the model, this takes the memory of one parameter's part. Names are the dense model's (those of
    transformers for a model from `parallelize`); a transformers checkpoint may lack or have the base model's prefix,
    and hold a tied parameter under any of its names. Where it holds one under several, this rank's parts of them are
    compared, which takes the memory of a few. Dtypes are the model's: floating-point entries are cast to them,
    no others. All ranks that the model is split over call it: none loads anything unless each can.

    What is on the meta device is made first: DTensors on their mesh's devices, other tensors on `device` (None: torch's
    default one). Buffers that no checkpoint holds (rotary frequencies) are then computed as transformers does. Such
    parameters are new ones: make the optimizer afterwards.

    The ranks may read different folders, on other hosts, say: before, they compare the first entries of each tensor (of
    its first row, at most 256). A model that is not split on one rank is loaded by that rank alone: where the others'
    is, they find it out by that rank's next call over their group, or wait until its time-out.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors files in the folder.
        ValueError: tensors are missing, not the model's, of another shape, of another dtype where one of the two is no
            floating-point one, the same parameter's under two names but different, or begin with other entries on
            another rank (all are listed), or are in two files; a file that is broken; buffers on the meta device that
            cannot be computed; a rank is in another call.
        TypeError: a model that is no nn.Module, a sparse buffer, a `path` that is no str or Path.
        ImportError: safetensors is not installed.
        RuntimeError: the process group that the model is split over was destroyed.

        On every rank, where it concerns one. Nothing has been loaded then, on any. What a file fails with while it is
        read is raised on every rank, too, but parts have been loaded.
    """
    check_module(model)
    groups = groups_of(model)
    with ExitStack() as files:
        found = together(partial(_found, model, path, files), groups, _LOAD)
        check_same_beginnings(found, groups, _LOAD, "read different checkpoints")
        for module, name, tensor in together(partial(_off_meta, model, device), groups, _LOAD):
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module._buffers[name] = tensor
        together(partial(_read, model, found), groups, _LOAD)


def _found(model: nn.Module, path: str | Path, files: ExitStack) -> dict[str, StoredTensor]:
    """All that the model needs, and nothing else, by its names."""
    _check_safetensors("load_sharded")
    _check_path(path)
    copies = _by_names_of(model, _open(Path(path), files))
    entries = list(model_entries(model))
    check_dense_entries(entries, "load_sharded")
    shapes = {name: shape for entry in entries for name, shape in entry.shapes().items()}
    dtypes = {name: entry.tensor.dtype for entry in entries for name in entry.names}
    # Under the files' names, of which one parameter may have several: each must fit.
    names = {name: name for name in shapes if name not in copies}
    names |= {stored: name for name, each in copies.items() if name in shapes for stored in each}
    check_state(
        {stored: tensor for each in copies.values() for stored, tensor in each.items()},
        {stored: shapes[name] for stored, name in names.items()},
        {stored: dtypes[name] for stored, name in names.items()},
        kind=StoredTensor,
    )
    return _one_of_each(entries, copies)


def _one_of_each(entries: list[Entry], copies: dict[str, dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The first of the tensors that are stored for each, where this rank would load the same bits from the others."""

    def bits(entry: Entry, sources: dict[str, StoredTensor]) -> Tensor:
        part = entry.read([sources[name] for name in entry.names])
        return part.to(entry.tensor.dtype).reshape(-1).view(torch.uint8)

    first = {name: next(iter(each.values())) for name, each in copies.items()}
    different = []
    for entry in entries:
        for name in entry.names:
            one, *others = copies[name]
            different += [
                f"{other} from {one}"
                for other in others
                if not torch.equal(bits(entry, first), bits(entry, first | {name: copies[name][other]}))
            ]
    if different:
        raise ValueError(
            f"{len(different)} tensors of the checkpoint differ from others that are the same parameter of the model"
            + "".join(f"\n  {text}" for text in different)
        )
    return first


def _read(model: nn.Module, found: dict[str, StoredTensor]) -> None:
    for entry in model_entries(model):
        local(entry.tensor).copy_(entry.read([found[name] for name in entry.names]))


@torch.no_grad()
def save_sharded(model: nn.Module, path: str | Path, *, max_file_bytes: int = 5 * 2**30) -> None:
    """Write all parameters and persistent buffers, whole, as safetensors files, and the config of a transformers model.

    `load_sharded` reads them at any degree of parallelism, and transformers' `from_pretrained` on one device: the
    written config has the model's class and its parameters' dtype, as transformers' `save_pretrained` writes them.
    Collective: every rank calls it, and rank 0 of the default process group writes into its `path`, holding one file's
    tensors in memory; the other ranks' `path` is not looked at. Several files have an index. An earlier checkpoint in
    the folder is replaced: at each moment the weights of one of the two are whole there, and other files stay. The
    configs take their places right before the weights: a save that is cut off between leaves them with the old weights.

    Raises:
        ValueError, TypeError: tensors on the meta device, sparse ones, a `max_file_bytes` that is no positive integer,
            rank 0's `path` that is none, models that differ between ranks or are split differently.
        OSError: rank 0 could not write, and the earlier checkpoint's weights are still there; or it could not delete
            what the new one, which is whole, replaces.
        ImportError: safetensors is not installed.
        RuntimeError: the process group that the model is split over was destroyed.

        On every rank, where it concerns one.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    parts = agree_on_parts(partial(_savable, model, path if writes else "", max_file_bytes), "save_sharded")
    writer = Writer(Path(path), max_file_bytes) if writes else None
    failure = None
    for part in parts:
        state: dict[str, Tensor] = {}
        # After a failure rank 0 still gathers, which all ranks do together.
        _, failed = attempt(save_part, part, state)
        if writer is not None and failed is None and failure is None:
            _, failed = attempt(writer.add, state)
        failure = failure or failed
    if writer is not None:
        if failure is None:
            _, failure = attempt(writer.finish, model)
        _, failed = attempt(writer.clean_up)
        failure = failure or failed
    raise_together(failure, [dist.group.WORLD] if dist.is_initialized() else [], "save_sharded")


def _savable(model: nn.Module, path: str | Path, max_file_bytes: int) -> list[Part]:
    _check_safetensors("save_sharded")
    _check_path(path)
    check_size(max_file_bytes, "max_file_bytes")
    check_module(model)
    if hasattr(unwrapped(model), "peft_config"):
        raise ValueError(
            "save_sharded writes what plain transformers loads, which a model with peft's adapters is not: "
            "full_state_dict gives all of its tensors by peft's names"
        )
    return model_parts(model)


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or a Path, not {path!r}")


def _check_safetensors(function: str) -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{function} needs safetensors: pip install safetensors ({error})") from error


class StoredTensor:
    """A tensor in a safetensors file: its shape, and its slices, which are read when they are asked for."""

    def __init__(self, file, name: str):
        self._slices = file.get_slice(name)
        self.shape = tuple(self._slices.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        return self[(slice(0, 0),) * len(self.shape)].dtype

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        if not self.shape:
            return self._slices[...]
        if any(part.stop <= part.start for part in box):  # of an empty range safetensors would make an error
            first = self._slices[tuple(slice(0, min(1, size)) for size in self.shape)]
            return first.new_empty([max(0, part.stop - part.start) for part in box])
        return self._slices[box]


def _open(path: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """All tensors of the file or folder, by name; the files are closed with the stack."""
    from safetensors import SafetensorError, safe_open

    if not path.is_dir() or (path / SINGLE).exists():
        paths = [path / SINGLE if path.is_dir() else path]
    else:
        paths = indexed(path) if (path / INDEX).exists() else sorted(path.glob("*.safetensors"))
    if not paths or not all(file.is_file() for file in paths):
        missing = [str(file) for file in paths if not file.is_file()] or [f"{path}/*.safetensors"]
        raise FileNotFoundError(f"no checkpoint to load: {', '.join(missing)}")
    stored, homes = {}, {}
    for file in paths:
        try:
            handle = files.enter_context(safe_open(file, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}") from error
        for name in handle.keys():
            if name in stored:
                raise ValueError(f"{name} is in two files: {homes[name]} and {file}")
            stored[name], homes[name] = StoredTensor(handle, name), file
    return stored


def _by_names_of(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """The stored tensors under their names, by the first of the model's names for each: a tied parameter, or one with
    and without the prefix, may be there several times. Without those that the model's class says to ignore.
    """
    first, own = {}, {}
    for entry in model_entries(model, tied_again=True):
        own |= zip(entry.names, first.setdefault(id(entry.tensor), entry.names), strict=True)
    inner = unwrapped(model)
    prefix = f"{getattr(inner, 'base_model_prefix', '')}."
    ignored = [*_COMPUTED, *(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ())]
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        known = next((known for known in (name, prefix + name, name.removeprefix(prefix)) if known in own), None)
        if known is not None or not any(re.search(pattern, name) for pattern in ignored):
            found.setdefault(own.get(known, name), {})[name] = tensor
    return found


def _off_meta(model: nn.Module, device: torch.device | str | None) -> list[tuple[nn.Module, str, Tensor]]:
    """What is to take the place of each tensor on the meta device, and where. It is uninitialised, but for the buffers
    that no checkpoint holds; tied parameters stay tied.
    """
    made = _computed_buffers(model, device)
    computed = {(module, name) for module, name, _ in made}
    params: dict[int, nn.Parameter] = {}  # by the id of the old
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in params:
                    params[id(param)] = empty_on(param, _device_of(param, device))
                made.append((module, name, params[id(param)]))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and (module, name) not in computed:
                made.append((module, name, torch.empty_like(buffer, device=_device_of(buffer, device))))
    return made


def _computed_buffers(model: nn.Module, device: torch.device | str | None) -> list[tuple[nn.Module, str, Tensor]]:
    """For the buffers on the meta device that no checkpoint holds, what the model's `_init_weights` fills them with."""
    device = _device_of(next((p for p in model.parameters() if hasattr(p, "device_mesh")), None), device)
    made, left = [], []
    for path, module in model.named_modules():
        not_stored = module._non_persistent_buffers_set
        own = [n for n, b in module._buffers.items() if n in not_stored and b is not None and b.is_meta]
        if not own:
            continue
        # Twice: what is as it was both times, nothing has written to, whatever the values are.
        over_zeros, over_ones = (_computed(unwrapped(model), module, own, fill, device) for fill in (0, 1))
        untouched = [n for n in own if ((over_zeros[n] == 0) & (over_ones[n] == 1)).any()]
        left += [f"{path}.{n}".removeprefix(".") for n in untouched]
        made += [(module, n, over_zeros[n]) for n in own]
    if left:
        raise ValueError(
            f"buffers on the meta device that are in no checkpoint and that nothing computes: {', '.join(left)}; build "
            f"the model with parameters only on the meta device"
        )
    return made


def _computed(
    model: nn.Module, module: nn.Module, names: list[str], fill: int, device: torch.device
) -> dict[str, Tensor]:
    """What `_init_weights` makes of these buffers of the module, over memory that is filled so."""
    params, buffers = module._parameters, module._buffers
    # In the module's own place, and taken out of it again: some rank may fail. What else it has, is not to change.
    module._parameters = {n: p if p is None or p.is_meta else empty_on(p, "meta") for n, p in params.items()}
    module._buffers = {n: b if b is None else b.clone() for n, b in buffers.items()}
    try:
        module._buffers |= {n: torch.full_like(buffers[n], fill, device=device) for n in names}
        if hasattr(model, "_init_weights"):
            model._init_weights(module)
        return {n: module._buffers[n] for n in names}
    finally:
        module._parameters, module._buffers = params, buffers


def _device_of(tensor: Tensor | None, device: torch.device | str | None) -> torch.device:
    if hasattr(tensor, "device_mesh"):
        return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device() if device is None else torch.device(device)
