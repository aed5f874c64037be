#!/usr/bin/env python3
"""`tpfused bench model`, for a checkout that is not installed: the same options, the same results."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpfused.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["bench", "model", *sys.argv[1:]]))
