"""Checkpoints: whole tensors in safetensors files, so that any degree of parallelism can read them.

    DIR/step-000200/model.safetensors  optimizer.safetensors  rng.safetensors  meta.json

A checkpoint is written under a hidden name beside its place, flushed to the disk, and renamed: under its own name it is
complete, whenever the writer was killed. The two newest are kept.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.checkpoint import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from tpfused.cli.errors import UserError
from tpfused.training.presets import PRESETS, RunConfig
from tpfused.workers import Worker

FORMAT = 1
KEPT = 2
META = "meta.json"
TENSORS = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")


def find(directory: str) -> dict[str, Any]:
    """The meta data, with its "path", of the newest checkpoint in `directory`, or of the one that `directory` is.

    Raises:
        UserError: there is none, or the newest is damaged.
    """
    root = Path(directory).resolve()
    if not os.path.isdir(root):  # False for impossible names too
        raise UserError(f"--resume {directory}: there is no such directory")
    path = root if (root / META).is_file() else root / f"step-{max(_steps(root), default=0):06d}"
    if not path.is_dir():
        raise UserError(f"--resume {directory} holds no checkpoint (no step-... directory)")
    problem = f"the checkpoint {path} cannot be used"
    try:
        meta = json.loads((path / META).read_text())
        if meta["format"] != FORMAT:
            raise UserError(f"{problem}: its format is {meta['format']}, this version reads {FORMAT}")
        config = {name: meta["config"][name] for name in ("preset", "optimizer")} | meta["config"]
        for name in TENSORS:
            found, size = (path / name).stat().st_size, meta["files"][name]
            if found != size:
                raise UserError(f"{problem}: {name} has {found} bytes instead of {size}")
        step = meta["step"]
        if type(step) is not int or path.name != _name(step):
            raise UserError(f"{problem}: it says that it is of step {step!r}")
        return {"path": str(path), "step": step, "config": config, "model": meta["model"]}
    except OSError as error:
        raise UserError(f"{problem}: {Path(error.filename).name}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{problem}: {META} is not what tpfused train writes") from error


def check_target(run: RunConfig) -> None:
    """Refuse to save where nothing can be written, or where another run's checkpoints would mix with this one's."""
    root = Path(run.save)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--save {run.save} cannot be written to: {error.strerror}") from error
    newest = max(_steps(root), default=None)
    continued = run.resume and Path(run.resume) == root.resolve() / _name(run.first_step)
    if newest is not None and not (continued and newest == run.first_step):
        raise UserError(
            f"--save {run.save} holds a checkpoint of step {newest} already: --resume it, or choose another directory"
        )


def save(run: RunConfig, worker: Worker, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Write the checkpoint of `step` steps done; collective, rank 0 writes. Returns its path.

    Raises:
        UserError: it cannot be written; on rank 0.
    """
    from safetensors import SafetensorError

    contents = full_state_dict(model), full_optimizer_state(model, optimizer), _gather_rng(run, worker)
    tensors = dict(zip(TENSORS, contents, strict=True))
    if worker.rank == 0:
        try:
            _write(run, step, tensors)
        except (OSError, SafetensorError) as error:
            raise UserError(f"--save {run.save} cannot be written: {error}") from error
    return str(Path(run.save) / _name(step))


def _write(run: RunConfig, step: int, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    root = Path(run.save)
    final, temporary = root / _name(step), root / f".{_name(step)}.partial"
    for stale in root.glob(".step-*.partial"):
        shutil.rmtree(stale)
    temporary.mkdir()
    for name, content in tensors.items():
        save_file({key: value.contiguous() for key, value in content.items()}, temporary / name)
    meta = {
        "format": FORMAT,
        "step": step,
        "config": run.as_dict(),
        "model": dict(PRESETS[run.preset].model),
        "files": {name: (temporary / name).stat().st_size for name in tensors},
        "torch": torch.__version__,
    }
    (temporary / META).write_text(json.dumps(meta, indent=2))
    for path in (*temporary.iterdir(), temporary):
        _flush(path)
    temporary.rename(final)
    _flush(root)
    for old in _steps(root)[:-KEPT]:
        # Renamed first: a removal that is cut short must not look like a checkpoint.
        discarded = root / f".{_name(old)}.partial"
        (root / _name(old)).rename(discarded)
        shutil.rmtree(discarded)


def load(run: RunConfig, worker: Worker, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Continue from the checkpoint `run.resume`: each rank reads it all and keeps its own part."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(run.resume)
    try:
        weights, state, rng = (path / name for name in TENSORS)
        load_full_state_dict(model, load_file(weights))
        load_full_optimizer_state(model, optimizer, load_file(state))
        _restore_rng(run, worker, load_file(rng))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"the checkpoint {path} cannot be used: {' '.join(str(error).split())}") from error


def _gather_rng(run: RunConfig, worker: Worker) -> dict[str, Tensor]:
    """Every rank's generator states, as "<rank>.<device>"."""
    own = {f"{worker.rank}.cpu": torch.get_rng_state()}
    if run.device == "cuda":
        own[f"{worker.rank}.cuda"] = torch.cuda.get_rng_state()
    if run.world == 1:
        return own
    states: list[dict] = [{}] * run.world
    dist.all_gather_object(states, own)
    return {name: state for part in states for name, state in part.items()}


def _restore_rng(run: RunConfig, worker: Worker, states: dict[str, Tensor]) -> None:
    """This rank's own states; a rank that the saved run did not have takes rank 0's."""
    restore = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for device in {"cpu", run.device}:
        state = states.get(f"{worker.rank}.{device}", states.get(f"0.{device}"))
        if state is not None:
            restore[device](state)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _steps(root: Path) -> list[int]:
    """The steps that checkpoints are of, oldest first."""
    found = (re.fullmatch(r"step-(\d{6,})", path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
