"""The tests' own tolerance: what it refuses, of a gradient that plain bfloat16 is far off."""

import pytest
import torch

from tests.compare import assert_within_rule

FEATURES, OFF = 1024, 0.14  # of a layer norm's bias, whose gradient is a sum over all tokens


def gradients(seed):
    """Exact, as eager torch in bfloat16 has it, and another that is as far off."""
    torch.manual_seed(seed)
    exact = torch.randn(FEATURES, dtype=torch.float64)
    return exact, *((exact + OFF * torch.randn_like(exact)).bfloat16() for _ in range(2))


def test_one_that_is_as_far_off_as_eager_torch(seed):
    exact, eager, other = gradients(seed)
    assert_within_rule(other, exact, eager, lambda whole: whole, chain=True)


@pytest.mark.parametrize("wrong", [lambda x: 0 * x, lambda x: x / 2, lambda x: x.roll(1), lambda x: -x])
def test_a_wrong_one(wrong, seed):
    exact, eager, other = gradients(seed)
    with pytest.raises(AssertionError, match="the bias: the error"):
        assert_within_rule(wrong(other), exact, eager, lambda whole: whole, "the bias", chain=True)


def test_few_values_may_be_as_unlucky_as_they_are(seed):
    """Ten times as far off as eager torch, which is lucky here."""
    exact, eager, _ = gradients(seed)
    exact, eager = exact[:32], exact[:32].bfloat16()
    off = exact + 5 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert_within_rule(off.bfloat16(), exact, eager, lambda whole: whole, chain=True)
    with pytest.raises(AssertionError):
        assert_within_rule(off.bfloat16(), exact, eager, lambda whole: whole)
