"""Sizes of what programs give, or errors that name it; and labels of other integers than tpfused's."""

from __future__ import annotations

import torch
from torch import Tensor

from tpfused.checks import check_dense


def size_of(x: Tensor, dim: int, function: str) -> int:
    """Of `x` along `dim`.

    Raises:
        TypeError: it is no dense tensor of this rank.
        ValueError: it has no dimensions.
    """
    check_dense(x, function, "the input")
    if not x.ndim:
        raise ValueError(f"{function}: the input has no dimensions, and {dim} is to be one")
    return x.shape[dim]


def as_labels(target: Tensor) -> Tensor:
    """Integers as int64. What is none stays, to be refused where labels are checked."""
    odd = not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex()
    return target if odd or target.dtype == torch.bool else target.long()
