"""Token ids and labels outside the vocabulary: an error, without a synchronisation on the GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.group import TPGroup

CHECK_MODES = ("async", "sync", "off")


def check_mode(mode: str) -> None:
    if mode not in CHECK_MODES:
        raise ValueError(f"check must be one of {', '.join(CHECK_MODES)}, not {mode!r}")


class IdCheck:
    """Checks ids against ``[0, size)`` for one caller.

    On the CPU, and with mode "sync", bad ids raise at once. On a GPU the extremes are copied to the host beside the
    work, and a bad one raises at this check's next call; the caller writes NaN meanwhile, so that nothing computed from
    bad ids looks right. Nothing is checked in mode "off", under graph capture, or while compiling.
    """

    def __init__(self, what: str):
        self.what = what
        self.pending: tuple[Tensor, torch.cuda.Event, int] | None = None

    def __deepcopy__(self, memo: dict) -> IdCheck:
        return IdCheck(self.what)

    def __reduce__(self):
        return IdCheck, (self.what,)

    def __call__(
        self, ids: Tensor, size: int, mode: str, ignore_index: int | None = None, group: TPGroup | None = None
    ) -> bool:
        """Whether some id may be out of range, which the next call will tell.

        Of a `group` all ranks raise at once, if any does or their sizes differ, by an all-reduce of four numbers.

        Raises:
            ValueError: an id of this call (at once) or of the previous one (on a GPU) is out of range; at once, the
            ranks of `group` give different sizes.
        """
        check_mode(mode)
        self._raise_pending()
        if mode == "off" or ids.numel() == 0 or ids.is_meta or torch.compiler.is_compiling():
            return False
        if ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        known = ids if ignore_index is None else ids.masked_fill(ids == ignore_index, 0)
        extremes = torch.stack(known.aminmax())
        if mode == "sync" or not ids.is_cuda:
            self._check(extremes, size, group)
            return False
        on_host = torch.empty_like(extremes, device="cpu", pin_memory=True).copy_(extremes, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.pending = (on_host, copied, size)
        return True

    def _raise_pending(self) -> None:
        if self.pending is None or torch.compiler.is_compiling():
            return
        if torch.cuda.is_current_stream_capturing():
            return
        # Waited for rather than polled, so that every rank raises at the same call; it is long done but in a tight
        # loop.
        (on_host, copied, size), self.pending = self.pending, None
        copied.synchronize()
        self._check(on_host, size)

    def _check(self, extremes: Tensor, size: int, group: TPGroup | None = None) -> None:
        """`extremes`: the least id and the largest one."""
        where = ""
        if group is not None and group.size > 1:
            extremes, where = self._of_all_ranks(extremes, size, group), f" among those of {group.size} ranks"
        least, most = extremes.tolist()
        bad = [f"{least} (the smallest)"] * (least < 0) + [f"{most} (the largest)"] * (most >= size)
        if bad:
            raise ValueError(f"{self.what} must be in [0, {size}), found {' and '.join(bad)}{where}")

    def _of_all_ranks(self, extremes: Tensor, size: int, group: TPGroup) -> Tensor:
        both = torch.stack((extremes, extremes.new_full((2,), size)))  # the extremes of the sizes travel for free
        flip = both.new_tensor([-1, 0])  # bits, so that the least is the largest, without the overflow of a sign
        largest = both ^ flip
        dist.all_reduce(largest, dist.ReduceOp.MAX, group.process_group)
        extremes, sizes = largest ^ flip
        least, most = sizes.tolist()
        if least != most:
            raise ValueError(
                f"{self.what}: the ranks give different sizes of the whole vocabulary, from {least} to {most}"
            )
        return extremes
