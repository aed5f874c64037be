"""What is refused by an error here, and by an assertion in the library whose names these are."""

from __future__ import annotations

from tpfused import sharding
from tpfused.checks import AssertedError


def divide(numerator: int, denominator: int, what: str) -> int:
    """`tpfused.sharding.divide`, raising that."""
    try:
        return sharding.divide(numerator, denominator, what)
    except ValueError as error:
        raise AssertedError(*error.args) from None
