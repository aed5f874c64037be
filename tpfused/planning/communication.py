"""What a collective costs: nccl-tests' bandwidths, and a latency-bandwidth model fitted to measurements. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md): the bytes that each link must carry, a
    byte of the operation's size.

    That size is, as there, the bytes of the whole: what each rank gives to an all-reduce, a broadcast or an all-to-all,
    what it gets from an all-gather, and what it gives to a reduce-scatter.

    Raises:
        ValueError: an unknown operation.
    """
    if op not in OPERATIONS:
        raise ValueError(f"unknown collective {op!r}: choose {', '.join(OPERATIONS)}")
    if op == "broadcast":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if op == "all_reduce" else share


def bandwidths(op: str, ranks: int, size: float, us: float) -> tuple[float, float]:
    """Algorithm bandwidth, ``size / time``, and bus bandwidth, in GB/s (1e9 bytes)."""
    algorithm = size / us / 1e3
    return algorithm, algorithm * bus_factor(op, ranks)


@dataclass(frozen=True)
class Fit:
    """``time = alpha + size * beta`` of one collective on one kind of group (Hockney, 1994, "The communication
    challenge for MPP: Intel Paragon and Meiko CS-2", eq. 1).

    Attributes:
        group: "tp" or "dp" where it was measured on groups of a grid, else "all".
        alpha_us: the latency.
        us_per_byte: beta, of `bus_factor`'s size.
        rms_error, max_error: of the model's times, relative to the measured ones.
        points: how many sizes it was fitted to.
    """

    op: str
    group: str
    ranks: int
    alpha_us: float
    us_per_byte: float
    rms_error: float = 0.0
    max_error: float = 0.0
    points: int = 0

    @property
    def bus_gbps(self) -> float:
        """Of an infinite size; 0 where the size made no difference."""
        return bus_factor(self.op, self.ranks) / self.us_per_byte / 1e3 if self.us_per_byte else 0.0

    def us(self, size: float, ranks: int | None = None) -> float:
        """The time for `size` bytes; on another number of `ranks`, with the same bus bandwidth, and a latency that
        grows with the steps of a tree, ``log2(ranks)`` (Thakur et al., 2005, "Optimization of Collective Communication
        Operations in MPICH", section 4).
        """
        if ranks is None or ranks == self.ranks:
            return self.alpha_us + size * self.us_per_byte
        steps = math.log(ranks) / math.log(self.ranks)
        carried = bus_factor(self.op, ranks) / bus_factor(self.op, self.ranks)
        return self.alpha_us * steps + size * self.us_per_byte * carried


def fit(op: str, group: str, ranks: int, points: Sequence[tuple[float, float]]) -> Fit:
    """The model of these (size, microseconds), as `line` finds it.

    Raises:
        ValueError: as `line`.
    """
    alpha, beta = line(op, points)
    errors = [(alpha + size * beta) / us - 1 for size, us in points]
    rms = math.sqrt(sum(error * error for error in errors) / len(errors))
    return Fit(op, group, ranks, alpha, beta, rms, max(map(abs, errors)), len(points))


def line(what: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Alpha and beta of ``us = alpha + size * beta`` by relative least squares: the smallest sum of
    ``((alpha + size * beta - us) / us) ** 2`` for which neither is negative. In absolute squares only the largest sizes
    would count, whose times are a hundred times those of the smallest.

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"{what}: a fit needs two sizes or more, not {len({size for size, _ in points})}")
    if any(us <= 0 for _, us in points):
        raise ValueError(f"{what}: times must be positive")
    return _solve([(1 / us, size / us) for size, us in points])


def _solve(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of ``a * u + b * v = 1``, a and b at least 0."""
    uu, uv, vv = sum(u * u for u, _ in rows), sum(u * v for u, v in rows), sum(v * v for _, v in rows)
    u, v = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    a, b = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if a < 0:
        return 0.0, v / vv
    return (u / uu, 0.0) if b < 0 else (a, b)


def nearest(fits: Iterable[Fit], op: str, ranks: int, group: str) -> Fit:
    """The fit to predict `op` by: of the same kind of group if there is one, then of the nearest number of ranks.

    Raises:
        ValueError: there is none of `op`.
    """
    found = [each for each in fits if each.op == op]
    if not found:
        raise ValueError(f"nothing is known of {op} here: measure it with tpfused bench comm")
    return min(found, key=lambda each: (each.group != group, abs(math.log(each.ranks / ranks))))
