"""The files of a checkpoint in a folder: one, or several and their index, and a transformers model's config."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from tpfused.parts import unwrapped

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Writer:
    """Tensors into files of at most so many bytes (or of one tensor), named when their number is known."""

    def __init__(self, folder: Path, max_file_bytes: int):
        self.folder = folder
        self.configs = folder / f".{SINGLE}.configs"  # until they are renamed
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

    def finish(self, model: nn.Module) -> None:
        if self.pending or not self.files:
            self._flush()
        self._write_configs(model)
        earlier = []
        if (self.folder / INDEX).exists():
            with suppress(ValueError):  # a broken one names nothing that this save would replace
                named = [file for file in indexed(self.folder) if file.suffix == ".safetensors"]
                earlier += [file for file in named if file.parent == self.folder]
        if len(self.files) == 1:  # which comes before an index
            names = [SINGLE]
            self._name_configs()
            self.files[0][0].replace(self.folder / SINGLE)
            earlier.append(self.folder / INDEX)
        else:
            names = self._finish_several()
            earlier.insert(0, self.folder / SINGLE)  # what is read until it is gone
        # The old index may name what is new: the one file, or several that were missing.
        for old in earlier:
            if old.name not in names:
                old.unlink(missing_ok=True)

    def _finish_several(self) -> list[str]:
        """Under names that no earlier checkpoint has, so that the new index takes the place of the old one at once."""
        for attempted in count():
            tag = f"-{attempted}" if attempted else ""
            names = [f"model{tag}-{i:05d}-of-{len(self.files):05d}.safetensors" for i in range(1, len(self.files) + 1)]
            if not any((self.folder / name).exists() for name in names):
                break
        homes = {key: name for name, (_, held) in zip(names, self.files, strict=True) for key in held}
        index = self.folder / f".{INDEX}.partial"
        index.write_text(json.dumps({"metadata": {"total_size": self.total}, "weight_map": homes}, indent=2))
        for name, (temporary, _) in zip(names, self.files, strict=True):
            temporary.replace(self.folder / name)
        self._name_configs()
        index.replace(self.folder / INDEX)
        return names

    def _write_configs(self, model: nn.Module) -> None:
        """In a folder of their own: `save_pretrained` chooses the names."""
        self._delete_configs()  # an interrupted save's
        self.configs.mkdir()
        for config in _configs(model):
            config.save_pretrained(self.configs)

    def _name_configs(self) -> None:
        """Right before the weights take their places, so that a folder has others' for no longer than it must."""
        for file in self.configs.iterdir():
            file.replace(self.folder / file.name)

    def _delete_configs(self) -> None:
        if self.configs.exists():
            shutil.rmtree(self.configs)

    def clean_up(self) -> None:
        """What this save, or an earlier one that failed, has left."""
        self._delete_configs()
        for file in self.folder.glob(".model.safetensors.*partial"):
            file.unlink(missing_ok=True)


def _configs(model: nn.Module) -> list:
    """A transformers model's, as its own `save_pretrained` writes them: with the dtype and the class of the model."""
    model = unwrapped(model)
    config, dtype = getattr(model, "config", None), getattr(model, "dtype", None)
    if hasattr(config, "save_pretrained") and isinstance(dtype, torch.dtype):
        config = copy.copy(config)  # the model keeps its own as it is
        config.dtype = dtype
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard puts it before the name
    configs = (config, getattr(model, "generation_config", None))
    return [each for each in configs if hasattr(each, "save_pretrained")]


def indexed(folder: Path) -> list[Path]:
    """The files that the folder's index names."""
    try:
        homes = json.loads((folder / INDEX).read_text())["weight_map"]
        return [folder / name for name in dict.fromkeys(homes.values())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder / INDEX} is no index of safetensors files: {told}") from error
