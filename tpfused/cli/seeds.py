"""The type of every command's --seed."""

from tpfused.cli.errors import UserError


def seed(given: str | int) -> int:
    """A seed that every generator takes: of the command line, or of a file."""
    number = int(given)
    if not 0 <= number < 2**63:
        raise UserError(f"--seed must be at least 0 and below 2**63, not {number}")
    return number
