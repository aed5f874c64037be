"""The tolerance of `tpfused check`."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

Results = dict[str, Tensor]  # outputs and gradients by name
Size = Callable[[Tensor], float]
CHAIN = 10  # where roundings pass through several operations, luck decides which of two computations is nearer
LEAST_VALUES = 64  # of which a norm is compared: of fewer, luck decides it as well
ROUNDINGS, ROUNDINGS_OF_FLOAT64 = 2, 100  # plain PyTorch's error is not known there: there is nothing more exact


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

    In 16 bits that lets pass what is wrong by a tenth. So there the root mean squares of the same, of the tensor and of
    its worst row, are compared too, and without CHAIN: they average what luck does to the entries.

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
        error, of_eager = value.double() - expected, eager[name].double() - exact[name]
        roundings = ROUNDINGS_OF_FLOAT64 if value.dtype == torch.float64 else ROUNDINGS
        sizes: list[tuple[Size, int]] = [(_largest, 1 if name in single else CHAIN)]
        if value.dtype.itemsize == 2 and value.numel() >= LEAST_VALUES:
            sizes += [(_mean, 1), (_mean_of_worst_row, 1)]
        for size, times in sizes:
            allowed = 2 * size(of_eager) + roundings * torch.finfo(value.dtype).eps * size(exact[name])
            found = size(error)
            ratio = found / (times * allowed) if allowed else float("inf") if found else 0.0
            if ratio > worst.ratio:
                worst = Verdict(ratio, name)
    return worst


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _mean(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _mean_of_worst_row(x: Tensor) -> float:
    return x.square().mean(-1).max().sqrt().item()
