"""fairscale's four mappings in and out of a model-parallel region, along the last dimension.

Differs from fairscale: no argument is changed in place (its reduction returns its argument, overwritten), and what they
return can be differentiated once.
"""

from __future__ import annotations

from torch import Tensor

from tpfused import collectives
from tpfused.checks import check_dense
from tpfused.compat.asserted import divide
from tpfused.compat.fairscale.initialize import get_model_parallel_group as get_model_parallel_group
from tpfused.compat.fairscale.initialize import tp_group
from tpfused.compat.fairscale.utils import split_tensor_along_last_dim as split_tensor_along_last_dim
from tpfused.compat.sizes import size_of


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """`input_`, whole on each rank, as it is. Its gradient is all-reduced."""
    check_dense(input_, "copy_to_model_parallel_region", "the input")
    return collectives.copy_to_group(input_, tp_group())


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """The sum over the ranks of each one's `input_`. Its gradient passes as it is."""
    check_dense(input_, "reduce_from_model_parallel_region", "the input")
    return collectives.reduce_from_group(input_, tp_group())


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """``[..., n]``, whole on each rank -> this rank's ``[..., n / ranks]``. Its gradient is all-gathered.

    Raises:
        ValueError: n does not divide by the number of ranks.
    """
    group = tp_group()
    features = size_of(input_, -1, "scatter_to_model_parallel_region")
    divide(features, group.size, "the last dimension over the model-parallel ranks")
    return collectives.scatter_to_group(input_, -1, group)


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's ``[..., n]``, of one size on all ranks -> all ranks' ``[..., n * ranks]``. Its gradient is sliced."""
    group = tp_group()
    features = size_of(input_, -1, "gather_from_model_parallel_region")
    return collectives.gather_from_group(input_, -1, features * group.size, group)
