"""How an overlapped operation's rows travel: by copy engines ("p2p"), by NCCL, or before the matmul ("reference").

By NCCL, each step of a gather or a scatter sends to one peer and receives from another, as by copy engines: the matmul
of what has come need not wait for the rest, and parts are added in the ranks' order, in float32.

There is no tier whose matmul kernel waits for rows and sends them itself (one or two rows' all-reduce does, see
csrc/multiply_and_push.h): with 8192 rows copy engines come to 1.03 of the floor or below for all-gathers, and to 1.05
for reduce-scatters (README's tables), without a matmul of our own for each card. What is left to win is in
reduce-scatters of 2048 rows and less, in all-reduces, and in gathers of outputs, of which the last part travels when
everything is multiplied. Nor is there one by NCCL's copy-engine all-gather through symmetric windows. A matmul beside
it took 1.16 and 1.09 of its time alone (8192 x 4096 and 8192 x 8192 rows, two H100), beside NCCL's usual kernel 1.20
and 1.14, and beside plain pushes 1.02 and 1.00.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

TIERS = ("nccl", "p2p")  # in the extension's order
PLAIN = ("sequential", "reference")  # torch's collective before or after the whole matmul
NAMES = ("measured", "first", *TIERS, *PLAIN)
exact = [False]  # whether all tiers must give the same bits; as of those wanted, the last one counts
wanted = [os.environ.get("TPFUSED_TIER") or "measured"]  # whatever it says: operations raise, an import must not


def why_invalid(name: str, what: str = "TPFUSED_TIER") -> str:
    """Empty, or that `what` must be another."""
    return "" if name in NAMES else f"{what} must be one of {NAMES}, not {name!r}"


@contextmanager
def tier(name: str) -> Iterator[None]:
    """Say by which tier the operations inside run, those of layers included; all ranks must say the same. It holds for
    the process: also for its other threads, which must not be in a block of their own meanwhile.

    The environment variable TPFUSED_TIER, read when the first operation is imported, says it for those outside.

    Args:
        name: "p2p" or "nccl" force that tier. Under "sequential" nothing is overlapped: torch's collective comes before
            or after the whole matmul; under "reference" the layers use none of Triton's kernels either, as with their
            ``backend="reference"``. "first" takes the first tier that the group has, and measures nothing; "measured",
            where nothing else is said, the one that was measured to be best. Tiers do not add in the same order: where
            each run must give the same bits, force one, or see `deterministic`.

    Raises:
        ValueError: there is no such tier. The operations inside raise it where their group lacks the tier; what no tier
        can run (tensors on the CPU, float64, ...) takes the plain path, and says so in a warning.
    """
    if told := why_invalid(name, "tier"):
        raise ValueError(told)
    wanted.append(name)
    try:
        yield
    finally:
        wanted.pop()


@contextmanager
def deterministic() -> Iterator[None]:
    """The operations inside give the same bits at every run, in a CUDA graph or not, by "p2p" and by "nccl"; all ranks
    must say so. It holds for the process, all of its threads, as `tier` does.

    Each part of a sum is rounded to the dtype, and they are added in float32 in the ranks' order, by NCCL's tier too.
    Both multiply the same rows at a time, and overlap less for it. Nothing is measured: the first tier runs that the
    group has, unless one is forced. "reference" is not among them, and adds as torch's collectives do.
    """
    exact.append(True)
    try:
        yield
    finally:
        exact.pop()


def recomputed_alike() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For the `context_fn` of ``torch.utils.checkpoint``: recomputation runs by the tier of forward, for another saves
    other tensors, also where that was chosen around forward alone."""
    return nullcontext(), _Again(wanted[-1], exact[-1])


class _Again:
    """A context that is entered at every backward pass through the same graph."""

    def __init__(self, name: str, is_exact: bool):
        self._name, self._is_exact = name, is_exact

    def __enter__(self) -> None:
        wanted.append(self._name)
        exact.append(self._is_exact)

    def __exit__(self, *_) -> None:
        wanted.pop()
        exact.pop()
