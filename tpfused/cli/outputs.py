"""Files that a command is asked to write, looked at before the work whose result they will hold."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpfused.cli.errors import UserError

FILES = ("json", "csv", "plot")


def check_list(options: Mapping[str, Any]) -> None:
    """Refuse files that --list would not write."""
    unused = [f"--{name}" for name in FILES if options["list"] and options.get(name) is not None]
    if unused:
        raise UserError(f"--list only prints, and takes no {', '.join(unused)}")


def check_named(option: str, given: str | None) -> None:
    """Refuse a name that is empty, which would otherwise be that of the current folder; None is not given."""
    if given == "":
        raise UserError(f"--{option} needs a name, and '' is empty")


def check_writable(option: str, given: str) -> None:
    """Refuse a file that cannot be written."""
    check_named(option, given)
    path = Path(given).resolve()
    name_max = os.pathconf("/", "PC_NAME_MAX")
    if os.path.isdir(path):
        raise UserError(f"--{option} {given} cannot be written: it is a folder")
    if not os.path.isdir(path.parent):
        raise UserError(f"--{option} {given} cannot be written: there is no folder {path.parent}")
    if len(os.fsencode(path.name)) > name_max:
        raise UserError(f"--{option} {given} cannot be written: a name has at most {name_max} bytes")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--{option} {given} cannot be written: no permission")


@contextmanager
def writing(option: str, given: str) -> Iterator[None]:
    """Around the writing itself: a disk can be full all the same."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--{option} {given} cannot be written: {error.strerror or error}") from error
