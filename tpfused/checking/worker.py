"""One rank of `tpfused check`."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from tpfused.checking.cases import Case, run
from tpfused.checking.rule import Verdict
from tpfused.group import TPGroup, resolve_group
from tpfused.overlap.communicator import set_timeout
from tpfused.workers import Worker, join_group

TIMEOUT_S = 60.0
Answer = tuple[float, str, str]  # the largest ratio of all ranks, of which tensor, and an error


def work(argument: dict[str, Any], worker: Worker) -> None:
    """Run ``argument["cases"]``; the first rank emits each one's `Answer`."""
    on_gpu = argument["device"] == "cuda"
    device = torch.device("cuda", worker.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    set_timeout(TIMEOUT_S)
    join_group(worker, device, TIMEOUT_S)
    groups = {degree: _group(degree, worker) for degree in argument["degrees"]}
    for case in argument["cases"]:
        if worker.rank == 0:
            worker.emit("start", case.label)
        group = groups[case.tp]
        torch.manual_seed(data_seed(argument["seed"], case, worker.rank // case.tp))
        answer = _agreed(_attempt(case, group, device))
        if worker.rank == 0:
            worker.emit("answer", answer)
    dist.destroy_process_group()


def data_seed(seed: int, case: Case, group: int) -> int:
    """The seed of a case's data in the `group`-th group: the same in every run, whichever other cases it has."""
    return zlib.crc32(f"{seed} {case.label} {group}".encode())


def _group(degree: int, worker: Worker) -> TPGroup:
    """The block of `degree` consecutive ranks that this one is in."""
    blocks = [list(range(first, first + degree)) for first in range(0, worker.world, degree)]
    mine, _ = dist.new_subgroups_by_enumeration(blocks)
    return resolve_group(mine)


def _attempt(case: Case, group: TPGroup, device: torch.device) -> tuple[Verdict, str]:
    try:
        return run(case, group, device), ""
    except Exception as error:  # of whatever kind, it is this case's: the others are still to be checked
        return Verdict(float("inf"), ""), f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _agreed(mine: tuple[Verdict, str]) -> Answer:
    """The worst of all ranks'."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    rank, (verdict, error) = max(enumerate(told), key=lambda each: each[1][0].ratio)
    return verdict.ratio, verdict.tensor, f"rank {rank}: {error}" if error else ""
