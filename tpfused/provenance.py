"""Where measured numbers come from: what every file of results says of its machine, its versions and its commit."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tpfused
from tpfused.cli.info import collect


def measured_on(device: str, gpus: int) -> dict[str, Any]:
    """`device` is the name of what the numbers were measured on, `gpus` how many of it."""
    return {
        "device": device,
        "gpus": gpus,
        "versions": collect()["versions"],
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The commit that the package is of, when it is used from a checkout of its own."""
    root = Path(tpfused.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
