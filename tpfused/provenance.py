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
    """The commit that the package is of, when it is used from a checkout of its own; "-dirty" where files differ from
    it, other than those that benchmarks write."""
    root = Path(tpfused.__file__).parents[1]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    written = [f":(exclude){path}" for path in ("benchmarks/results", "README.md")]
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
