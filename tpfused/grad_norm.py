"""Gradient clipping by the norm of the whole model's gradients, however they are split over ranks."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tpfused.checks import check_boolean, check_number, check_tensor
from tpfused.collectives import all_gather
from tpfused.group import TPGroup
from tpfused.main_grad import check_one_gradient, gradients_of
from tpfused.placement import local, splits


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm over the whole model is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` for any mix of plain shards, DTensors (FSDP2's included) and parameters
    that are whole on each rank, which count once. Every rank of every group involved must call it, with its
    parameters in the same order and the same ones without gradients, which are skipped. Each distinct group
    costs one collective of a few numbers; there is none where nothing is sharded, and no synchronisation with
    the host unless `error_if_nonfinite`.

    Where a parameter has a `main_grad`, that is its gradient, which is counted and scaled. Its `grad` is then None, or
    `main_grad` itself. Only where ``grad_added_to_main_grad`` is True there may be another one, whose sum with
    `main_grad` is counted, and both are scaled: zeros for hooks, or the gradient of another use, as of a tied embedding
    (Megatron-LM's convention: see `accumulate_main_grad` of `ColumnParallelLinear`).

    Args:
        parameters: one tensor or many. Gradients may be sparse in the COO layout, as an `nn.Embedding`'s are.
        max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is below 1. Numbers may be numpy's
            or zero-dimensional tensors, too; for one on a GPU the host waits.
        norm_type: p > 0 of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise, changing nothing, when the norm is NaN or infinite.
        foreach: as torch's function takes it; many gradients at a time are scaled in any case.

    Returns:
        The norm before scaling, a 0-dimensional float32 tensor (float64 if some gradient is), the same on
        every rank.

    Raises:
        ValueError: `norm_type` is not positive, `max_norm` is negative or NaN, or either is too large for a float; a
            parameter has a `main_grad` and another gradient in `grad`, without that mark.
        TypeError: numbers that are none, parameters that are no tensors, gradients of another sparse layout.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set, or the process group that a parameter is
            split over was destroyed.
    """
    max_norm = _float(max_norm, "max_norm")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative or NaN, but is {max_norm}")
    norm_type = _float(math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type, "norm_type")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    check_boolean(error_if_nonfinite, "error_if_nonfinite")
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be a tensor or several, not {type(parameters).__name__}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for index, param in enumerate(parameters):
        check_tensor(param, "each of the parameters")
        check_one_gradient(param, f"parameter {index}, of shape {tuple(param.shape)},")
    parameters = [param for param in parameters if gradients_of(param)]
    gradients = [grad for param in parameters for grad in gradients_of(param)]
    for grad in gradients:
        if grad.layout not in (torch.strided, torch.sparse_coo):
            raise TypeError(
                f"a gradient of shape {tuple(grad.shape)} is {grad.layout}: only dense and sparse_coo ones are clipped"
            )
    if not parameters:
        return torch.zeros(())
    total = _total_norm(parameters, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradients' total norm of order {norm_type} is {total.item()}: nothing was clipped")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_dtype = {}
    for grad in gradients:
        by_dtype.setdefault(grad.dtype, []).append(grad._values() if grad.is_sparse else local(grad))
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, scale.to(dtype))  # one kernel only where scale has the same dtype
    return total


def _float(number: object, what: str) -> float:
    """A number of Python's, of numpy's, or a zero-dimensional tensor, as torch's function takes them."""
    if isinstance(number, Tensor) and number.ndim == 0:
        number = number.item()
    if isinstance(number, np.number):
        number = number.item()
    check_number(number, what)
    return float(number)


def _total_norm(parameters: list[Tensor], norm_type: float) -> Tensor:
    groups = {}  # TPGroups by their key, in the order in which all ranks meet them
    buckets = {}  # local gradients by the keys of the groups that they are split over
    for param in parameters:
        split_over = [split.group for split in splits(param) if split.group.size > 1]
        groups.update((_key(group), group) for group in split_over)
        buckets.setdefault(tuple(map(_key, split_over)), []).append(_own_gradient(param))

    grads = [grad for bucket in buckets.values() for grad in bucket]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    zero = torch.zeros((), dtype=dtype, device=grads[0].device)
    norms = {}
    for keys, bucket in buckets.items():
        # An empty shard has no largest absolute value and is left out; its rank still joins the collectives below.
        bucket = [grad for grad in bucket if grad.numel()]
        of_each = _norms(bucket, norm_type, dtype) if bucket else [zero]
        norms[keys] = torch.linalg.vector_norm(torch.stack(list(of_each)), norm_type)
    for key, group in groups.items():
        # Gathered, not all-reduced: no powers that overflow, no NaN lost in a maximum, one order of summation for all.
        split_here = [keys for keys in norms if key in keys]
        own = torch.stack([norms[keys] for keys in split_here])
        of_all = all_gather(own[None], 0, group.size, group)
        norms.update(zip(split_here, torch.linalg.vector_norm(of_all, norm_type, dim=0), strict=True))
    return torch.linalg.vector_norm(torch.stack(list(norms.values())), norm_type)


def _norms(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> Sequence[Tensor]:
    if grads[0].device.type == "cpu":
        # One float32 sum over a million squares is off by 1e-5 there; over rows, and then their norms, by 1e-7.
        grads = [torch.linalg.vector_norm(g, norm_type, dim=-1, dtype=dtype) if g.ndim > 1 else g for g in grads]
    return torch._foreach_norm(grads, norm_type, dtype=dtype)


def _key(group: TPGroup) -> tuple:
    return group.process_group, group.replicas


def _own_gradient(param: Tensor) -> Tensor:
    """The local part of the gradient, split as the parameter is; of a sparse one the values, those of one place added
    up."""
    own, *more = (_own_part(grad, param) for grad in gradients_of(param))
    if own.is_sparse:
        return own.coalesce().values()
    for each in more:
        own = own + each.to(own.dtype)  # out of place: what is scaled are the parts
    return own


def _own_part(grad: Tensor, param: Tensor) -> Tensor:
    """A DTensor's gradient may have come as partial sums."""
    placements = getattr(grad, "placements", None)  # a main_grad may be a plain tensor, the local part already
    if placements is None or placements == param.placements:
        return local(grad)
    return local(grad.redistribute(placements=param.placements))
