"""Token ids and labels outside the vocabulary: an error, without a synchronisation on the GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.group import TPGroup, resolve_group

CHECK_MODES = ("async", "sync", "off")


def check_mode(mode: str) -> None:
    if mode not in CHECK_MODES:
        raise ValueError(f"check must be one of {', '.join(CHECK_MODES)}, not {mode!r}")


class IdCheck:
    """Checks ids against ``[0, size)`` for one caller.

    On the CPU, and with mode "sync", bad ids raise at once, in compiled code too. On a GPU in mode "async" the caller
    writes NaN, so that nothing computed from bad ids looks right. In eager calls the extremes are copied to the host
    beside the work, too, and a bad one raises at this check's next call; compiled code tells of it by NaN only, and so
    does a CUDA graph, in mode "sync" too. Nothing is checked in mode "off".
    """

    def __init__(self, what: str):
        self.what = what
        self.pending: tuple[Tensor, torch.cuda.Event, int] | None = None

    def __deepcopy__(self, memo: dict) -> IdCheck:
        return IdCheck(self.what)

    def __reduce__(self):
        return IdCheck, (self.what,)

    def __call__(
        self,
        ids: Tensor,
        size: int,
        mode: str,
        ignore_index: int | None = None,
        group: TPGroup | None = None,
        after: Tensor | None = None,
    ) -> tuple[Tensor, bool]:
        """-> the ids to compute with, and whether the caller is to write NaN for those out of range.

        Of a `group` all ranks raise at once, if any does or their sizes differ, by an all-reduce of four numbers. In
        compiled code that comes after `after` is computed, which keeps the collectives of all ranks in one order.

        Raises:
            ValueError: an id of this call (at once) or of the previous one (on a GPU) is out of range; at once, the
            ranks of `group` give different sizes.
        """
        check_mode(mode)
        if torch.compiler.is_compiling():
            if mode == "off" or ids.is_meta:
                return ids, False
            if ids.is_cuda and mode == "async":
                return ids, True
            name = "" if group is None or group.size == 1 else group.process_group.group_name
            after = None if after is None else after.detach()
            return _checked(ids, self.what, size, ignore_index, name, after), ids.is_cuda
        capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._raise_pending()
        if mode == "off" or ids.numel() == 0 or ids.is_meta:
            return ids, False
        if capturing:
            return ids, True
        extremes = _extremes(ids, ignore_index)
        if mode == "sync" or not ids.is_cuda:
            _check(self.what, extremes, size, group)
            return ids, False
        on_host = torch.empty_like(extremes, device="cpu", pin_memory=True).copy_(extremes, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.pending = (on_host, copied, size)
        return ids, True

    def _raise_pending(self) -> None:
        if self.pending is None:
            return
        # Waited for rather than polled, so that every rank raises at the same call; it is long done but in a tight
        # loop.
        (on_host, copied, size), self.pending = self.pending, None
        copied.synchronize()
        _check(self.what, on_host, size)


# The host looks at the ids, so it is for no CUDA graph.
@torch.library.custom_op("tpfused::checked_ids", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _checked(ids: Tensor, what: str, size: int, ignore_index: int | None, group: str, after: Tensor | None) -> Tensor:
    """A copy of the ids for compiled code to compute with, which would leave out a check that gives nothing. `group`:
    its name, or none."""
    if ids.numel() and not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        ranks = resolve_group(dist.distributed_c10d._resolve_process_group(group)) if group else None
        _check(what, _extremes(ids, ignore_index), size, ranks)
    return ids.clone()


@_checked.register_fake
def _(ids, what, size, ignore_index, group, after):
    return torch.empty_like(ids)


def _extremes(ids: Tensor, ignore_index: int | None) -> Tensor:
    """The least id and the largest one."""
    return torch.stack((ids if ignore_index is None else ids.masked_fill(ids == ignore_index, 0)).aminmax())


def _check(what: str, extremes: Tensor, size: int, group: TPGroup | None = None) -> None:
    where = ""
    if group is not None and group.size > 1:
        extremes, where = _of_all_ranks(what, extremes, size, group), f" among those of {group.size} ranks"
    least, most = extremes.tolist()
    bad = [f"{least} (the smallest)"] * (least < 0) + [f"{most} (the largest)"] * (most >= size)
    if bad:
        raise ValueError(f"{what} must be in [0, {size}), found {' and '.join(bad)}{where}")


def _of_all_ranks(what: str, extremes: Tensor, size: int, group: TPGroup) -> Tensor:
    both = torch.stack((extremes, extremes.new_full((2,), size)))  # the extremes of the sizes travel for free
    flip = both.new_tensor([-1, 0])  # bits, so that the least is the largest, without the overflow of a sign
    largest = both ^ flip
    dist.all_reduce(largest, dist.ReduceOp.MAX, group.process_group)
    extremes, sizes = largest ^ flip
    least, most = sizes.tolist()
    if least != most:
        raise ValueError(f"{what}: the ranks give different sizes of the whole vocabulary, from {least} to {most}")
    return extremes
