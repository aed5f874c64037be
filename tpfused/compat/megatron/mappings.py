"""Megatron-LM's mappings between whole and split activations: the conjugate pairs of `tpfused.collectives`.

Each takes a tensor (of integers too, which have no gradient) and the tensor-parallel ProcessGroup (`group`, found as
the package says if None), and raises `ValueError` where the dimension that it splits does not divide by the ranks, or
is not there, and `TypeError` for what is no tensor.

Accepted without meaning here: `use_global_buffer` (from where Megatron takes the memory of a collective's result).
Refused with a `ValueError`, as all ranks hold equally many tokens: `output_split_sizes` and `input_split_sizes`.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor

from tpfused.checks import check_boolean, check_dense
from tpfused.collectives import (
    all_gather_tokens,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_tokens,
    scatter_to_group,
)
from tpfused.compat.asserted import divide
from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.compat.sizes import size_of
from tpfused.group import TPGroup, resolve_group


def find_group(tp_group: dist.ProcessGroup | None) -> TPGroup:
    """`tp_group`, else that of an initialised ``megatron.core.parallel_state``, else the default group."""
    if tp_group is None and (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        tp_group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return resolve_group(tp_group)


def check_divides(x: Tensor, dim: int, group: TPGroup, what: str) -> None:
    size = size_of(x, dim, what)
    divide(size, group.size, f"{what}: dimension {dim} of {tuple(x.shape)} over tensor-parallel ranks")


def copy_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The same; the gradient is all-reduced."""
    check_dense(input_, "copy_to_tensor_model_parallel_region", "the input")
    return copy_to_group(input_, find_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over the ranks; the gradient is the same."""
    check_dense(input_, "reduce_from_tensor_model_parallel_region", "the input")
    return reduce_from_group(input_, find_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's slice of the last dimension; the gradient is all-gathered."""
    tp = find_group(group)
    check_divides(input_, -1, tp, "scatter_to_tensor_model_parallel_region")
    return scatter_to_group(input_, -1, tp)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' slices of the last dimension; the gradient is this rank's slice."""
    tp = find_group(group)
    features = size_of(input_, -1, "gather_from_tensor_model_parallel_region")
    return gather_from_group(input_, -1, features * tp.size, tp)


def scatter_to_sequence_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's tokens (dimension 0); the gradient is all-gathered."""
    tp = find_group(group)
    check_divides(input_, 0, tp, "scatter_to_sequence_parallel_region")
    return scatter_to_group(input_, 0, tp)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: dist.ProcessGroup | None = None,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All ranks' tokens (dimension 0), as many from each.

    The gradient is reduce-scattered if what follows is split over the ranks (`tensor_parallel_output_grad`), and this
    rank's slice if every rank repeats it. `output_split_sizes` must be None; `use_global_buffer` is without meaning.
    """
    _refuse_split_sizes(output_split_sizes, "gather_from_sequence_parallel_region", "output_split_sizes")
    check_boolean(tensor_parallel_output_grad, "tensor_parallel_output_grad")
    tp = find_group(group)
    gather = all_gather_tokens if tensor_parallel_output_grad else gather_from_group
    return gather(input_, 0, size_of(input_, 0, "gather_from_sequence_parallel_region") * tp.size, tp)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: dist.ProcessGroup | None = None,
    input_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's tokens (dimension 0) of the sum over the ranks; the gradient is all-gathered.

    `input_split_sizes` must be None; `use_global_buffer` is without meaning.
    """
    _refuse_split_sizes(input_split_sizes, "reduce_scatter_to_sequence_parallel_region", "input_split_sizes")
    tp = find_group(group)
    check_divides(input_, 0, tp, "reduce_scatter_to_sequence_parallel_region")
    return reduce_scatter_tokens(input_, 0, tp)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' slices of the last dimension; the gradient is reduce-scattered."""
    tp = find_group(group)
    features = size_of(input_, -1, "all_gather_last_dim_from_tensor_parallel_region")
    return all_gather_tokens(input_, -1, features * tp.size, tp)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's slice of the last dimension of the sum over the ranks; the gradient is all-gathered."""
    tp = find_group(group)
    check_divides(input_, -1, tp, "reduce_scatter_last_dim_to_tensor_parallel_region")
    return reduce_scatter_tokens(input_, -1, tp)


def _refuse_split_sizes(sizes: list[int] | None, function: str, name: str) -> None:
    if sizes is not None:
        raise ValueError(f"{function}: {name} {sizes} is not supported, all ranks hold equally many tokens")


__getattr__ = names_of("megatron.core.tensor_parallel.mappings")
