"""Files that a command is asked to write, looked at before the work whose result they will hold."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpfused.cli.errors import UserError


def check_writable(option: str, given: str) -> None:
    """Refuse a file that cannot be written."""
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
        raise UserError(f"--{option} {given} cannot be written: {error.strerror}") from error
