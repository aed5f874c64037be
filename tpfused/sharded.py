"""Checkpoints in safetensors files, of which each rank reads only its own slices, into any parallel model.

The files hold whole tensors under the dense model's names, as those of transformers do: several files with a
``model.safetensors.index.json``, or one. They are independent of the degree of parallelism.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.checkpoint import check_state, model_entries, save_entry
from tpfused.parameter import empty_on
from tpfused.placement import local

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@torch.no_grad()
def load_sharded(model: nn.Module, path: str | Path, *, device: torch.device | str | None = None) -> None:
    """Read this rank's part of each parameter and persistent buffer from a folder of safetensors files, or one file.

    Besides the model, this takes the memory of one parameter's part. Names are the dense model's (those of
    transformers for a model from `parallelize`); a transformers checkpoint may lack or have the base model's prefix,
    and hold a tied parameter under any of its names. Dtypes are the model's. Not collective.

    What is on the meta device is made first: DTensors on their mesh's devices, other tensors on `device` (None: torch's
    default one). Buffers that no checkpoint holds (rotary frequencies) are then computed as transformers does.

    Raises:
        FileNotFoundError: there is no such file, or no safetensors files in the folder.
        ValueError: tensors are missing, not the model's, or of another shape (all are listed); buffers on the meta
            device that cannot be computed. Nothing has been loaded then.
    """
    with ExitStack() as files:
        found = _by_names_of(model, _open(Path(path), files))
        expected = {name: shape for entry in model_entries(model) for name, shape in entry.shapes().items()}
        check_state(found, expected)
        _compute_buffers(model, device)
        _leave_meta(model, device)
        for entry in model_entries(model):
            local(entry.tensor).copy_(entry.read([found[name] for name in entry.names]))


@torch.no_grad()
def save_sharded(model: nn.Module, path: str | Path, *, max_file_bytes: int = 5 * 2**30) -> None:
    """Write all parameters and persistent buffers, whole, as safetensors files, and the config of a transformers model.

    `load_sharded` reads them at any degree of parallelism, and transformers' `from_pretrained` on one device.
    Collective: every rank calls it, and rank 0 of the default process group writes, holding one file's tensors in
    memory. Several files have an index. Those of an earlier save in the folder are replaced.

    Raises:
        OSError, on all ranks: rank 0 could not write.
    """
    writer = _Writer(Path(path), max_file_bytes) if not dist.is_initialized() or dist.get_rank() == 0 else None
    failure = None
    for entry in model_entries(model):
        state: dict[str, Tensor] = {}
        save_entry(entry, entry.tensor, entry.names, state)
        if writer is not None and failure is None:  # after one, rank 0 still gathers, which all ranks do together
            failure = _failure_of(writer.add, state)
    if writer is not None and failure is None:
        configs = (getattr(model, name, None) for name in ("config", "generation_config"))
        failure = _failure_of(writer.finish, [config for config in configs if hasattr(config, "save_pretrained")])
    if dist.is_initialized():
        told = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None and failure is None:
            failure = OSError(f"rank 0 could not write {path}: {told[0]}")
    if failure is not None:
        raise failure


def _failure_of(step: Callable[..., None], *args: object) -> Exception | None:
    try:
        step(*args)
    except Exception as error:
        return error
    return None


class StoredTensor:
    """A tensor in a safetensors file: its shape, and its slices, which are read when they are asked for."""

    def __init__(self, file, name: str):
        self._slices = file.get_slice(name)
        self.shape = tuple(self._slices.get_shape())

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        if not self.shape:
            return self._slices[...]
        if any(part.stop <= part.start for part in box):  # of an empty range safetensors would make an error
            first = self._slices[tuple(slice(0, min(1, size)) for size in self.shape)]
            return first.new_empty([max(0, part.stop - part.start) for part in box])
        return self._slices[box]


class _Writer:
    """Tensors into files of at most so many bytes (or of one tensor), named when their number is known."""

    def __init__(self, folder: Path, max_file_bytes: int):
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.pending: dict[str, Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []  # under temporary names, and what each holds
        self.total = 0

    def add(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            if self.pending and sum(t.nbytes for t in self.pending.values()) + tensor.nbytes > self.max_file_bytes:
                self._flush()
            self.pending[name] = tensor
            self.total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{SINGLE}.{len(self.files)}.partial"
        save_file(self.pending, temporary, metadata={"format": "pt"})
        self.files.append((temporary, list(self.pending)))
        self.pending = {}

    def finish(self, configs: list) -> None:
        if self.pending or not self.files:
            self._flush()
        for old in (*self.folder.glob("model*.safetensors"), self.folder / INDEX):
            old.unlink(missing_ok=True)
        homes = {}
        for number, (temporary, names) in zip(count(1), self.files):
            several = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            final = SINGLE if len(self.files) == 1 else several
            temporary.rename(self.folder / final)
            homes |= dict.fromkeys(names, final)
        if len(self.files) > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": homes}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2))
        for config in configs:
            config.save_pretrained(self.folder)


def _open(path: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """All tensors of the file or folder, by name; the files are closed with the stack."""
    from safetensors import safe_open

    if path.is_dir() and (path / INDEX).exists():
        homes = json.loads((path / INDEX).read_text())["weight_map"]
        paths = [path / name for name in dict.fromkeys(homes.values())]
    else:
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths or not all(file.is_file() for file in paths):
        missing = [str(file) for file in paths if not file.is_file()] or [f"{path}/*.safetensors"]
        raise FileNotFoundError(f"no checkpoint to load: {', '.join(missing)}")
    stored = {}
    for file in paths:
        handle = files.enter_context(safe_open(file, framework="pt"))
        stored |= {name: StoredTensor(handle, name) for name in handle.keys()}
    return stored


def _by_names_of(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors by the first of the model's names for each, without those that its class says to ignore."""
    first, own = {}, {}
    for entry in model_entries(model, tied_again=True):
        own |= zip(entry.names, first.setdefault(id(entry.tensor), entry.names), strict=True)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found = {}
    for name, tensor in stored.items():
        known = next((known for known in (name, prefix + name, name.removeprefix(prefix)) if known in own), None)
        if known is not None or not any(re.search(pattern, name) for pattern in ignored):
            found[own.get(known, name)] = tensor
    return found


def _leave_meta(model: nn.Module, device: torch.device | str | None) -> None:
    """Make what is on the meta device, uninitialised; tied parameters stay tied."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of the old: the old and the new
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.is_meta:
                if id(param) not in made:
                    made[id(param)] = param, empty_on(param, _device_of(param, device))
                module.register_parameter(name, made[id(param)][1])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=_device_of(buffer, device))


def _compute_buffers(model: nn.Module, device: torch.device | str | None) -> None:
    """Make the buffers on the meta device that no checkpoint holds, as the model's `_init_weights` fills them."""
    device = _device_of(next((p for p in model.parameters() if hasattr(p, "device_mesh")), None), device)
    left, made = [], []
    for path, module in model.named_modules():
        own = module._non_persistent_buffers_set & {
            n for n, b in module._buffers.items() if b is not None and b.is_meta
        }
        for name in own:
            made.append((module._buffers, name, module._buffers[name]))
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
            module._buffers[name].fill_(_unlikely(module._buffers[name].dtype))
        if own and hasattr(model, "_init_weights"):
            model._init_weights(module)
        for name in own:
            if (module._buffers[name] == _unlikely(module._buffers[name].dtype)).any():
                left.append(f"{path}.{name}")
    if left:
        for buffers, name, on_meta in made:
            buffers[name] = on_meta
        raise ValueError(
            f"buffers on the meta device that are in no checkpoint and that nothing computes: {', '.join(left)}; build "
            f"the model with parameters only on the meta device"
        )


def _unlikely(dtype: torch.dtype) -> float | int | bool:
    """A value that marks what nothing has been written to."""
    if dtype == torch.bool:
        return False
    return (torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype).min


def _device_of(tensor: Tensor | None, device: torch.device | str | None) -> torch.device:
    if hasattr(tensor, "device_mesh"):
        return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device() if device is None else torch.device(device)
