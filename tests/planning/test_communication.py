"""nccl-tests' factors, and fits of times that are made up."""

import random

import pytest

from tpfused.planning.communication import OPERATIONS, Fit, bandwidths, bus_factor, fit, line, nearest

SIZES = [2**power for power in range(10, 31, 2)]


def test_bus_factors_are_nccl_tests():
    """The table of doc/PERFORMANCE.md, at 4 ranks."""
    expected = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75, "broadcast": 1.0, "all_to_all": 0.75}
    assert {op: bus_factor(op, 4) for op in OPERATIONS} == expected
    with pytest.raises(ValueError, match="unknown collective 'gather'"):
        bus_factor("gather", 4)


def test_bandwidths():
    assert bandwidths("all_reduce", 4, 2e9, 10_000.0) == (200.0, 300.0)


@pytest.mark.parametrize("op, ranks", [("all_reduce", 2), ("all_gather", 8), ("broadcast", 4)])
def test_a_fit_finds_latency_and_bandwidth_in_noise(op, ranks, seed):
    draw = random.Random(seed)
    alpha, gbps = 12.0, 250.0
    exact = [(size, alpha + size / gbps / 1e3) for size in SIZES]
    clean = fit(op, "all", ranks, exact)
    assert clean.alpha_us == pytest.approx(alpha) and clean.us_per_byte == pytest.approx(1 / gbps / 1e3)
    assert clean.rms_error < 1e-9 and clean.points == len(SIZES)
    assert clean.bus_gbps == pytest.approx(gbps * bus_factor(op, ranks))

    noisy = fit(op, "all", ranks, [(size, us * draw.uniform(0.95, 1.05)) for size, us in exact])
    assert noisy.alpha_us == pytest.approx(alpha, rel=0.06) and noisy.us_per_byte == pytest.approx(4e-6, rel=0.06)
    assert 0 < noisy.rms_error < 0.06 and noisy.rms_error <= noisy.max_error < 0.12


def test_a_fit_is_the_best_of_its_neighbours(seed):
    draw = random.Random(seed)
    points = [(size, draw.uniform(5, 50) + size * draw.uniform(2e-6, 8e-6)) for size in SIZES]
    best = fit("all_gather", "all", 2, points)

    def squares(alpha, beta):
        return sum(((alpha + beta * size) / us - 1) ** 2 for size, us in points)

    least = squares(best.alpha_us, best.us_per_byte)
    for a in (0.98, 1, 1.02):
        for b in (0.98, 1, 1.02):
            assert squares(best.alpha_us * a, best.us_per_byte * b) >= least


def test_neither_latency_nor_bandwidth_is_negative():
    falling = fit("broadcast", "all", 2, [(1, 20.0), (10, 10.0)])
    assert falling.us_per_byte == 0 and 10 < falling.alpha_us < 20 and falling.bus_gbps == 0
    steep = fit("broadcast", "all", 2, [(1, 1.0), (10, 100.0)])
    assert steep.alpha_us == 0 and steep.us_per_byte > 0


def test_a_fit_is_a_line_with_its_errors():
    points = [(size, 7.0 + size * 2e-6) for size in SIZES]
    assert line("matmul", points) == pytest.approx((7.0, 2e-6))
    found = fit("all_reduce", "all", 2, points)
    assert (found.alpha_us, found.us_per_byte) == line("all_reduce", points)


@pytest.mark.parametrize(
    "points, told", [([(8, 1.0), (8, 2.0)], "two sizes or more, not 1"), ([(8, 0.0), (9, 1.0)], "positive")]
)
def test_a_fit_refuses(points, told):
    with pytest.raises(ValueError, match=told):
        fit("all_reduce", "all", 2, points)


def test_other_numbers_of_ranks():
    """Twice the steps of a tree, the same bus bandwidth."""
    known = Fit("all_reduce", "all", 2, 10.0, 1e-6)
    assert known.us(1e6) == known.us(1e6, 2) == 11.0
    assert known.us(1e6, 4) == pytest.approx(20.0 + 1.5)


def test_the_nearest_fit():
    fits = [Fit("all_reduce", group, ranks, 1.0, 1.0) for group, ranks in (("tp", 2), ("dp", 4), ("tp", 8))]
    assert nearest(fits, "all_reduce", 4, "tp") is fits[0]
    assert nearest(fits, "all_reduce", 6, "tp") is fits[2]
    assert nearest(fits, "all_reduce", 2, "dp") is fits[1]
    with pytest.raises(ValueError, match="nothing is known of broadcast"):
        nearest(fits, "broadcast", 2, "tp")
