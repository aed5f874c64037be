"""The tolerance of `tpfused check`."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

Results = dict[str, Tensor]  # outputs and gradients by name
CHAIN = 10  # where roundings pass through several operations, luck decides which of two computations is nearer

ROUNDINGS_OF_FLOAT64 = 100  # plain PyTorch's error is not known there: there is nothing more exact to compare with


class Verdict(NamedTuple):
    """How far the worst of several tensors is from float64, in units of what is allowed."""

    ratio: float
    tensor: str


def judge(
    actual: Results,
    exact: Results,
    eager: Results,
    part: Callable[[str, Tensor], Tensor],
    single: Container[str] = (),
) -> Verdict:
    """Compare with ``max|x - exact| <= CHAIN * (2 max|eager - exact| + 2 eps max|exact|)``, of float64 with 100 eps.

    What is NaN or infinite, or compared with what is, counts as infinitely far: nothing can be said of it.

    Args:
        actual: this rank's parts.
        exact, eager: the whole of each, in float64 and as plain PyTorch computes it in the same dtype.
        part: of a whole, this rank's part.
        single: the tensors that one operation computes, in one matmul: without CHAIN.
    """
    worst = Verdict(0.0, "")
    for name, value in actual.items():
        expected = part(name, exact[name])
        if value.shape != expected.shape:
            return Verdict(float("inf"), f"{name} (shape {tuple(value.shape)}, not {tuple(expected.shape)})")
        if not value.numel():
            continue
        for x, whose in ((exact[name], " of float64"), (eager[name], " of plain PyTorch"), (value, "")):
            if not x.isfinite().all():
                return Verdict(float("inf"), f"{name}{whose} (not finite)")
        error = (value.double() - expected).abs().max().item()
        allowed = 2 * (eager[name].double() - exact[name]).abs().max().item()
        roundings = ROUNDINGS_OF_FLOAT64 if value.dtype == torch.float64 else 2
        allowed += roundings * torch.finfo(value.dtype).eps * exact[name].abs().max().item()
        allowed *= 1 if name in single else CHAIN
        ratio = error / allowed if allowed else float("inf") if error else 0.0
        if ratio > worst.ratio:
            worst = Verdict(ratio, name)
    return worst
