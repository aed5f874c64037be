"""The measured choice of a tier: all ranks come to the same, whatever one of them lacks. On a CPU there are fakes."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Workers, connected
from tests.overlap.choices import LAPS, TIERS, Attempts, FakeCommunicator, fakes, saved_in, tier_of
from tests.overlap.extension import stand_in
from tpfused.explanation import Choice, explain
from tpfused.group import resolve_group
from tpfused.overlap import calls, communicator
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.choice import choose
from tpfused.overlap.tiers import tier


@pytest.fixture(scope="module")
def workers():
    with Workers("cpu", 4) as pool:
        yield pool


def check_agreement(ctx, folder):
    # Each tier is some rank's favourite; the one whose slowest rank is the fastest is none's but the last's.
    us = [{"p2p": 90.0, "nccl": 50.0}, {"p2p": 90.0, "nccl": 40.0}, {"p2p": 90.0, "nccl": 1.0}, {"p2p": 99.0}]
    attempts = Attempts(**us[ctx.rank], reference=120.0 + ctx.rank)
    with fakes(folder):
        assert tier_of(ctx, attempts) == "p2p" and len(attempts.ran) == 3 * LAPS
        (row,) = explain()
        assert row == Choice("op", 1024, 64, 32, "bfloat16", 4, "p2p", "measured", row.us)
        assert row.us == {"p2p": 99.0, "nccl": 200.0, "reference": 123.0}
        for rows in (1000, 1024, 800, 1400):
            assert tier_of(ctx, attempts, (rows, 64, 32)) == "p2p"
        assert len(attempts.ran) == 3 * LAPS
        others = [{"shape": (3000, 64, 32)}, {"shape": (1000, 65, 32)}, {"shape": (1000, 64, 33)}]
        others += [{"shape": (1000, 64, None)}, {"dtype": torch.float16}, {"operation": "another"}]
        for count, other in enumerate(others, 2):
            assert tier_of(ctx, attempts, **other) == "p2p"
            assert len(attempts.ran) == 3 * LAPS * count and len(explain()) == count


def test_the_slowest_rank_counts(workers, tmp_path):
    workers.run(check_agreement, tmp_path)
    (place,) = saved_in(tmp_path)
    assert place.startswith("4 x Fake GPU (PCI 0:1b:00), hosts: 1, tiers: p2p nccl, tpfused ")
    assert len(saved_in(tmp_path)[place]) == 7 and "op bfloat16 1024 64 ?" in saved_in(tmp_path)[place]


def check_the_file_decides(ctx, folders, attempts):
    with fakes(folders[ctx.rank]):
        name, (row,) = tier_of(ctx, attempts), explain()
    return name, row.why, len(attempts.ran)


def test_the_first_ranks_file_counts(workers, tmp_path):
    folders = [tmp_path / str(rank) for rank in range(4)]
    workers.run(check_the_file_decides, folders, Attempts())
    assert [folder.exists() for folder in folders] == [True, False, False, False]
    ((place, cases),) = saved_in(folders[0]).items()
    (case,) = cases
    assert case == "op bfloat16 1024 64 32"
    for folder, times in zip(folders, ({"nccl": 1.0}, {"p2p": 2.0}, {"reference": 3.0}), strict=False):
        folder.mkdir(exist_ok=True)
        us = {"p2p": 9.0, "nccl": 9.0, "reference": 9.0} | times
        (folder / "choices.json").write_text(json.dumps({place: {case: us}}))
    found = workers.run(check_the_file_decides, folders, Attempts())
    assert found == [("nccl", "measured before, kept on disk", 0)] * 4
    (folders[0] / "choices.json").unlink()
    assert workers.run(check_the_file_decides, folders, Attempts()) == [("p2p", "measured", 3 * LAPS)] * 4
    del cases[case]["nccl"]  # a kept choice between fewer tiers
    (folders[0] / "choices.json").write_text(json.dumps({place: cases}))
    assert workers.run(check_the_file_decides, folders, Attempts()) == [("p2p", "measured", 3 * LAPS)] * 4


def check_failures(ctx, folder):
    def fails(name, rank):
        return {name: RuntimeError(f"no {name}")} if ctx.rank == rank else {}

    with fakes(folder):
        assert tier_of(ctx, Attempts(**fails("p2p", 2))) == "nccl"
        assert explain()[0].why == "measured; p2p failed on rank 2: RuntimeError: no p2p"
        assert set(explain()[0].us) == {"nccl", "reference"}
        assert tier_of(ctx, Attempts(**fails("p2p", 0), **fails("nccl", 3)), operation="two") == "reference"
        assert tier_of(ctx, Attempts(**fails("reference", 1), nccl=50.0), operation="three") == "nccl"
        attempts = Attempts(*3 * [RuntimeError("nothing works")])
        assert tier_of(ctx, attempts, operation="four") == "reference" and attempts.ran == ["reference"]
        assert tier_of(ctx, Attempts(), operation="five") == "p2p"
        with pytest.raises(ValueError, match="different sizes: op bfloat16 1000 64 9, op bfloat16 1000 64 1, "):
            tier_of(ctx, Attempts(), (1000, 64, ctx.rank or 9))
        with pytest.raises(ValueError, match="different sizes: op bfloat16 1010 32 9, op bfloat16 1011 32 9, "):
            tier_of(ctx, Attempts(), (1010 + ctx.rank, 32, 9))  # of one size, rounded


def test_what_fails_on_one_rank_is_used_on_none(workers, tmp_path):
    workers.run(check_failures, tmp_path)
    ((_, cases),) = saved_in(tmp_path).items()
    assert list(cases) == ["five bfloat16 1024 64 32"]  # with more memory, say, the others may work


def check_want_of_memory(ctx):
    """One rank alone lacks it for one tier, which exchanges rows: the others do not wait for it there."""
    tp, run = resolve_group(ctx.group(ctx.world)), calls._run

    def run_without_memory(link, *arguments):
        if link[1] == "p2p":
            raise torch.OutOfMemoryError("no room")
        return run(link, *arguments)

    torch.manual_seed(ctx.rank)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with tier("reference"):
        expected = all_gather_matmul(x, weight, group=tp.process_group)
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 2:
            patch.setattr(calls, "_run", run_without_memory)
        torch.testing.assert_close(all_gather_matmul(x, weight, group=tp.process_group), expected)
        (row,) = explain()
        assert (row.tier, row.why) == ("nccl", "measured; p2p failed on rank 2: OutOfMemoryError: no room")


def test_a_rank_that_lacks_memory_for_a_tier_keeps_no_other_waiting(workers):
    workers.run(check_want_of_memory)


def check_absent_ranks(ctx, folder):
    process_group = connected(dist.new_group())
    group, absent = resolve_group(process_group), ctx.rank % 2
    with fakes(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_timeout", 0.3)

        def op(rows):
            return choose("op", group, torch.zeros(1, dtype=torch.bfloat16), (rows, 64, 32), Attempts())

        told = f"on rank {ctx.rank} of 4: not called after 0.3 s by rank 1, rank 3"
        if not absent:
            with pytest.raises(RuntimeError, match=f"op, the group's first overlapped operation, {told}"):
                op(1000)
        dist.destroy_process_group(process_group)
        process_group = dist.new_group()
        group = resolve_group(process_group)
        assert op(1000)[1] == "p2p" and op(1024)[1] == "p2p"
        if not absent:
            with pytest.raises(RuntimeError, match=f"op bfloat16 3000 64 32 {told}"):
                op(3000)
        dist.destroy_process_group(process_group)


def test_ranks_that_do_not_come_to_a_new_size_are_named(workers, tmp_path):
    workers.run(check_absent_ranks, tmp_path)


def check_given_up(ctx, folder):
    """An operation of the group was given up: all raise at one that is new, and this rank at any."""

    def give_up():
        if ctx.rank == 2:
            made.given_up = "op has not ended after 1 s"
        raise RuntimeError("given up")

    class GivesUp(Attempts):
        def __call__(self, chosen):
            return super().__call__(chosen) if chosen is None else give_up()

    for attempts in (Attempts(), GivesUp()):  # before it is measured, and meanwhile
        made = FakeCommunicator(*TIERS)
        with fakes(folder / type(attempts).__name__, made):
            assert tier_of(ctx, Attempts(reference=1.0), operation="known") == "reference"
            if type(attempts) is Attempts:
                made.given_up = "op has not ended after 1 s" if ctx.rank == 2 else None
            told = "^op has not ended" if ctx.rank == 2 else "rank 2 raised RuntimeError: op has not ended after 1 s"
            with pytest.raises(RuntimeError, match=told):
                tier_of(ctx, attempts, operation="new")
            if ctx.rank == 2:
                with pytest.raises(RuntimeError, match=told):
                    tier_of(ctx, Attempts(), operation="known")
                with pytest.raises(RuntimeError, match=told):
                    tier_of(ctx, Attempts(), dtype=torch.float64)
            else:
                assert tier_of(ctx, Attempts(), operation="known") == "reference"


def test_after_a_time_out_no_operation_runs(workers, tmp_path):
    workers.run(check_given_up, tmp_path)
