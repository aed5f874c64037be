"""The sizes that are measured, and the groups they are measured on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpfused.cli.errors import UserError

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SIZES = [2**power for power in range(10, 31, 2)]  # 1 KiB to 1 GiB
QUICK = (2**10, 2**16, 2**20, 2**24, 2**28)
CPU_MOST = 2**24  # what gloo does in tens of milliseconds


@dataclass(frozen=True)
class Case:
    """A collective of so many bytes, as `bus_factor` counts them. `quick`: also with --quick."""

    op: str
    size: int
    quick: bool

    @property
    def name(self) -> str:
        return told(self.size)

    @property
    def label(self) -> str:
        return f"{self.op} {self.name}"


@dataclass(frozen=True)
class Grid:
    """The ranks as a (dp, tp) grid, tensor-parallel ones side by side."""

    dp: int
    tp: int

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def groups(self) -> dict[str, list[list[int]]]:
        """Groups that work at the same time, by kind: "all" ranks, or "tp" and "dp" of a grid with two sides."""
        if self.dp == 1 or self.tp == 1:
            return {"all": blocks(self.world, self.world)}
        rows = blocks(self.world, self.tp)
        return {"tp": rows, "dp": [list(column) for column in zip(*rows, strict=True)]}


def blocks(world: int, ranks: int) -> list[list[int]]:
    """Groups of so many ranks side by side."""
    return [list(range(first, first + ranks)) for first in range(0, world, ranks)]


def split_groups(world: int, degrees: Iterable[int]) -> list[list[int]] | None:
    """The groups that split the layers whose rates are measured, where these degrees of tensor parallelism are asked
    about: of the largest one, or all ranks where none splits anything; None for one rank alone.
    """
    largest = max(degrees)
    ranks = world if largest == 1 else largest
    return blocks(world, ranks) if ranks > 1 else None


def cases(op: str, sizes: list[int]) -> list[Case]:
    return [Case(op, size, size in QUICK) for size in sizes]


def parse_sizes(text: str) -> list[int]:
    """Bytes, of "64K,1M,2GiB".

    Raises:
        UserError: it is something else.
    """
    sizes = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(iB|B)?\s*", part, re.IGNORECASE)
        size = int(found[1]) * UNITS[found[2].upper()] if found else 0
        if not 1 <= size <= 2**36:
            raise UserError(f"--sizes {text!r}: {part.strip()!r} is no size such as 64K, 16M or 1G, of 64 GiB at most")
        sizes.add(size)
    return sorted(sizes)


def told(size: int) -> str:
    """1048576 -> "1 MiB"; whole numbers of the largest unit that leaves one."""
    unit, bytes_each = max(
        ((unit, each) for unit, each in UNITS.items() if size % each == 0), key=lambda found: found[1]
    )
    return f"{size // bytes_each} {unit}{'iB' if unit else 'B'}"


def grid(world: int, tp: int | None, dp: int | None) -> Grid:
    """`world` ranks; without `tp` and `dp` all in one group.

    Raises:
        UserError: they do not make a grid.
    """
    tp = tp or (world // dp if dp else world)
    dp = dp or max(1, world // tp)
    if tp * dp != world:
        raise UserError(f"--tp {tp} and --dp {dp} make {tp * dp} ranks, and there are {world}")
    return Grid(dp, tp)
