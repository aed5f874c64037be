"""What was measured, as the JSON file has it."""

from collections.abc import Mapping
from typing import Any

from tpfused.provenance import measured_on
from tpfused.training.presets import PRESETS, RunConfig

# Rounding differences grow with every step: the first ones tell a right gradient from a nearly right one.
FIRST_STEPS = 50


def summarise(run: RunConfig, parallel: Mapping[str, Any], dense: Mapping[str, Any] | None) -> dict[str, Any]:
    """Both runs' results, from the workers' "result" events, beside each other. `dense` may be missing."""
    summary = {
        "preset": run.preset,
        "tp": run.tp,
        "dp": run.dp,
        "steps": run.steps,
        "first_step": run.first_step,
        "dense": None,
        "parallel": _result(run, parallel),
        "memory": "allocator" if run.device == "cuda" else "counted",
    }
    if dense is not None:
        result = summary["dense"] = _result(run, dense)
        for key in ("params", "peak_bytes"):
            (result[key],) = result.pop(f"{key}_per_rank")
    for key in ("loss", "grad_norm"):
        differences = relative_differences(parallel[key], dense[key]) if dense is not None else None
        summary[f"max_rel_{key}_diff"] = max(differences) if differences else None
        summary[f"max_rel_{key}_diff_first_{FIRST_STEPS}"] = max(differences[:FIRST_STEPS]) if differences else None
    return summary


def largest(result: Mapping[str, Any], key: str) -> int | float:
    """The dense twin's number, or the largest of all ranks."""
    return result[key] if key in result else max(result[f"{key}_per_rank"])


def relative_differences(values: list[float], reference: list[float]) -> list[float]:
    return [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(values, reference, strict=True)]


def provenance(run: RunConfig, device_name: str) -> dict[str, Any]:
    """Where the numbers come from: machine, versions, commit and options."""
    gpus = run.world if run.device == "cuda" else 0
    return measured_on(device_name, gpus) | {"config": run.as_dict()}


def _result(run: RunConfig, result: Mapping[str, Any]) -> dict[str, Any]:
    times = dict(result["milliseconds"])
    step_ms = times.pop("step")
    shown = {key: result[key] for key in ("loss", "grad_norm", "params_per_rank", "peak_bytes_per_rank")}
    shown["step_ms"] = step_ms
    shown["tokens_per_s"] = run.batch_size * run.seq_len / step_ms * 1e3
    shown["phases_ms"] = times
    epoch = PRESETS[run.preset].epoch
    if epoch:
        whole = range(-run.first_step % epoch, len(result["loss"]) - epoch + 1, epoch)
        shown["epoch_loss"] = [sum(result["loss"][start : start + epoch]) / epoch for start in whole]
    if "validation" in result:
        shown["validation"] = result["validation"]
    return shown
