"""Sizes of what programs give, or errors that name it."""

from __future__ import annotations

from torch import Tensor

from tpfused.checks import check_tensor


def size_of(x: Tensor, dim: int, function: str) -> int:
    """Of `x` along `dim`.

    Raises:
        TypeError: `x` is not a tensor.
        ValueError: it has no dimensions.
    """
    check_tensor(x, f"{function}: the input")
    if not x.ndim:
        raise ValueError(f"{function}: the input has no dimensions, and {dim} is to be one")
    return x.shape[dim]
