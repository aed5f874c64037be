"""The process groups of a program written for fairscale, kept for the whole process as there.

Differs from fairscale: nothing is printed, and what it asserts is a `ValueError` here, which is an `AssertionError`,
too. Layers keep the group that they were made with.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

from tpfused.checks import AssertedError
from tpfused.compat.asserted import divide
from tpfused.compat.fairscale.utils import ensure_divisibility as ensure_divisibility
from tpfused.group import TPGroup, resolve_group
from tpfused.parameter import check_size

# Those this rank is a member of. Under fairscale's names, since programs set them.
_MODEL_PARALLEL_GROUP: torch.distributed.ProcessGroup | None = None
_DATA_PARALLEL_GROUP: torch.distributed.ProcessGroup | None = None
_PIPELINE_PARALLEL_GROUP: torch.distributed.ProcessGroup | None = None
_CONTEXT_PARALLEL_GROUP: torch.distributed.ProcessGroup | None = None
_KINDS = ("MODEL", "DATA", "PIPELINE")  # there is always a context-parallel group to be had

_THEIRS = "fairscale.nn.model_parallel.initialize"


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Make the groups: consecutive ranks split a model, consecutive such blocks are a pipeline, the rest are copies.

    8 ranks with ``initialize_model_parallel(2, 2)``: models [0, 1], [2, 3], [4, 5], [6, 7], pipelines [0, 2], [1, 3],
    [4, 6], [5, 7], and data-parallel groups [0, 4], [1, 5], [2, 6], [3, 7]. Every rank of the program calls it.

    Args:
        model_parallel_size_: ranks that split a model; where there are fewer ranks than that, all of them.
        pipeline_length: ranks of a pipeline.
        context_parallel_size: ranks that share sequences, for the program's own use: consecutive models, and what is
            said of pipelines above is then of blocks of so many models.
        model_parallel_backend, pipeline_backend, cp_backend, ddp_backend: of each kind's groups; None: torch's default
            group's.
        timeout: of all groups; None: torch's default.

    Raises:
        ValueError: sizes that do not divide the number of ranks, groups that exist already (fairscale's count), no
            default process group.
        TypeError: sizes that are not integers.
    """
    global _MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP, _PIPELINE_PARALLEL_GROUP, _CONTEXT_PARALLEL_GROUP
    shards = check_size(model_parallel_size_, "model_parallel_size_")
    stages = check_size(pipeline_length, "pipeline_length")
    parts = check_size(context_parallel_size, "context_parallel_size")
    # By its whole name here: programs' tests put something else in the place of torch.distributed.
    if not torch.distributed.is_initialized():
        raise AssertedError("call torch.distributed.init_process_group before initialize_model_parallel")
    if any(_known(kind) is not None for kind in _KINDS):
        raise AssertedError("the model-parallel groups exist already; destroy_model_parallel forgets them")
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    shards = min(shards, world)
    what = f"ranks over {shards} of a model times {parts} of a sequence times {stages} of a pipeline"
    copies = divide(world, shards * parts * stages, what)
    ranks = torch.arange(world, device="cpu").view(copies, stages, parts, shards)
    # Only where it is given: what stands in for new_group may not know it.
    options = {} if timeout is None else {"timeout": timeout}

    def own_group(dim: int, backend: str | None) -> torch.distributed.ProcessGroup:
        # All ranks make all groups, in one order: torch wants that.
        lists = ranks.movedim(dim, -1).flatten(0, 2).tolist()
        made = [torch.distributed.new_group(members, backend=backend, **options) for members in lists]
        return next(group for members, group in zip(lists, made, strict=True) if rank in members)

    data, pipeline = own_group(0, ddp_backend), own_group(1, pipeline_backend)
    model, context = own_group(3, model_parallel_backend), own_group(2, cp_backend) if parts > 1 else None
    _MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP = model, data
    _PIPELINE_PARALLEL_GROUP, _CONTEXT_PARALLEL_GROUP = pipeline, context


def destroy_model_parallel() -> None:
    """Forget the groups, fairscale's too. The process groups themselves live on, for layers that use them."""
    global _MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP, _PIPELINE_PARALLEL_GROUP, _CONTEXT_PARALLEL_GROUP
    _MODEL_PARALLEL_GROUP = _DATA_PARALLEL_GROUP = _PIPELINE_PARALLEL_GROUP = _CONTEXT_PARALLEL_GROUP = None
    if any(_known(kind) is not None for kind in _KINDS):
        sys.modules[_THEIRS].destroy_model_parallel()


def model_parallel_is_initialized() -> bool:
    """Whether there are groups: made here, or by fairscale."""
    return all(_known(kind) is not None for kind in _KINDS)


def get_model_parallel_group() -> torch.distributed.ProcessGroup:
    """The ranks that split this rank's model. `ValueError`, here and below, before the groups are made."""
    return _find("MODEL")


def get_data_parallel_group() -> torch.distributed.ProcessGroup:
    """The ranks that hold copies of this rank's shard."""
    return _find("DATA")


def get_pipeline_parallel_group() -> torch.distributed.ProcessGroup:
    """The ranks of this rank's pipeline."""
    return _find("PIPELINE")


def get_context_parallel_group() -> torch.distributed.ProcessGroup:
    """The ranks that share this rank's sequences; it alone, unless `initialize_model_parallel` was told otherwise."""
    global _CONTEXT_PARALLEL_GROUP
    if model_parallel_is_initialized() and _known("CONTEXT") is None:
        # Few programs ask, and this takes no other rank.
        alone = [torch.distributed.get_rank()]
        _CONTEXT_PARALLEL_GROUP = torch.distributed.new_group(alone, use_local_synchronization=True)
    return _find("CONTEXT")


def get_pipeline_parallel_ranks() -> list[int]:
    """The global ranks of this rank's pipeline, in order."""
    return torch.distributed.get_process_group_ranks(get_pipeline_parallel_group())


def get_model_parallel_world_size() -> int:
    """How many ranks split a model."""
    return torch.distributed.get_world_size(get_model_parallel_group())


def get_model_parallel_rank() -> int:
    """Which shard of the model this rank holds."""
    return torch.distributed.get_rank(get_model_parallel_group())


def get_model_parallel_src_rank() -> int:
    """The global rank that holds the first shard of this rank's model."""
    return torch.distributed.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_ranks() -> list[int]:
    """The global ranks that hold copies of this rank's shard, in order."""
    return torch.distributed.get_process_group_ranks(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    """How many ranks hold copies of one shard."""
    return torch.distributed.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Which copy this rank holds."""
    return torch.distributed.get_rank(get_data_parallel_group())


def get_context_parallel_ranks() -> list[int]:
    """The global ranks that share this rank's sequences, in order."""
    return torch.distributed.get_process_group_ranks(get_context_parallel_group())


def get_context_parallel_world_size() -> int:
    """How many ranks share sequences."""
    return torch.distributed.get_world_size(get_context_parallel_group())


def get_context_parallel_rank() -> int:
    """Which part of the sequences is this rank's."""
    return torch.distributed.get_rank(get_context_parallel_group())


def tp_group() -> TPGroup:
    """The model-parallel group as tpfused's layers take it."""
    return resolve_group(get_model_parallel_group())


def _find(kind: str) -> torch.distributed.ProcessGroup:
    if (group := _known(kind)) is None:
        raise AssertedError(f"there is no {kind.lower()}-parallel group yet: call initialize_model_parallel first")
    return group


def _known(kind: str) -> torch.distributed.ProcessGroup | None:
    """Made here or by fairscale, if the program has imported it; not imported for the question's sake."""
    name = f"_{kind}_PARALLEL_GROUP"
    own = getattr(sys.modules[__name__], name)  # torch.compile does not know globals()
    return own if own is not None else getattr(sys.modules.get(_THEIRS), name, None)
