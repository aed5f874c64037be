"""One rank of `tpfused check`."""

from __future__ import annotations

import warnings
import zlib
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tpfused.agreement import by_rank
from tpfused.checking.cases import Case, run
from tpfused.checking.rule import Verdict
from tpfused.group import TPGroup, resolve_group
from tpfused.overlap.choice import tiers_of
from tpfused.overlap.communicator import set_timeout
from tpfused.overlap.tiers import TIERS
from tpfused.workers import Worker, join_group, take_gpu

TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """Of all ranks: the largest ratio, of which tensor, and an error; or why the case was not to be run here."""

    ratio: float
    tensor: str = ""
    error: str = ""
    skipped: str = ""


def work(argument: dict[str, Any], worker: Worker) -> None:
    """Run ``argument["cases"]``; the first rank emits each one's `Answer`. Ranks that no group of a case's degree has
    wait for the others."""
    on_gpu = argument["device"] == "cuda"
    device = take_gpu(worker.local_rank, worker.local_world) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    set_timeout(TIMEOUT_S)
    join_group(worker, device, TIMEOUT_S)
    groups = {degree: _group(degree, worker) for degree in argument["degrees"]}
    by_tiers = sorted({case.tp for case in argument["cases"] if case.tier in TIERS})
    lacking = {degree: _lacking(groups[degree], device) for degree in by_tiers}
    for case in argument["cases"]:
        if worker.rank == 0:
            worker.emit("start", case.label)
        if why := lacking.get(case.tp, {}).get(case.tier):
            answer = Answer(float("nan"), skipped=why)
        else:
            torch.manual_seed(data_seed(argument["seed"], case, worker.rank // case.tp))
            group = groups[case.tp]
            answer = _agreed((Verdict(0.0, ""), "") if group is None else _attempt(case, group, device))
        if worker.rank == 0:
            worker.emit("answer", answer)
    dist.destroy_process_group()


def data_seed(seed: int, case: Case, group: int) -> int:
    """The seed of a case's data in the `group`-th group: the same in every run, whichever other cases it has."""
    return zlib.crc32(f"{seed} {case.label} {group}".encode())


def _group(degree: int, worker: Worker) -> TPGroup | None:
    """The block of `degree` consecutive ranks that this one is in; None for the ranks that are left over."""
    blocks = [list(range(first, first + degree)) for first in range(0, worker.world - degree + 1, degree)]
    mine, _ = dist.new_subgroups_by_enumeration(blocks)
    return None if mine is None else resolve_group(mine)


def _lacking(group: TPGroup | None, device: torch.device) -> dict[str, str]:
    """The tiers that are not to be had in all groups of this size, and why: as the ranks without them are warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        tiers = TIERS if group is None else tiers_of(group, device)
    mine = tiers, [str(each.message).removeprefix("tpfused: ") for each in caught]
    told = by_rank(mine, dist.group.WORLD).values()
    reasons = {name: [why for tiers, why in told if name not in tiers] for name in TIERS}
    return {
        name: "; ".join(dict.fromkeys(chain(*of_ranks))) or "not all ranks have it"
        for name, of_ranks in reasons.items()
        if of_ranks
    }


def _attempt(case: Case, group: TPGroup, device: torch.device) -> tuple[Verdict, str]:
    try:
        return run(case, group, device), ""
    except Exception as error:  # of whatever kind, it is this case's: the others are still to be checked
        return Verdict(float("inf"), ""), f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _agreed(mine: tuple[Verdict, str]) -> Answer:
    """The worst of all ranks'."""
    rank, (verdict, error) = max(by_rank(mine, dist.group.WORLD).items(), key=lambda each: each[1][0].ratio)
    return Answer(*verdict, error=f"rank {rank}: {error}" if error else "")
