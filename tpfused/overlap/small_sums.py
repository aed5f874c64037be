"""Sums of few numbers over the ranks, such as the gradients of a norm's weight: by one kernel, through peers' memory.

NCCL's all-reduce took three times the host's time (220 us, this 74, both under a profiler); a transformer's block has
two of them in its backward pass under sequence parallelism.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tpfused.group import GROUPS, TPGroup
from tpfused.overlap import calls
from tpfused.overlap.choice import peers_of
from tpfused.overlap.communicator import TYPES
from tpfused.overlap.tiers import exact, wanted

TIERS = ("measured", "first", "p2p")  # asked for, under which this may run


def small_all_reduce(x: Tensor, group: TPGroup, op: dist.ReduceOp.RedOpType) -> Tensor | None:
    """A new tensor, added in float32 in the ranks' order; None where it is for torch's collective: that of all ranks,
    as they have tensors of the same size and dtype. Also for another `op`, in `deterministic`, where all tiers add
    alike, and under TORCH_DISTRIBUTED_DEBUG=DETAIL, which looks whether the ranks' tensors are the same.

    Raises:
        RuntimeError: an earlier operation of the group was given up.
    """
    if torch.compiler.is_compiling():  # first: torch 2.11's compiler cannot compare what `op` is of
        return None
    if op != dist.ReduceOp.SUM or type(x) not in (Tensor, Parameter) or x.dtype not in TYPES:
        return None
    if exact[-1] or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return None
    size = x.numel() * x.element_size()
    if size > calls.MOST_REDUCED or size % 16 or wanted[-1] not in TIERS or group.process_group not in GROUPS:
        return None
    communicator = peers_of(group, x)
    return None if communicator is None else calls.all_reduce(communicator, x)
