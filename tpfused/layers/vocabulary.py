"""How large a vocabulary is whose logits are split: what one rank alone can see to be wrong, all ranks are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.agreement import Failure, by_rank, raise_either, told
from tpfused.group import TPGroup, exists
from tpfused.sharding import shard_size


class _Known(NamedTuple):
    """What all ranks of a group were found to agree on: logits that fit `vocab_size`, or without it the width."""

    process_group: dist.ProcessGroup
    vocab_size: int | None
    width: int | None


class _Said(NamedTuple):
    """What a rank tells the others of its call."""

    vocab_size: int | None
    width: int
    failure: Failure | None


_known: set[_Known] = set()


def whole_vocabulary(
    logits: Tensor, vocab_size: int | None, group: TPGroup, operation: str, refused: Exception | None = None
) -> int:
    """The size of the vocabulary of which each rank's `logits`, as `checks.check_logits` wants them, are a part.

    That is `vocab_size`; without it, of equally wide shards, as each rank would take another one otherwise. The ranks
    compare theirs where `vocab_size`, or without it the width, is new to them, and under TORCH_DISTRIBUTED_DEBUG=DETAIL
    at each call, but not in compiled code or a CUDA graph's capture. No one waits at a call of what is known. So:

    - Where it is new to some ranks only, as they give different ones, those wait for their process group's time-out.
    - Where they give different ones, each of them known by then, nothing is compared here, and a result may be wrong
      without a word. Under DETAIL all ranks raise. Of the cross entropy they do wherever labels are checked at once,
      and its kernels give NaN on some rank; its plain path otherwise, and the argmax, tell nothing.
    - Where one rank's logits do not fit a `vocab_size` that is known, or it is `refused` other arguments, that rank
      raises alone.

    Args:
        refused: what this rank raises for its other arguments. Where the ranks compare, all of them raise it.

    Raises:
        ValueError: on all ranks that compare, where one rank's logits do not fit, or they give different sizes.
        Exception: `refused`; on all ranks that compare, where one has it.
    """
    width = logits.shape[-1]
    own = _Said(vocab_size, width, told(refused))
    known = _Known(group.process_group, vocab_size, width if vocab_size is None else None)
    compare = group.size > 1 and _is_asked(known, logits)
    said = _of_all_ranks(logits, own, group, refused) if compare else {group.rank: own}
    raise_either(refused, next(filter(None, (other.failure for other in said.values())), None))
    _check(said, group, operation)
    if compare:
        _known.difference_update([other for other in _known if not exists(other.process_group)])
        _known.add(known)
    return width * group.size if vocab_size is None else vocab_size


def _is_asked(known: _Known, logits: Tensor) -> bool:
    """Whether the other ranks are, which all of them must decide alike."""
    if torch.compiler.is_compiling() or logits.is_meta:
        return False
    if known in _known and dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return False
    return not (logits.is_cuda and torch.cuda.is_current_stream_capturing())


def _of_all_ranks(logits: Tensor, own: _Said, group: TPGroup, refused: Exception | None) -> dict[int, _Said]:
    try:
        with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
            return dict(enumerate(by_rank(own, group.process_group).values()))
    except RuntimeError as error:
        if refused is not None:
            raise refused from error
        error.add_note(
            f"The ranks were comparing the widths of their logits, as they do at the first vocab_size {own.vocab_size} "
            f"of {own.width} entries a rank. A rank that did not come was refused its arguments, or has died: look at "
            f"its output. Or it gives another size, which it knows: TORCH_DISTRIBUTED_DEBUG=DETAIL compares at each "
            f"call."
        )
        raise


def _check(said: dict[int, _Said], group: TPGroup, operation: str) -> None:
    """By rank of the group the `vocab_size` and the width of the logits."""
    vocab_size = said[group.rank].vocab_size
    if len({other.vocab_size for other in said.values()}) > 1:
        sizes = ", ".join(f"rank {rank}'s {other.vocab_size}" for rank, other in said.items())
        raise ValueError(f"{operation}: the ranks give different sizes of the whole vocabulary as vocab_size=: {sizes}")
    widths = {rank: other.width for rank, other in said.items()}
    if vocab_size is None:
        if min(widths.values()) != max(widths.values()):
            shards = ", ".join(f"rank {rank}'s {width}" for rank, width in widths.items())
            raise ValueError(
                f"{operation}: without vocab_size= the logits of all ranks must be equally wide, but of "
                f"{sum(widths.values())} entries these are {shards}: give the whole vocabulary's size as vocab_size="
            )
        return
    owned = {rank: shard_size(vocab_size, group.size, rank) for rank in widths}
    wrong = [rank for rank in widths if widths[rank] != owned[rank]]
    if wrong:
        rank = group.rank if group.rank in wrong else wrong[0]
        gathered = " (are they gathered?)" if widths[rank] == vocab_size else ""
        raise ValueError(
            f"{operation}: rank {rank} of {group.size} owns {owned[rank]} of a vocabulary of {vocab_size}, but its "
            f"logits are {widths[rank]} wide{gathered}"
        )
