"""`python -m tpfused` is `tpfused`."""

import sys

from tpfused.cli import main

if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main())
