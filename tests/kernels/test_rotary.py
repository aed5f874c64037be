"""rotary_qkv against its twin: heads and groups, where the tokens are, positions of a cache."""

import pytest
import torch

from tests.kernels.compare import assert_matches
from tpfused import reference
from tpfused.kernels import rotary as module
from tpfused.kernels.rotary import rotary_qkv

THETA = 500.0
# kv heads, queries each, head_dim; also none of them a power of two.
HEADS = [(1, 1, 2), (2, 4, 8), (3, 3, 6)]


def joined(function, *options):
    """Its three results as one, for a comparison of all of them and of the gradient that they give together."""

    def call(qkv):
        parts = function(qkv, *options)
        return torch.cat([part.contiguous().flatten() for part in parts])

    return call


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("kv_heads, queries, head_dim", HEADS)
def test_equals_its_twin(device, dtypes, kv_heads, queries, head_dim, tokens_first):
    batch, tokens = 2, 5
    places = [None, torch.randint(30, (batch, tokens), device=device)]
    places += [torch.randint(30, (1, tokens + 1), device=device)[:, 1:]]
    for dtype in dtypes:
        leading = (tokens, batch) if tokens_first else (batch, tokens)
        qkv = torch.randn(*leading, kv_heads * (queries + 2) * head_dim, device=device, dtype=dtype)
        for positions in places if dtype == torch.float64 else places[1:2]:  # the others only round otherwise
            options = queries, head_dim, THETA, positions, tokens_first
            assert_matches(joined(rotary_qkv, *options), joined(reference.rotary_qkv, *options), [qkv], f"{options}")
            shapes = [part.shape for part in rotary_qkv(qkv, *options)]
            assert shapes == [part.shape for part in reference.rotary_qkv(qkv, *options)]


def test_several_tokens_a_program(device, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 3)
    monkeypatch.setattr(module, "MANY", 4)
    qkv = torch.randn(7, 2, 12, device=device)  # the last program has less than its tokens
    for tokens_first in (False, True):
        options = 1, 4, THETA, None, tokens_first
        assert_matches(joined(rotary_qkv, *options), joined(reference.rotary_qkv, *options), [qkv], f"{options}")


def test_inputs_of_any_strides(device):
    qkv = torch.randn(5, 12, 2, device=device).permute(0, 2, 1)
    options = 1, 4, THETA
    assert_matches(joined(rotary_qkv, *options), joined(reference.rotary_qkv, *options), [qkv])


def test_far_positions(device):
    """Of the kernel's own frequencies and angles, no further from float64 than those of eager float32."""
    positions = torch.arange(131072 - 3, 131072, device=device).unsqueeze(0)
    qkv = torch.randn(1, 3, 3 * 128, device=device)
    options = 1, 128, 5e5, positions
    assert_matches(joined(rotary_qkv, *options), joined(reference.rotary_qkv, *options), [qkv])


def test_heads_lie_as_the_projection_does(device):
    """So that attention's result, whose layout is its queries', is one matrix of tokens without a copy."""
    for tokens_first in (False, True):
        q, k, v = rotary_qkv(torch.randn(2, 3, 16, device=device), 2, 4, THETA, tokens_first=tokens_first)
        order = (2, 0, 1, 3) if tokens_first else (0, 2, 1, 3)
        assert all(part.permute(order).is_contiguous() for part in (q, k, v))


def test_gradcheck_operator_and_nothing_to_do(device):
    qkv = torch.randn(1, 2, 8, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(joined(rotary_qkv, 2, 2, THETA), qkv)
    positions = torch.arange(2, device=device).unsqueeze(0)
    torch.library.opcheck(torch.ops.tpfused.rotary_qkv.default, (qkv, positions, 2, 2, THETA, False))
    q, k, v = rotary_qkv(qkv[:, :0], 2, 2, THETA)
    assert q.shape == (1, 2, 0, 2) and k.shape == v.shape == (1, 1, 0, 2)


def test_bad_input_is_refused(device):
    qkv = torch.randn(2, 3, 16, device=device)
    for error, told, arguments in (
        (ValueError, r"\(2, 3, 15\)", {"qkv": qkv[..., :15]}),
        (ValueError, r"\(2, 16\)", {"qkv": qkv[:, 0]}),
        (ValueError, "head_dim 1", {"head_dim": 1}),
        (TypeError, "int64", {"qkv": qkv.long()}),
        (TypeError, "int32", {"positions": torch.zeros(2, 3, dtype=torch.int32, device=device)}),
        (ValueError, r"\(3, 2\)", {"positions": torch.zeros(3, 2, dtype=torch.int64, device=device)}),
        (ValueError, "meta", {"positions": torch.zeros(2, 3, dtype=torch.int64, device="meta")}),
        (ValueError, "meta", {"qkv": qkv.to("meta")}),
    ):
        with pytest.raises(error, match=told):
            rotary_qkv(**{"qkv": qkv, "queries": 2, "head_dim": 4, "theta": THETA} | arguments)
