"""From the command line, a checkpoint and the machine to one `RunConfig`, or to one line that says what is wrong."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from tpfused.cli.errors import UserError
from tpfused.cli.seeds import seed
from tpfused.training.presets import PRESETS, Preset, RunConfig
from tpfused.workers import Worker

MAX_WORKERS_ON_A_HOST = 64
# What a resumed run takes from its checkpoint unless told otherwise, and the types that must be there. Where it runs is
# the machine's business.
REMEMBERED = {
    "steps": int,
    "dtype": str,
    "optimizer": str,
    "lr": float | int,
    "warmup": int,
    "batch_size": int,
    "seq_len": int,
    "accumulate": int,
    "seed": int,
    "sample": int,
    "text": str | None,
    "sequence_parallel": bool,
    "checkpoint_activations": bool,
}
MAX_TOKENS = 2**31 - 1  # a step; more is a slip of the finger


def resolve(
    options: Mapping[str, Any], worker: Worker | None = None, checkpoint: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run that these command-line options (None: not given) describe on this machine.

    `worker`: this process's place under torchrun. `checkpoint`: the meta data of the one to resume.
    """
    stored = checkpoint["config"] if checkpoint else {}
    for key, kind in ({"preset": str} | REMEMBERED).items():
        if key in stored and not isinstance(stored[key], kind):
            raise UserError(f"the checkpoint {checkpoint['path']} cannot be used: its {key} is {stored[key]!r}")
    device = _device(options["device"])
    name = options["preset"] or stored.get("preset") or ("text" if device == "cuda" else "quick")
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: choose {', '.join(PRESETS)}")
    if stored and stored["preset"] != name:
        raise UserError(f"{checkpoint['path']} is of the {stored['preset']} preset, not of {name}")
    preset = PRESETS[name]
    if checkpoint and checkpoint["model"] != dict(preset.model):
        raise UserError(f"{checkpoint['path']} is of another model than this version's {name} preset")

    defaults = dict(
        steps=preset.steps,
        dtype="fp32",
        optimizer="adam",
        warmup=preset.warmup,
        batch_size=preset.batch_size,
        seq_len=preset.seq_len,
        accumulate=1,
        seed=0,
        sample=240,
        text=None,
        sequence_parallel=preset.sequence_parallel,
        checkpoint_activations=False,
    )
    chosen = {
        key: options[key] if options[key] is not None else stored.get(key, defaults.get(key)) for key in REMEMBERED
    }
    if chosen["optimizer"] not in preset.lr:
        raise UserError(f"unknown optimizer {chosen['optimizer']!r}: choose {', '.join(preset.lr)}")
    if stored and stored["optimizer"] != chosen["optimizer"]:
        raise UserError(f"{checkpoint['path']} holds the state of {stored['optimizer']}, not of {chosen['optimizer']}")
    if chosen["lr"] is None:
        chosen["lr"] = preset.lr[chosen["optimizer"]]
    if chosen["text"] is not None:
        chosen["text"] = os.path.abspath(chosen["text"])
    tp, dp = _degrees(options, preset, device, worker)
    run = RunConfig(
        preset=name,
        device=device,
        threads=max(1, len(os.sched_getaffinity(0)) // (worker.local_world if worker else tp * dp)),
        tp=tp,
        dp=dp,
        dp_mode=options["dp_mode"] or "ddp",
        save=options["save"],
        save_every=options["save_every"],
        resume=checkpoint["path"] if checkpoint else None,
        first_step=checkpoint["step"] if checkpoint else 0,
        **chosen,
    )
    _check(run, worker)
    return run


def _device(wanted: str | None) -> str:
    available = torch.cuda.is_available()
    if wanted is None:
        return "cuda" if available else "cpu"
    if wanted not in ("cpu", "cuda"):
        raise UserError(f"unknown device {wanted!r}: choose cpu or cuda")
    if wanted == "cuda" and not available:
        raise UserError("no CUDA GPU is available here (torch.cuda.is_available() is False): use --device cpu")
    return wanted


def _degrees(options: Mapping[str, Any], preset: Preset, device: str, worker: Worker | None) -> tuple[int, int]:
    """(tp, dp): what was asked for, completed to fill the group or the machine."""
    tp, dp = options["tp"], options["dp"]
    for name, degree in (("tp", tp), ("dp", dp)):
        if degree is not None and degree < 1:
            raise UserError(f"--{name} must be at least 1, not {degree}")
    if worker is not None:
        # Tensor parallelism stays within a host; data parallelism spans them.
        if tp is None:
            tp = worker.world // dp if dp else _fitting_tp(worker.local_world, preset)
        return tp, dp or max(1, worker.world // tp)
    dp = dp or 1
    if tp is None:
        tp = _fitting_tp(torch.cuda.device_count() // dp, preset) if device == "cuda" else 2
    return tp, dp


def _fitting_tp(devices: int, preset: Preset) -> int:
    """The largest power of two that neither the devices nor the model's heads forbid."""
    limit = max(1, min(devices, preset.model["num_heads"]))
    return 1 << (limit.bit_length() - 1)


def _check(run: RunConfig, worker: Worker | None) -> None:
    """Refuse, in one line, what could only fail later. The layers' own checks speak for the model's sizes."""
    for name in ("steps", "batch_size", "seq_len", "accumulate"):
        if getattr(run, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(run, name)}")
    if run.batch_size * run.seq_len > MAX_TOKENS:
        raise UserError(f"--batch-size {run.batch_size} x --seq-len {run.seq_len} is more than {MAX_TOKENS} tokens")
    if run.save_every is not None and run.save_every < 1:
        raise UserError(f"--save-every must be at least 1, not {run.save_every}")
    if run.save_every is not None and not run.save:
        raise UserError("--save-every needs --save DIR")
    if run.warmup < 0:
        raise UserError(f"--warmup must not be negative, and is {run.warmup}")
    if run.sample < 0:
        raise UserError(f"--sample must not be negative, and is {run.sample}")
    seed(run.seed)  # a checkpoint's, perhaps
    if not 0 < run.lr < float("inf"):
        raise UserError(f"--lr must be a positive number, not {run.lr}")
    if run.dtype not in ("fp32", "bf16", "fp64"):
        raise UserError(f"unknown dtype {run.dtype!r}: choose fp32, bf16 or fp64")
    if run.dp_mode not in ("ddp", "fsdp2"):
        raise UserError(f"unknown data-parallel mode {run.dp_mode!r}: choose ddp or fsdp2")
    if run.text is not None and run.task != "text":
        raise UserError(f"--text is for the text and quick presets; {run.preset} makes its own data")
    if run.first_step >= run.steps:
        raise UserError(f"{run.resume} is at step {run.first_step} of {run.steps} already: ask for more --steps")

    degrees = f"--tp {run.tp} x --dp {run.dp}"
    if worker is not None and run.world != worker.world:
        raise UserError(f"{degrees} needs {run.world} workers, but torchrun started {worker.world}")
    here = worker.local_world if worker is not None else run.world
    if run.device == "cuda" and here > torch.cuda.device_count():
        raise UserError(f"{degrees} puts {here} workers on this host, which has {torch.cuda.device_count()} GPU(s)")
    if here > MAX_WORKERS_ON_A_HOST:
        raise UserError(f"{degrees} puts {here} workers on this host: {MAX_WORKERS_ON_A_HOST} at most")
    if run.batch_size % (run.dp * run.accumulate):
        raise UserError(
            f"--batch-size {run.batch_size} is no multiple of --dp {run.dp} x --accumulate {run.accumulate}: "
            f"each pass of each rank takes equally many sequences"
        )
    limit = PRESETS[run.preset].model["max_positions"]
    if run.seq_len > limit:
        raise UserError(f"--seq-len {run.seq_len} is above the {limit} positions of the {run.preset} preset's model")
    config = run.transformer_config()
    try:
        config.check(run.tp)
    except ValueError as error:
        fitting = ", ".join(str(tp) for tp in range(1, config.num_heads + 1) if _fits(config, tp))
        raise UserError(f"--tp must be one of {fitting} for the {run.preset} preset, not {run.tp}: {error}") from error


def _fits(config, tp: int) -> bool:
    try:
        config.check(tp)
    except ValueError:
        return False
    return True
