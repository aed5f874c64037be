"""What every benchmark's command line has: rounds, a seed, and where the results go."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpfused.bench.results import write_csv, write_json
from tpfused.cli.errors import UserError
from tpfused.cli.outputs import check_writable


def check_options(options: Mapping[str, Any]) -> None:
    """Find out before the measurements what would spoil their report."""
    if options["rounds"] is not None and options["rounds"] < 1:
        raise UserError(f"--rounds must be at least 1, not {options['rounds']}")
    if options["seed"] is not None and not 0 <= options["seed"] < 2**63:
        raise UserError(f"--seed must be at least 0 and below 2**63, not {options['seed']}")
    for option in ("json", "csv"):
        if options[option] is not None:
            check_writable(option, options[option])
    if options["json"] and options["csv"] and os.path.realpath(options["json"]) == os.path.realpath(options["csv"]):
        raise UserError(f"--json and --csv are one file, {options['json']}")
    if options["plot"] is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError('--plot needs matplotlib: pip install "tpfused[bench]"')
        try:
            Path(options["plot"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--plot {options['plot']}: {error.strerror}") from error
        if not os.access(options["plot"], os.W_OK):
            raise UserError(f"--plot {options['plot']} cannot be written")


def write(options: Mapping[str, Any], meta: Mapping[str, Any], rows: list) -> None:
    """The files that --json and --csv ask for."""
    if options["json"]:
        write_json(options["json"], meta, rows)
    if options["csv"]:
        write_csv(options["csv"], rows)
