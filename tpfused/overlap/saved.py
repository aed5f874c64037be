"""Measurements kept on disk, in one JSON file of the user's cache folder, which all processes share.

A file that is missing or broken counts as empty, and the next measurement writes it anew. Needs no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpfused import extension

PLACES, CASES = 64, 4096  # that are kept: those written last, and as many cases of each

Times = dict[str, float]  # "p2p", "nccl", "reference" -> microseconds


def path() -> Path:
    return extension.cache_folder() / "choices.json"


def load() -> dict[str, dict[str, Times]]:
    """Place (cards and which, hosts, versions) -> case (operation, activation and batches, dtype, shape) -> times."""
    try:
        places = json.loads(path().read_text())
        return {place: {case: us for case, us in cases.items() if _are_times(us)} for place, cases in places.items()}
    except (OSError, ValueError, AttributeError, RuntimeError):  # of these the last: too deep, or no home
        return {}


def save(place: str, case: str, us: Times) -> None:
    """Add a measurement; where the folder cannot be written, it is measured again in the next process."""
    try:
        with _locked():
            places = load()
            cases = places.pop(place, {})
            cases.pop(case, None)
            places[place] = _newest(cases | {case: us}, CASES)
            new = path().with_suffix(".new")
            new.write_text(json.dumps(_newest(places, PLACES), indent=1))
            os.replace(new, path())  # a reader, which takes no lock, sees all of the old file or of this one
    except (OSError, RuntimeError):
        pass


def clear() -> int:
    """Forget all measurements. Returns how many there were."""
    if not path().exists():
        return 0
    with _locked():
        count = sum(map(len, load().values()))
        path().unlink(missing_ok=True)
    return count


@contextmanager
def _locked() -> Iterator[None]:
    """Of two processes that add a measurement at the same time, one would undo the other's."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with open(path().with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _newest(entries: dict, count: int) -> dict:
    return dict(list(entries.items())[-count:])


def _are_times(us) -> bool:
    return isinstance(us, dict) and all(isinstance(time, float) and time > 0 for time in us.values())
