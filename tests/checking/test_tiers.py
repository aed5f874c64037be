"""`tpfused check` where the GPUs lack a tier: its cases are skipped, and that is told, and is no failure."""

import json
import warnings

import pytest
import torch

from tests.overlap.extension import Communicator, stand_in
from tpfused import cli, extension
from tpfused.checking import job, worker
from tpfused.checking.cases import OPERATIONS, Case
from tpfused.checking.worker import Answer
from tpfused.group import TPGroup
from tpfused.overlap import choice

TIERS = "p2p", "nccl", "reference"
CASES = [Case("operation", name, 2, "fp32", by, 1) for name in OPERATIONS for by in TIERS]
CASES += [Case("layer", "ParallelMLP", 2, "fp32")]
NO_ACCESS = "the rows of 2 ranks travel by NCCL, for they do not reach each other's memory"
NOT_COMPILED = "collectives are not overlapped with matmuls, for rank 0 lacks the compiled extension: compiling failed:"


def without_peer_access(argument, of):
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        place_of = choice._place_of

        def warn_and_place(group, device, capturing, operation):
            if group.rank == 0:
                warnings.warn(f"tpfused: {NO_ACCESS}", stacklevel=2)
            return place_of(group, device, capturing, operation)

        patch.setattr(Communicator, "tiers", ("nccl",))
        patch.setattr(choice, "_place_of", warn_and_place)
        worker.work(argument, of)


def without_extension(argument, of):
    def load():
        raise extension.NotBuildable("compiling failed:\nnvcc: a line of it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "load", load)
        patch.setattr(choice, "_card", lambda device: ("Fake GPU", "0:1b"))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        worker.work(argument, of)


@pytest.mark.parametrize(
    "work, lacking, why",
    [
        (without_peer_access, ["p2p"], NO_ACCESS),
        (without_extension, ["p2p", "nccl"], f"{NOT_COMPILED}\nnvcc: a line of it"),
    ],
    ids=["no peer access", "no extension"],
)
def test_a_tier_that_is_not_to_be_had_is_skipped(work, lacking, why, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(job, "work", work)
    monkeypatch.setattr(job, "cases", lambda *arguments: CASES)
    path = tmp_path / "check.json"
    assert cli.main(["check", "--cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["meta"]["complete"] and [row["label"] for row in found["rows"]] == [case.label for case in CASES]
    for row in found["rows"]:
        is_skipped = row["tier"] in lacking
        assert row["skipped"] == (why if is_skipped else "") and not row["error"], row["label"]
        assert row["ok"] is (None if is_skipped else True) and (row["ratio"] is None) == is_skipped, row["label"]
    told = capfd.readouterr().out
    skipped = len(OPERATIONS) * len(lacking)
    assert f"\n{len(CASES) - skipped} right, 0 wrong, {skipped} skipped of {len(CASES)} in " in told
    for case in CASES:
        assert (f"  skip  {case.label}: {why.splitlines()[0]}\n" in told) == (case.tier in lacking)
        assert (f"  ok    {case.label}: " in told) == (case.tier not in lacking)
    for by in lacking:
        assert f"\n  skipped: {len(OPERATIONS)} by {by} tp2: {why}\n" in told


def test_what_is_wrong_counts_beside_what_is_skipped(capsys, monkeypatch):
    def run_workers(work, argument, world, on_event):
        for ratio, skipped in ((0.5, ""), (float("nan"), "no peer access"), (2.0, ""), (float("nan"), "")):
            on_event("answer", Answer(ratio, "result", skipped=skipped))

    monkeypatch.setattr(job, "run_workers", run_workers)
    monkeypatch.setattr(job, "cases", lambda *arguments: CASES[:4])
    assert cli.main(["check", "--cpu"]) == 1
    told = capsys.readouterr().out
    assert "\n1 right, 2 wrong, 1 skipped of 4 in " in told
    assert told.count("wrong: ") == 2 and f'--case "{CASES[2].label}"' in told


def test_a_tier_that_one_group_lacks_is_lacking(monkeypatch):
    both = "p2p", "nccl"
    of_ranks = [(both, []), (both, ["something else"]), (("nccl",), ["no peer access"]), (("nccl",), [])]

    def by_rank(mine, group):
        assert mine == of_ranks[2]
        return dict(enumerate(of_ranks))

    def tiers_of(group, device):
        warnings.warn("tpfused: no peer access", stacklevel=2)
        return ("nccl",)

    monkeypatch.setattr(worker, "tiers_of", tiers_of)
    monkeypatch.setattr(worker, "by_rank", by_rank)
    assert worker._lacking(TPGroup(None, 0, 2), torch.device("cpu")) == {"p2p": "no peer access"}


def test_the_plain_path_is_always_there():
    assert all("reference" in tiers for tiers in job.TIERS.values())
