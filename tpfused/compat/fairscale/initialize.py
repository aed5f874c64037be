"""The process groups of a program written for fairscale, kept for the whole process as there.

Differs from fairscale: nothing is printed, and what it asserts is a `ValueError` here. Layers keep the group that they
were made with.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from tpfused.group import TPGroup, resolve_group
from tpfused.parameter import check_size
from tpfused.sharding import divide


class _Groups(NamedTuple):
    """Those this rank is a member of."""

    model: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup


_groups: _Groups | None = None


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
) -> None:
    """Make the groups: consecutive ranks split a model, consecutive such blocks are a pipeline, the rest are copies.

    8 ranks with ``initialize_model_parallel(2, 2)``: models [0, 1], [2, 3], [4, 5], [6, 7], pipelines [0, 2], [1, 3],
    [4, 6], [5, 7], and data-parallel groups [0, 4], [1, 5], [2, 6], [3, 7]. Every rank of the program calls it.

    Args:
        model_parallel_size_: ranks that split a model; where there are fewer ranks than that, all of them.
        pipeline_length: ranks of a pipeline.
        model_parallel_backend, pipeline_backend, ddp_backend: of each kind's groups; None: torch's default group's.

    Raises:
        ValueError: sizes that do not divide the number of ranks, groups that exist already (fairscale's count), no
            default process group.
        TypeError: sizes that are not integers.
    """
    global _groups
    check_size(model_parallel_size_, "model_parallel_size_")
    check_size(pipeline_length, "pipeline_length")
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group before initialize_model_parallel")
    if model_parallel_is_initialized():
        raise ValueError("the model-parallel groups exist already; destroy_model_parallel forgets them")
    world = dist.get_world_size()
    shards, stages = min(model_parallel_size_, world), pipeline_length
    copies = divide(world, shards * stages, f"ranks over {shards} of a model times {stages} of a pipeline")
    ranks = torch.arange(world, device="cpu").view(copies, stages, shards)

    def own_group(dim: int, backend: str | None) -> dist.ProcessGroup:
        # All ranks make all groups, in one order: torch wants that.
        lists = ranks.movedim(dim, -1).flatten(0, 1).tolist()
        made = [dist.new_group(members, backend=backend) for members in lists]
        return next(group for members, group in zip(lists, made, strict=True) if dist.get_rank() in members)

    data, pipeline = own_group(0, ddp_backend), own_group(1, pipeline_backend)
    _groups = _Groups(own_group(2, model_parallel_backend), data, pipeline)


def destroy_model_parallel() -> None:
    """Forget the groups, fairscale's too. The process groups themselves live on, for layers that use them."""
    global _groups
    _groups = None
    if (theirs := _fairscale()) is not None:
        theirs.destroy_model_parallel()


def model_parallel_is_initialized() -> bool:
    """Whether there are groups: made here, or by fairscale."""
    theirs = _fairscale()
    return _groups is not None or (theirs is not None and theirs.model_parallel_is_initialized())


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's model. `ValueError`, here and below, before the groups are made."""
    return _find("model")


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold copies of this rank's shard."""
    return _find("data")


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline."""
    return _find("pipeline")


def get_pipeline_parallel_ranks() -> list[int]:
    """The global ranks of this rank's pipeline, in order."""
    return dist.get_process_group_ranks(get_pipeline_parallel_group())


def get_model_parallel_world_size() -> int:
    """How many ranks split a model."""
    return dist.get_world_size(get_model_parallel_group())


def get_model_parallel_rank() -> int:
    """Which shard of the model this rank holds."""
    return dist.get_rank(get_model_parallel_group())


def get_model_parallel_src_rank() -> int:
    """The global rank that holds the first shard of this rank's model."""
    return dist.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    """How many ranks hold copies of one shard."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Which copy this rank holds."""
    return dist.get_rank(get_data_parallel_group())


def tp_group() -> TPGroup:
    """The model-parallel group as tpfused's layers take it."""
    return resolve_group(get_model_parallel_group())


def _find(kind: str) -> dist.ProcessGroup:
    if not model_parallel_is_initialized():
        raise ValueError("there are no model-parallel groups yet: call initialize_model_parallel first")
    if _groups is not None:
        return getattr(_groups, kind)
    return getattr(_fairscale(), f"get_{kind}_parallel_group")()


def _fairscale():
    """fairscale's module of this name, if the program has imported it; not imported for the question's sake."""
    theirs = sys.modules.get("fairscale.nn.model_parallel.initialize")
    # A program may have put this very module in its place.
    return None if theirs is sys.modules[__name__] else theirs
