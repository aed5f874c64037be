"""One case: the arithmetic, the check, what happens to variants that fail."""

from collections import Counter
from itertools import permutations

import pytest
import torch

from tests.bench.fakes import FakeTimer
from tpfused.bench.case import Case, Floor, Setting, Variant, Work, copy_floor
from tpfused.bench.measure import in_turn, median_and_iqr
from tpfused.bench.runner import is_bad, largest_errors, run_case, within_rule

CPU = Setting(torch.device("cpu"), torch.bfloat16, lambda function: function)
KEYS = {
    "op", "case", "pass", "dtype", "variant", "us", "us_iqr", "floor", "floor_us", "floor_us_iqr", "ratio", "ratio_iqr",
    "rate", "unit", "amount", "eager_us", "eager_us_iqr", "extra_bytes", "correct", "graph", "autograd", "calls",
    "rounds", "error", "comparable", "note",
}  # fmt: skip
right = torch.linspace(-1, 1, 50, dtype=torch.float64)


def case_of(variants, **work):
    floor = Floor("copy", lambda: None, factor=0.5)
    work = {"exact": lambda: right, "floor": floor, "amount": 22e6} | work
    names = tuple(variants)
    return Case("op", "shape", "fwd", names, lambda setting: Work(variants, **work))


def rows_of(variants, timer=None, rounds=21, eager_time=False, **work):
    rows = run_case(case_of(variants, **work), CPU, timer or FakeTimer(), rounds, eager_time)
    assert all(set(row) == KEYS for row in rows)
    return {row["variant"]: row for row in rows}


def eager():
    return right.bfloat16()


def fails():
    raise RuntimeError("cannot do this\nand more about it")


def test_median_and_iqr():
    assert median_and_iqr([3.0]) == (3.0, 0.0)
    assert median_and_iqr([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, 2.0)
    assert median_and_iqr([1.0, 2.0]) == (1.5, 0.5)


def test_every_round_runs_all_and_the_first_to_begin_changes():
    turns = list(in_turn("abc", rounds=3, warm_up=1))
    assert [number for number, _ in turns] == [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    rounds = ["".join(name for _, name in turns[start : start + 3]) for start in range(0, 12, 3)]
    assert rounds == ["bac", "abc", "acb", "cab"]


@pytest.mark.parametrize(
    ("names", "rounds"), [("a", 2), ("ab", 2), ("abc", 6), ("abcd", 4), ("abcde", 10), ("abcdef", 6)]
)
def test_each_follows_each_other_equally_often(names, rounds):
    turns = ["".join(name for number, name in in_turn(names, rounds) if number == each) for each in range(rounds)]
    assert all(sorted(turn) == list(names) for turn in turns)
    neighbours = Counter(pair for turn in turns for pair in zip(turn, turn[1:], strict=False))
    assert neighbours == dict.fromkeys(permutations(names, 2), rounds // len(names))


def test_ratios_are_of_one_round():
    """The clock falls over the rounds: times spread, ratios do not."""
    rows = rows_of({"ours": Variant(eager), "eager": Variant(eager)})
    ours = rows["ours"]
    assert ours["us"] == pytest.approx(11 * 1.1) and ours["us_iqr"] == pytest.approx(11 * 0.1)
    assert ours["floor_us"] == pytest.approx(10 * 1.1 / 2)  # half the time of the copy that was measured
    assert (ours["ratio"], ours["ratio_iqr"]) == (2.2, 0.0)
    assert ours["rate"] == pytest.approx(22e6 / 12.1 / 1e3, abs=0.05) and ours["unit"] == "GB/s"
    assert rows["eager"]["ratio"] == 8.0
    assert (ours["dtype"], ours["rounds"], ours["calls"], ours["extra_bytes"]) == ("bf16", 21, 3, 2**20)
    assert ours["eager_us"] is None and ours["graph"] and ours["correct"] and not is_bad(ours)


def test_teraflops_and_eager_time():
    (row,) = rows_of({"eager": Variant(eager)}, eager_time=True, amount=44e9, unit="TFLOP/s", rounds=1).values()
    assert row["rate"] == pytest.approx(44e9 / 40e-6 / 1e12)
    assert (row["eager_us"], row["eager_us_iqr"]) == (100.0, 0.0)


def test_a_copy_floor_counts_what_is_read_and_written():
    floor = copy_floor(1000, torch.device("cpu"))
    assert 2 * floor.call().numel() * floor.factor == 1000


def test_the_rule():
    eps = torch.finfo(torch.bfloat16).eps
    assert within_rule([(2 * 0.1 + 2 * eps, 1.0)], [(0.1, 1.0)], torch.bfloat16)
    assert not within_rule([(2 * 0.1 + 3 * eps, 1.0)], [(0.1, 1.0)], torch.bfloat16)
    assert not within_rule([(0.0, 1.0), (torch.nan, 1.0)], [(0.0, 1.0)] * 2, torch.bfloat16)
    assert not within_rule([], [(0.0, 1.0)], torch.bfloat16)


def test_errors_of_other_shapes_are_infinite():
    assert largest_errors([right], [right, right]) == [(torch.inf, 0.0)] * 2
    assert largest_errors([right[:3]], [right]) == [(torch.inf, 0.0)]
    assert largest_errors([right + 2], [right]) == [(2.0, 1.0)]


def test_a_wrong_variant_is_said_to_be_wrong_and_timed_all_the_same():
    rows = rows_of({"ours": Variant(lambda: eager() * 1.5), "eager": Variant(eager)})
    assert rows["ours"]["correct"] is False and rows["ours"]["us"] and is_bad(rows["ours"])
    assert rows["eager"]["correct"] is True


def test_not_a_number_is_wrong():
    assert rows_of({"ours": Variant(lambda: eager() * torch.nan), "eager": Variant(eager)})["ours"]["correct"] is False


def test_a_variant_that_fails_leaves_the_others():
    rows = rows_of({"ours": Variant(eager), "eager": Variant(eager), "compile": Variant(fails)})
    assert rows["compile"]["error"] == "RuntimeError: cannot do this"
    assert rows["compile"]["us"] is None and rows["compile"]["correct"] is None and not is_bad(rows["compile"])
    assert rows["ours"]["correct"] is True
    assert is_bad(rows_of({"ours": Variant(fails), "eager": Variant(eager)})["ours"])


def test_without_its_twin_nothing_is_judged():
    assert rows_of({"ours": Variant(eager), "eager": Variant(fails)})["ours"]["correct"] is None


def test_a_variant_may_have_its_own_right_result_and_twin():
    half = Variant(lambda: eager() / 2, lambda outputs: [right / 2], "half", comparable=False, note="half of it")
    row = rows_of({"eager": Variant(eager), "half": half})["half"]
    assert row["correct"] is True and row["comparable"] is False and row["note"] == "half of it"


def test_a_case_that_cannot_be_built_is_ours_that_failed():
    case = Case("op", "shape", "bwd", ("ours",), lambda setting: fails())
    (row,) = run_case(case, CPU, FakeTimer(), 3)
    assert row["error"] == "RuntimeError: cannot do this" and is_bad(row) and set(row) == KEYS


def test_where_autograd_cannot_be_captured_its_operator_is_timed():
    timer = FakeTimer()
    variant = Variant(eager, fallback=lambda: None)
    assert rows_of({"eager": variant}, timer)["eager"]["autograd"] is True
    timer.uncapturable = [eager]
    row = rows_of({"eager": variant}, timer)["eager"]
    assert row["autograd"] is False and row["graph"] is True
    row = rows_of({"eager": Variant(eager)}, timer)["eager"]
    assert row["autograd"] is True and row["graph"] is False
