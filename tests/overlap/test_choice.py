"""The measured choice of a tier: what is measured, when, and how it is told. Communicators and clocks are fakes."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Workers
from tests.overlap.choices import LAPS, SHAPE, TIERS, Attempts, FakeCommunicator, fakes, saved_in, tier_of
from tpfused.explanation import Choice, Explanation, explain
from tpfused.group import TPGroup, resolve_group, with_replicas
from tpfused.overlap import calls, choice, measure
from tpfused.overlap.all_gather_matmul import _OPERATION
from tpfused.overlap.choice import bucket, choose
from tpfused.overlap.plans import plan_of
from tpfused.overlap.tiers import tier


@pytest.fixture(scope="module")
def workers():
    with Workers("cpu", 4) as pool:
        yield pool


def check_batches(ctx, folder):
    """Of as many rows, many batches of few tokens are another case than one of many, and so is an activation."""
    tp, operation, us = resolve_group(ctx.group(ctx.world)), _OPERATION, []

    def attempt(chosen, plan, *_):
        nccl = 60.0 if plan.activation else 10.0 + plan.batch
        us.append({"p2p": 50.0, "nccl": nccl, "reference": 300.0}[chosen[1] if chosen else "reference"])

    def lap(run, calls, device):
        run()
        return us[-1] * 1e-6

    with fakes(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_lap", lap)
        patch.setattr(operation, "attempt", attempt)
        for batch, expected in ((1, "nccl"), (2, "nccl"), (512, "p2p"), (1, "nccl"), (500, "p2p"), (3, "nccl")):
            plan, x = plan_of(tp, None, 1024 // batch, 1, batch, 64, 32), torch.zeros(1, dtype=torch.bfloat16)
            assert operation.choose(plan, 1, False, x, [], [])[1] == expected, batch
            assert operation.choose(plan._replace(activation="gelu"), 1, False, x, [], [])[1] == "p2p", batch
        names = [row.operation.removeprefix("all_gather_matmul") for row in explain()]
        lies = ("", " in 2 batches", " in 512 batches", " in 4 batches")
        assert names == [name for lie in lies for name in (lie, f" gelu{lie}")]


def test_batches_and_activations_count(workers, tmp_path):
    workers.run(check_batches, tmp_path)
    ((_, cases),) = saved_in(tmp_path).items()
    assert {f"all_gather_matmul{act} in 512 batches bfloat16 1024 64 32" for act in ("", " gelu")} < set(cases)
    assert len(cases) == 8


def test_why_what_is_slower_was_taken():
    assert choice._taken({"p2p": 2.0, "nccl": 3.0, "reference": 4.0}, "measured") == ("p2p", "measured")
    near = choice._taken({"p2p": 98.0, "nccl": 97.0, "reference": 120.0}, "kept")
    assert near == ("p2p", "kept; what is faster gains too little")
    assert choice._taken({}, "measured", "p2p failed") == ("reference", "measured; p2p failed")


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
    # As many batches as NCCL sends one by one are never measured together with more.
    assert bucket(calls.MOST_MESSAGES) < bucket(calls.MOST_MESSAGES + 1)


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
