"""Parallel attention against plain torch: heads, masks, positions, replicated key-value heads, dropout."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import Block, assert_close, check_module, collectives_made, refuses, twins, unpacked
from tpfused import ParallelAttention, reference
from tpfused.collectives import all_gather
from tpfused.group import TPGroup, resolve_group
from tpfused.layers import attention, sdpa
from tpfused.layers.sdpa import scaled_dot_product_attention
from tpfused.placement import local

# heads, kv heads, head dim: plain, grouped, fewer kv heads than 4 ranks and than 2.
HEADS = [(4, 4, 3), (8, 4, 2), (4, 2, 4), (4, 1, 2)]
# As in test_linear: where the tokens are, and how many; None is without sequence parallelism.
TOKENS = [(None, 5), (0, 8), (0, 5), (1, 2), (1, 1)]
HIDDEN = 6

modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def rotate(x, theta):
    """Rotary positions by complex numbers: entry i and entry i + d/2 are one."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device).double().unsqueeze(-1)
    angles = angles / theta ** (torch.arange(half, device=x.device).double() / half)
    turned = torch.complex(*x.double().split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def dense_attention(x, mask, heads, kv_heads, tokens_first, causal=False, rope_theta=None, **w):
    if tokens_first:
        x = x.transpose(0, 1)

    def project(name, heads):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")).unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    if rope_theta is not None:
        q, k = rotate(q, rope_theta), rotate(k, rope_theta)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=scores.dtype, device=x.device).masked_fill(~mask, -torch.inf)
        mask = mask[:, None, None] if mask.ndim == 2 else mask
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    # softmax of a row that is -inf throughout is NaN; the result is defined as zeros
    dead = scores.isneginf().all(-1, keepdim=True)
    probabilities = torch.where(dead, 0, scores.masked_fill(dead, 0).softmax(-1))
    out = F.linear((probabilities @ v).transpose(1, 2).flatten(2), w["out.weight"], w.get("out.bias"))
    return out.transpose(0, 1) if tokens_first else out


def attention_case(
    block, heads, sequence_dim, tokens, mask=None, dtype=torch.float64, batch=2, hidden=HIDDEN, bias=True, **options
):
    heads, kv_heads, head_dim = heads
    tokens_first = sequence_dim in (None, 0)
    parallel = {} if sequence_dim is None else {"sequence_parallel": True, "sequence_dim": sequence_dim}

    def build(**place):
        return ParallelAttention(hidden, heads, kv_heads, head_dim, bias, **options, **parallel, **place)

    layer, whole = twins(block, build, dtype)
    x = block.randn(*((tokens, batch) if tokens_first else (batch, tokens)), hidden, dtype=dtype)
    total_len = None if sequence_dim is None else tokens
    check_module(
        layer,
        lambda x: layer(x, mask, total_len=total_len),
        {"x": x},
        block.randn(*x.shape, dtype=dtype),
        lambda x, **w: dense_attention(x, mask, heads, kv_heads, tokens_first, **options, **w),
        whole,
        lambda name, value: block.own(value, sequence_dim),
        f"heads {heads}/{kv_heads} of {head_dim}, {tokens} tokens along {sequence_dim}, {options}, "
        f"mask {None if mask is None else tuple(mask.shape)}",
    )


def check_heads(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for number, (heads, (sequence_dim, tokens)) in enumerate(block.some(product(HEADS, TOKENS))):
        attention_case(block, heads, sequence_dim, tokens, causal=number % 2 == 0, bias=number % 3 != 0)
    for heads in ((4, 4, 2), (8, 2, 4)):
        attention_case(block, heads, None, 5, rope_theta=10000.0, causal=True)
        attention_case(block, heads, 0, 5, rope_theta=50.0)
        attention_case(block, heads, 1, 3, rope_theta=50.0, causal=True)


def masks(block, heads, tokens, batch):
    """One of each kind, with rows that may attend to nothing and slopes that differ by head."""
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    slopes = torch.arange(1, heads + 1).double()[:, None, None] / heads
    padding = torch.arange(tokens) < torch.tensor([[tokens], [2]])
    rows = torch.rand(batch, 1, tokens, tokens) < 0.6
    rows[0, 0, 1] = False
    by_head = torch.rand(1, heads, tokens, tokens) < 0.6
    by_head[0, heads - 1, 2] = False
    forbidding = (torch.rand(1, 1, tokens, tokens) < 0.3).double().masked_fill_(torch.eye(tokens).bool(), 0)
    forbidding = forbidding.masked_fill(forbidding == 1, -torch.inf)
    forbidding[..., tokens - 1, :] = -torch.inf
    alibi = -slopes * distance
    nobody = torch.zeros(batch, tokens, dtype=torch.bool)
    kinds = [padding, rows, by_head, distance[None, None], forbidding, alibi[None], alibi.expand(batch, -1, -1, -1)]
    return [mask.to(block.device) for mask in (*kinds, nobody)]


def check_masks(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    torch.manual_seed(block.seed)
    for heads in ((4, 4, 3), (8, 2, 2)):
        for number, mask in enumerate(block.some(masks(block, heads[0], 5, 2))):
            attention_case(block, heads, (None, 0, 1)[number % 3], 5, mask, causal=number % 2 == 0)


def check_nothing_to_attend_to(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    layer = ParallelAttention(HIDDEN, 4, head_dim=2, sequence_dim=1, device=ctx.device, **block.place)
    x = block.randn(2, 3, HIDDEN, dtype=torch.float32)
    mask = torch.ones(2, 3, dtype=torch.bool, device=ctx.device)
    mask[1] = False
    for forbidden in (mask, torch.where(mask, 0.0, -torch.inf)[:, None, None]):
        out = layer(x, forbidden)
        assert not out.isnan().any()
        assert torch.equal(out[1], layer.out.bias.expand(3, HIDDEN)) and not torch.equal(out[0], out[1])


def check_probabilities(ctx, tp, seed):
    """Of this rank's heads; the output and its gradients are those without, and dropout is what the values meet."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for heads, kv_heads, tokens_first in ((4, 4, True), (4, 1, False)):
        layer = ParallelAttention(
            HIDDEN, heads, kv_heads, 4, causal=True, sequence_dim=int(not tokens_first), rope_theta=1e4, dropout=0.5,
            device=ctx.device, dtype=torch.float64, **block.place
        )  # fmt: skip
        x = block.randn(*((5, 2) if tokens_first else (2, 5)), HIDDEN)
        for mask in masks(block, heads, 5, 2):
            layer.eval()
            found = []
            for wanted in (False, True):
                inputs = x.clone().requires_grad_()
                out = layer(inputs, mask, return_probabilities=wanted)
                out, probabilities = out if wanted else (out, None)
                found.append((out.detach(), *torch.autograd.grad(out.square().sum(), [inputs, *layer.parameters()])))
            for one, other in zip(*found, strict=True):
                assert_close(other, one)
            assert probabilities.shape == (2, heads // tp, 5, 5) and not probabilities.triu(1).any()
            sums = probabilities.sum(-1)
            assert torch.allclose(sums, (sums > 0.5).double())  # or nothing
        layer.train()
        _, dropped = layer(x, return_probabilities=True)
        hidden = dropped.numel() * 10 // 25  # behind each query
        assert hidden < (dropped == 0).sum() < dropped.numel() and not dropped.triu(1).any()
    with refuses(ValueError, "return_probabilities", "cache"):
        layer(x, cache=object(), return_probabilities=True)
    with refuses(TypeError, "return_probabilities must be True or False", "'no'"):
        layer(x, return_probabilities="no")


def check_dtypes(ctx, tp, seed, dtype):
    block = Block(ctx, tp, "group", seed)
    # Without rotary positions a key's bias moves all scores of a row alike: its gradient is nothing but rounding.
    for options in ({"rope_theta": 1e4}, {"bias": False, "causal": True}):
        for heads in ((8, 8, 16), (8, 2, 16)):
            for sequence_dim in (None, 0):
                attention_case(block, heads, sequence_dim, 12, dtype=dtype, hidden=64, **options)
    attention_case(block, (8, 4, 16), None, 12, masks(block, 8, 12, 2)[5], dtype=dtype, hidden=64, bias=False)


def check_dropout(ctx, tp, seed):
    """With all heads alike and `out` taken away, ranks differ in nothing but their dropout."""
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    torch.manual_seed(block.seed)
    layer = ParallelAttention(HIDDEN, 4, head_dim=8, dropout=0.5, device=ctx.device, **block.place)
    x = block.randn(64, 2, HIDDEN, dtype=torch.float32)
    with torch.no_grad():
        for name in ("weight", "bias"):
            param = getattr(layer.qkv, name)
            whole = all_gather(param, 0, 3 * 4 * 8, group)
            param.copy_(whole[: 3 * 8].repeat(4 // tp, *(1,) * (param.ndim - 1)))
    layer.out = nn.Identity()

    def distinct(out):
        return len(all_gather(out.detach()[None], 0, tp, group).unique(dim=0))

    torch.manual_seed(block.seed)
    dropped = layer(x)
    assert distinct(dropped) == tp
    assert distinct(torch.rand(8, device=ctx.device)) == 1  # and the ranks are in step afterwards
    torch.manual_seed(block.seed)
    assert torch.equal(layer(x), dropped)
    layer.eval()
    assert distinct(layer(x)) == 1
    # dropout keeps the mean: 64 keys, 128 queries, so the means differ by little
    assert (dropped.mean((0, 1)) - layer(x).mean((0, 1))).abs().max() < 0.2


def check_counts(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    for kv_heads in (4, 1):
        place = {"device": ctx.device, "dtype": torch.float64, **block.place}  # which no operation overlaps
        layer = ParallelAttention(8, 4, kv_heads, bias=False, **place)
        x = block.randn(3, 2, 8).requires_grad_()
        with collectives_made() as names:
            out = layer(x)
            assert names == (["all_reduce"] if tp > 1 else [])
            names.clear()
            out.sum().backward()
            # the input's gradient once, and those of k and v where ranks share them
            shared = 2 if kv_heads < tp else 0
            assert names == ["all_reduce"] * ((1 + shared) if tp > 1 else 0), names


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)

    def make(*args, **options):
        return ParallelAttention(*args, **options, device=ctx.device, **block.place)

    if tp > 1:
        with refuses(ValueError, 3, tp):
            make(12, 3)
        with refuses(ValueError, 3, tp):
            make(24, 12, 3)
    for args, told in (
        ((12, 8, 3), (8, 3)),
        ((10, 4), (10, 4)),
        ((12, 4, 8), (4, 8)),
        ((0, 4), (0,)),
        ((12, -4), (-4,)),
        ((12, 4, 0), (0,)),
        ((12, 4, 4, 0), (0,)),
    ):
        with refuses(ValueError, *told):
            make(*args)
    with refuses(TypeError, "float"):
        make(12, 4.0)
    with refuses(ValueError, "even", 3):
        make(12, 4, rope_theta=10000.0)
    with refuses(ValueError, "sequence_dim", 2):
        make(12, 4, sequence_dim=2)
    for dropout in (1.0, -0.5):
        with refuses(ValueError, "dropout", dropout):
            make(12, 4, dropout=dropout)

    layer = make(12, 4, sequence_dim=1)
    x = block.randn(2, 5, 12, dtype=torch.float32)
    with refuses(ValueError, (2, 12)):
        layer(x[:, 0])
    with refuses(ValueError, 12, (2, 5, 11)):
        layer(x[..., 1:])
    with refuses(TypeError, torch.float32, torch.float64):
        layer(x.double())
    with refuses(ValueError, 7):
        layer(x, total_len=7)
    for shape in ((5,), (2, 4), (2, 5, 5), (2, 3, 5, 5), (3, 1, 5, 5), (2, 1, 5, 4), (1, 1, 4, 5), (2, 2, 5, 5)):
        with refuses(ValueError, shape, (2, 4, 5, 5)):
            layer(x, torch.ones(shape, dtype=torch.bool, device=ctx.device))
    with refuses(ValueError, (2, 5)):
        layer(x, torch.zeros(2, 5, device=ctx.device))  # padding must be boolean
    with refuses(TypeError, torch.int64):
        layer(x, torch.ones(2, 5, dtype=torch.int64, device=ctx.device))
    with refuses(ValueError, "meta", ctx.device.type):
        layer(x, torch.ones(2, 5, dtype=torch.bool, device="meta"))


@modes
def test_heads_and_tokens(workers, tp, mode, seed):
    workers.run(check_heads, tp, mode, seed)


@modes
def test_masks(workers, tp, mode, seed):
    workers.run(check_masks, tp, mode, seed)


def test_a_token_with_nothing_to_attend_to_gets_zeros(workers, tp, seed):
    workers.run(check_nothing_to_attend_to, tp, seed)


def test_probabilities(workers, tp, seed):
    workers.run(check_probabilities, tp, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_obeys_the_tolerance(workers, tp, seed, dtype):
    workers.run(check_dtypes, tp, seed, dtype)


def test_each_rank_drops_its_own(workers, tp, seed):
    workers.run(check_dropout, tp, seed)


def test_one_collective_each_way(workers, tp):
    workers.run(check_counts, tp)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


def test_one_token_with_shared_key_value_heads(seed):
    """As in decoding, where the heads that share them are computed as so many tokens."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, heads, tokens, 4).double() for heads, tokens in ((8, 1), (2, 5), (2, 5)))
    masks = [torch.rand(shape) < 0.5 for shape in ((1, 1, 1, 5), (2, 1, 1, 5), (2, 8, 1, 5))]
    masks[1][0] = False
    for mask in (None, *masks, torch.randn(2, 1, 1, 5).double()):
        assert_close(scaled_dot_product_attention(q, k, v, mask, False, 0.0), reference.attention_core(q, k, v, mask))
    assert scaled_dot_product_attention(q[:0], k[:0], v[:0], None, False, 0.0).shape == (0, 8, 1, 4)


@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_the_rotary_kernel_changes_nothing(seed, sequence_dim, monkeypatch):
    """On a GPU the layer splits its projection by it; here it is interpreted."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    torch.manual_seed(seed)
    options = {"causal": True, "rope_theta": 50.0, "sequence_dim": sequence_dim, "group": TPGroup(None, 0, 1)}
    layer = ParallelAttention(12, 4, 2, 6, **options, dtype=torch.float64)
    x, grad = torch.randn(2, *((3, 2) if sequence_dim == 0 else (2, 3)), 12).double()
    x.requires_grad_()

    def step():
        out = layer(x)
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    expected = step()
    monkeypatch.setattr(attention, "runs_kernels", lambda *arguments: True)
    used = []
    kernel = attention.rotary_qkv
    monkeypatch.setattr(attention, "rotary_qkv", lambda *a, **options: used.append(1) or kernel(*a, **options))
    for actual, right in zip(step(), expected, strict=True):
        assert_close(actual, right)
    assert used


def test_shared_heads_need_no_copy(seed, monkeypatch):
    """Where torch has a back end for them, it gets k and v as they are."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, heads, 5, 4).double() for heads in (8, 2, 2))
    monkeypatch.setattr(sdpa, "shares_heads", lambda q, backend: True)
    repeat = "repeat_interleave of a tensor that need not be"
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", lambda *a, **k: pytest.fail(repeat))
    out = scaled_dot_product_attention(q, k, v, None, True, 0.0)
    monkeypatch.undo()
    assert_close(out, reference.attention_core(q, k, v, causal=True))
    mask = torch.rand(2, 1, 5, 5) < 0.7
    monkeypatch.setattr(sdpa, "shares_heads", lambda q, backend: pytest.fail("no back end takes a mask with them"))
    assert_close(scaled_dot_product_attention(q, k, v, mask, False, 0.0), reference.attention_core(q, k, v, mask))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_initialised_as_linear_layers_one_by_one(seed, kv_heads):
    torch.manual_seed(seed)
    layer = ParallelAttention(12, 4, kv_heads, group=TPGroup(None, 0, 1))
    found = unpacked(layer, dict(layer.named_parameters()))
    torch.manual_seed(seed)
    for name, rows in (("q", 12), ("k", 3 * kv_heads), ("v", 3 * kv_heads), ("out", 12)):
        linear = nn.Linear(12, rows)
        assert torch.equal(local(found.pop(f"{name}.weight")), linear.weight)
        assert torch.equal(local(found.pop(f"{name}.bias")), linear.bias)
    assert not found
