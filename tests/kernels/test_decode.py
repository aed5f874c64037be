"""decode_attention against attention over the slots that it should see: heads, stretches, padding, what lies beyond."""

import pytest
import torch

from tests.kernels.compare import assert_within
from tpfused import reference
from tpfused.kernels import decode as module
from tpfused.kernels.decode import KEYS, decode_attention

# batch, kv heads, queries each, head_dim; none of them a power of two, and what a large model has.
HEADS = [(1, 1, 1, 16), (2, 3, 3, 20), (1, 2, 4, 128)]
# In float32, where the kernel's errors are up to 2.6 times plain PyTorch's (medians of 600 draws of a shape, H200), and
# the largest was 1.23 of what 8 roundings allow.
ROUNDINGS = 16


def draw(shape, slots, dtype, device):
    batch, kv_heads, queries, head_dim = shape
    q = torch.randn(batch, kv_heads * queries, 1, head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, 1, head_dim, device=device, dtype=dtype) for _ in range(2))
    keys, values = (torch.randn(batch, kv_heads, slots, head_dim, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, keys, values


def expected(q, k, v, keys, values, slot, first=None):
    """Of the cache with the new token in it, and that cache."""
    keys, values = keys.clone(), values.clone()
    keys[:, :, slot], values[:, :, slot] = k[:, :, 0], v[:, :, 0]
    mask = torch.zeros(q.shape[0], 1, 1, slot + 1, dtype=torch.bool, device=q.device)
    for sequence in range(q.shape[0]):
        mask[sequence, ..., min(0 if first is None else int(first[sequence]), slot) :] = True
    repeats = q.shape[1] // k.shape[1]
    seen = (x[:, :, : slot + 1].repeat_interleave(repeats, 1) for x in (keys, values))
    return reference.attention_core(q, *seen, mask), keys, values


def check(parts, slot, seen, first=None, what=""):
    q, k, v, keys, values = parts
    exact, *_ = expected(*(x.double() for x in parts), slot, first)
    eager, new_keys, new_values = expected(*parts, slot, first)
    keys[:, :, slot:], values[:, :, slot:] = torch.nan, torch.nan  # nothing may come of what is not seen
    device = q.device
    out = decode_attention(q, k, v, keys, values, torch.tensor([slot], device=device), seen, first)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    roundings = ROUNDINGS if q.dtype is torch.float32 else None
    assert_within(out, exact, eager, what, roundings=roundings)
    assert_within(out, exact, eager, f"{what}, a row", dim=-1, roundings=roundings)
    for kept, wanted in ((keys, new_keys), (values, new_values)):
        assert torch.equal(kept[:, :, : slot + 1], wanted[:, :, : slot + 1]) and kept[:, :, slot + 1 :].isnan().all()


@pytest.mark.parametrize("shape", HEADS)
def test_equals_attention_to_what_is_there(device, dtypes, shape):
    slots = 3 * KEYS + 5
    for dtype in dtypes[1:] if device.type == "cuda" else dtypes:  # no float64 on a GPU's path
        for slot in (0, 1, KEYS - 1, KEYS, 2 * KEYS + 7, slots - 1):
            for seen in {slot + 1, slots}:
                check(draw(shape, slots, dtype, device), slot, seen, what=f"{shape}, slot {slot} of {seen}")


def test_few_stretches_and_many(device, monkeypatch):
    slots = 5 * KEYS
    for programs in (1, 2, 3, 8):
        monkeypatch.setattr(module, "multiprocessors", lambda device, count=programs: count)
        for slot in (3, 3 * KEYS, slots - 1):
            check(draw((2, 1, 2, 16), slots, torch.float32, device), slot, slots, what=f"{programs}, slot {slot}")


def test_padding(device):
    """Nothing attends to it, whatever it holds; padding itself, to itself."""
    slots, slot = 2 * KEYS + 3, KEYS + 9
    first = torch.tensor([0, 5, KEYS, KEYS + 3, slot, slot + 1], device=device)
    parts = draw((len(first), 2, 2, 16), slots, torch.float32, device)
    for sequence, start in enumerate(first.tolist()):
        for x in parts[3:]:
            x[sequence, :, : min(start, slot)] = torch.inf
    q, k, v, keys, values = parts
    clean = [torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in (keys, values)]
    exact, *_ = expected(*(x.double() for x in (q, k, v, *clean)), slot, first)
    eager, *_ = expected(q, k, v, *clean, slot, first)
    strided = torch.stack((first, first + 7), dim=1)[:, 0]
    for given in (first, strided):
        out = decode_attention(q, k, v, keys, values, torch.tensor([slot], device=device), slots, given)
        assert_within(out, exact, eager, "padding", dim=-1)


@pytest.mark.parametrize("slots", [KEYS, KEYS + 3])
def test_a_full_cache_stays_as_it_is(device, slots):
    """What a graph that is replayed too often asks for: there is no slot, and what lies behind is another head's."""
    q, k, v, *_ = draw((2, 2, 2, 16), 1, torch.float32, device)
    both = torch.randn(2, 2, 2, slots, 16, device=device)
    before = both.clone()
    for slot in (slots, slots + 1):
        out = decode_attention(q, k, v, *both, torch.tensor([slot], device=device), slots)
        assert out.isnan().all() and torch.equal(both, before)


def test_strides(device):
    """Heads as rotary_qkv leaves them, and a cache of another order."""
    slot = torch.tensor([6], device=device)
    q, k, v, keys, values = draw((2, 2, 3, 16), 9, torch.float32, device)
    right = decode_attention(q, k, v, keys.clone(), values.clone(), slot, 9)
    turned = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v, keys, values)]
    assert torch.equal(decode_attention(*turned, slot, 9), right) and torch.equal(turned[3][:, :, 6:7], k)
    assert torch.equal(decode_attention(q.repeat(1, 1, 1, 2)[..., ::2].copy_(q), k, v, keys, values, slot, 9), right)
    empty = [x[:0] for x in (q, k, v, keys, values)]
    assert decode_attention(*empty, slot, 9).shape == (0, 6, 1, 16)


def test_large_scores(device):
    q, k, v, keys, values = draw((1, 1, 2, 16), 2 * KEYS, torch.float32, device)
    check((1e3 * q, k, v, 1e3 * keys, values), 2 * KEYS - 2, 2 * KEYS)


def test_bad_input_is_refused(device):
    q, k, v, keys, values = draw((2, 2, 3, 16), 9, torch.float32, device)
    heads = {"q": q, "k": k, "v": v, "keys": keys, "values": values}
    right = {**heads, "seen": 9, "slot": torch.tensor([6], device=device)}
    for error, told, wrong in (
        (TypeError, "float16", {"q": q.half()}),
        (TypeError, "int64", {"slot": right["slot"].int()}),
        (ValueError, "heads 5 .* heads 2", {"q": q[:, :5]}),
        (ValueError, r"\(2, 6, 2, 16\)", {"q": q.repeat(1, 1, 2, 1)}),
        (ValueError, r"\(2, 1, 9, 16\)", {"keys": keys[:, :1]}),
        (ValueError, "seen 10", {"seen": 10}),
        (ValueError, r"slot .* \(2,\)", {"slot": torch.tensor([1, 2], device=device)}),
        (ValueError, "four-dimensional", {"keys": keys[0]}),
        (ValueError, r"first .* \(3,\), not \(2,\)", {"first": torch.tensor([1, 2, 3], device=device)}),
        (ValueError, "beside the next", {"keys": keys.repeat(1, 1, 1, 2)[..., ::2]}),
        (ValueError, "head_dim 304", {n: x.repeat(1, 1, 1, 19) for n, x in heads.items()}),
        (ValueError, "values is on meta", {"values": values.to("meta")}),
        (ValueError, "CUDA", {n: x.to("meta") for n, x in {**heads, "slot": right["slot"]}.items()}),
    ):
        with pytest.raises(error, match=told):
            decode_attention(**right | wrong)
