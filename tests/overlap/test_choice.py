"""The measured choice of a tier: agreed by all ranks, kept, explained. On a CPU communicators and clocks are fakes."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Workers, connected
from tests.overlap.extension import stand_in
from tpfused.explanation import Choice, Explanation, explain
from tpfused.group import TPGroup, resolve_group, with_replicas
from tpfused.overlap import calls, choice, communicator, measure, saved
from tpfused.overlap.all_gather_matmul import _OPERATION, all_gather_matmul
from tpfused.overlap.choice import bucket, choose
from tpfused.overlap.plans import plan_of
from tpfused.overlap.tiers import tier

SHAPE = 1000, 64, 32
TIERS = "p2p", "nccl"
LAPS = 1 + measure.ROUNDS  # of each candidate


class FakeCommunicator:
    rehearses, why_no_peers = False, ""
    rehearsal = communicator.Communicator.rehearsal

    def __init__(self, *tiers):
        self.tiers = tiers
        self.module = SimpleNamespace(build_info=lambda: {"sources": "1234", "nccl_loaded": 22809})
        self.given_up = None

    def check_alive(self):
        if self.given_up:
            raise RuntimeError(self.given_up)


class Attempts:
    """An operation that takes `us` microseconds by each tier, or raises what is there instead."""

    def __init__(self, p2p=100.0, nccl=200.0, reference=300.0):
        self.us = {"p2p": p2p, "nccl": nccl, "reference": reference}
        self.ran = []

    def __call__(self, chosen):
        name = "reference" if chosen is None else chosen[1]
        if chosen is None or not chosen[0].rehearses:
            self.ran.append(name)
        assert not torch.is_grad_enabled()
        if isinstance(self.us[name], Exception):
            raise self.us[name]
        return self.us[name] * 1e-6


def fake_lap(run, calls, device):
    try:
        return run()
    except Exception as error:
        return str(error)


@contextmanager
def fakes(folder, communicator=None, **replaced):
    """As on a GPU, in a process that has chosen nothing yet, and that has earlier ones' choices in `folder`."""
    made = communicator or FakeCommunicator(*TIERS)

    def communicator_of(group, device):
        if isinstance(made, Exception):
            raise made
        return made if made.tiers else None

    with pytest.MonkeyPatch.context() as patch:
        for table in ("_known", "_measured", "_listed", "_places"):
            patch.setattr(choice, table, {})
        patch.setattr(choice, "communicator_of", communicator_of)
        patch.setattr(choice, "_is_on_gpu", lambda x: True)
        patch.setattr(choice, "_is_capturing", lambda: False)
        patch.setattr(choice, "_card", lambda device: ("Fake GPU", "0:1b:00"))
        patch.setattr(measure, "_lap", fake_lap)
        patch.setattr(saved, "path", lambda: folder / "choices.json")
        for name, value in replaced.items():
            patch.setattr(choice, name, value)
        yield


def tier_of(ctx, attempts, shape=SHAPE, dtype=torch.bfloat16, operation="op"):
    chosen = choose(operation, resolve_group(ctx.group(ctx.world)), torch.zeros(1, dtype=dtype), shape, attempts)
    return "reference" if chosen is None else chosen[1]


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


def check_batches(ctx, folder):
    """Of as many rows, many batches of few tokens are another case than one of many."""
    tp, operation, us = resolve_group(ctx.group(ctx.world)), _OPERATION, []

    def attempt(chosen, plan, *_):
        us.append({"p2p": 50.0, "nccl": 10.0 + plan.batch, "reference": 300.0}[chosen[1] if chosen else "reference"])

    def lap(run, calls, device):
        run()
        return us[-1] * 1e-6

    with fakes(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_lap", lap)
        patch.setattr(operation, "attempt", attempt)
        for batch, expected in ((1, "nccl"), (2, "nccl"), (512, "p2p"), (1, "nccl"), (500, "p2p"), (3, "nccl")):
            plan, x = plan_of(tp, None, 1024 // batch, 1, batch, 64, 32), torch.zeros(1, dtype=torch.bfloat16)
            assert operation.choose(plan, 1, False, x, [], [])[1] == expected, batch
        names = [row.operation for row in explain()]
        assert names == ["all_gather_matmul" + lie for lie in ("", " in 2 batches", " in 512 batches", " in 4 batches")]


def test_the_number_of_batches_counts(workers, tmp_path):
    workers.run(check_batches, tmp_path)
    ((_, cases),) = saved_in(tmp_path).items()
    assert "all_gather_matmul in 512 batches bfloat16 1024 64 32" in cases and len(cases) == 4


def saved_in(folder):
    return json.loads((folder / "choices.json").read_text())


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


def test_why_what_is_slower_was_taken():
    assert choice._taken({"p2p": 2.0, "nccl": 3.0, "reference": 4.0}, "measured") == ("p2p", "measured")
    near = choice._taken({"p2p": 98.0, "nccl": 97.0, "reference": 120.0}, "kept")
    assert near == ("p2p", "kept; what is faster gains too little")
    assert choice._taken({}, "measured", "p2p failed") == ("reference", "measured; p2p failed")


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


def check_places(ctx, folder):
    attempts = Attempts()
    broken = RuntimeError("NCCL is ill") if ctx.rank == 2 else None
    with fakes(folder, broken), pytest.warns(UserWarning, match="rank 2 has no communicator: .*NCCL is ill"):
        assert tier_of(ctx, attempts) == "reference"
    with fakes(folder, FakeCommunicator()):
        assert tier_of(ctx, attempts) == "reference"
        assert explain()[0].why == "a rank lacks the compiled extension"
        with tier("nccl"), pytest.raises(ValueError, match=r"'nccl' is not to be had.*'reference'.*lacks"):
            tier_of(ctx, attempts)
    assert not attempts.ran
    with fakes(folder, FakeCommunicator("nccl") if ctx.rank == 3 else None):
        assert tier_of(ctx, attempts) == "nccl" and set(attempts.ran) == {"nccl", "reference"}
    made = FakeCommunicator("nccl")
    made.why_no_peers = "they do not reach each other's memory"
    with fakes(folder, made):
        assert tier_of(ctx, attempts, operation="far") == "nccl"
        assert explain()[0].why == "measured; not by copy engines, for they do not reach each other's memory"
        with tier("p2p"), pytest.raises(ValueError, match="'p2p' is not to be had .*do not reach each other's memory"):
            tier_of(ctx, attempts)


def test_a_tier_is_used_where_all_ranks_have_it(workers, tmp_path):
    workers.run(check_places, tmp_path)


def check_forced(ctx, folder):
    attempts = Attempts(p2p=500.0)
    with fakes(folder):
        for name in (*TIERS, "reference"):
            with tier(name):
                assert tier_of(ctx, attempts) == name
            assert explain()[-1].tier == name and explain()[-1].why == "forced"
        with tier("sequential"):
            assert tier_of(ctx, attempts) == "reference" and explain()[-1].why == "forced"
        with tier("first"):
            assert tier_of(ctx, attempts) == "p2p" and explain()[-1].why == "not measured, as was asked for"
        assert not attempts.ran
        assert tier_of(ctx, attempts) == "nccl" and attempts.ran
        with tier("p2p"):
            assert tier_of(ctx, attempts) == "p2p"
            with tier("measured"):
                assert tier_of(ctx, attempts) == "nccl"
        assert tier_of(ctx, attempts) == "nccl" and len(attempts.ran) == 3 * LAPS
        assert [row.why for row in explain()].count("measured") == 1
    with fakes(folder, FakeCommunicator("nccl")), tier("p2p"):
        with pytest.raises(ValueError, match=r"'p2p' is not to be had in this group, only \('nccl', 'reference'\)"):
            tier_of(ctx, attempts)
    with fakes(folder, wanted=["nccl"]):  # as TPFUSED_TIER says it
        assert tier_of(ctx, attempts) == "nccl" and explain()[0].why == "forced"
    with fakes(folder, wanted=["pigeon"]), pytest.raises(ValueError, match="TPFUSED_TIER must be one of.*'pigeon'"):
        tier_of(ctx, attempts)


def test_a_forced_tier_is_not_measured(workers, tmp_path):
    workers.run(check_forced, tmp_path)


@pytest.mark.parametrize("value, expected", [(None, "measured"), ("", "measured"), ("p2p", "p2p"), ("typo", "typo")])
def test_environment_variable(value, expected):
    code = "from tpfused.overlap.tiers import wanted; print(*wanted)"
    environment = os.environ | {"TPFUSED_TIER": value} if value is not None else os.environ
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split() == [expected]


def check_capture(ctx, folder):
    attempts, capturing = Attempts(p2p=500.0), [True]
    with fakes(folder, _is_capturing=lambda: capturing[0]):
        assert tier_of(ctx, attempts) == "reference" and "run one before" in explain()[0].why
        with tier("nccl"), pytest.raises(ValueError, match="run one before"):
            tier_of(ctx, attempts)
        capturing[0] = False
        assert tier_of(ctx, attempts) == "nccl" and len(attempts.ran) == 3 * LAPS
        capturing[0] = True
        assert tier_of(ctx, attempts) == tier_of(ctx, attempts, (1001, 64, 32)) == "nccl"
        for _ in range(2):
            assert tier_of(ctx, attempts, (9, 64, 32)) == "p2p"
        assert explain()[-1].why == "not measured, for a CUDA graph was captured"
        with tier("nccl"):
            assert tier_of(ctx, attempts, (9, 64, 32)) == "nccl"
        assert len(attempts.ran) == 3 * LAPS
        capturing[0] = False
        assert tier_of(ctx, attempts, (9, 64, 32)) == "nccl" and len(attempts.ran) == 6 * LAPS
        assert [row.why for row in explain()].count("measured") == 2


def test_nothing_is_measured_while_a_graph_is_captured(workers, tmp_path):
    workers.run(check_capture, tmp_path)


def check_plain(ctx, folder):
    whole = resolve_group(ctx.group(4))
    half, double = torch.ones(1).half(), torch.ones(1).double()
    cases = [
        (TPGroup(None, 0, 1), half, SHAPE, "one rank"),
        (with_replicas(whole, 2), half, SHAPE, "several ranks hold the same shard"),
        (whole, double, SHAPE, "no tier for float64"),
        (whole, half, (0, 64, 32), "an operand is empty"),
    ]
    attempts = Attempts()
    with fakes(folder):
        for group, x, shape, why in cases:
            assert choose("op", group, x, shape, attempts) is None
            assert explain()[-1].why == why and explain()[-1].tier == "reference"
            with tier("p2p"), pytest.warns(UserWarning, match=f"op runs on the plain path, not by 'p2p': {why}"):
                assert choose("op", group, x, shape, attempts) is None
        assert not attempts.ran
        assert tier_of(ctx, attempts, dtype=torch.float16) == tier_of(ctx, attempts, (1, 64, 32)) == "p2p"
    with fakes(folder, _is_on_gpu=lambda x: x.is_cuda):
        assert tier_of(ctx, attempts) == "reference" and explain()[0].why == "the tensors are on the CPU"


def test_why_the_plain_path_runs(workers, tmp_path):
    workers.run(check_plain, tmp_path)


def check_bounds(ctx, folder):
    attempts = Attempts()
    with fakes(folder, MOST=4):
        for k in range(6):
            assert tier_of(ctx, attempts, (8, k + 1, 8)) == "p2p"
            assert len(choice._known) <= 4
        assert tier_of(ctx, attempts, (8, 1, 8)) == "p2p"
        assert len(attempts.ran) == 4 * 3 * LAPS and len(choice._measured) == len(explain()) == 4


def test_memory_is_bounded(workers, tmp_path):
    workers.run(check_bounds, tmp_path)


def check_destroyed_group(ctx, folder):
    attempts = Attempts()
    with fakes(folder):
        short_lived = dist.new_group(range(ctx.world))
        choose("op", resolve_group(short_lived), torch.ones(1).half(), SHAPE, attempts)
        assert len(choice._places) == 1
        dist.destroy_process_group(short_lived)
        tier_of(ctx, attempts)
        tables = choice._known, choice._measured, choice._listed, choice._places
        assert [len(table) for table in tables] == [1, 1, 1, 1]


def test_destroyed_groups_are_forgotten(workers, tmp_path):
    workers.run(check_destroyed_group, tmp_path)


def test_buckets():
    edges = {0: 0, 1: 1, 2: 2, 3: 4, 5: 4, 6: 8, 11: 8, 12: 16, 5792: 4096, 5793: 8192, 8192: 8192, 2**40 + 1: 2**40}
    assert {rows: bucket(rows) for rows in edges} == edges


def test_explanation():
    assert str(Explanation()) == "no overlapped operation has run in this process"
    us = {"p2p": 1234.5, "nccl": 90.0, "reference": 2000.0}
    row = Choice("matmul", 8192, 4096, 14336, "bfloat16", 2, "p2p", "why", us)
    rows = Explanation([row, replace(row, rows=1, out_features=None, tier="reference", why="forced", us={})])
    assert list(rows)[1].tier == "reference"
    assert str(rows).splitlines() == [
        "operation  rows (rounded)     in     out  dtype     ranks   p2p us  nccl us  reference us  runs by    why",
        "matmul              8,192  4,096  14,336  bfloat16      2  1,234.5     90.0       2,000.0  p2p        why",
        "matmul                  1  4,096       ?  bfloat16      2                                  reference  forced",
        "?: all ranks' features, which in_features= or out_features= would tell",
    ]
    assert "?" not in str(Explanation([row]))


def check_listed_once(ctx):
    for name in ("reference", "reference", "first"):
        with tier(name):
            tier_of(ctx, Attempts())
    assert len(explain()) == len({str(choice) for choice in explain()})


def test_what_is_the_same_is_listed_once(workers):
    workers.run(check_listed_once)
