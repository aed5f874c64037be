"""Dropout of a rank's own by the kernels, and while a CUDA graph is captured: as if, for there is none on a CPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block
from tpfused import ParallelAttention, random, rank_rng
from tpfused.group import TPGroup
from tpfused.layers import sdpa
from tpfused.layers.sdpa import attention_with_probabilities
from tpfused.random import has_region, rank_dropout

CPU = torch.device("cpu")
GROUPS = [TPGroup(None, rank, 2) for rank in range(2)]
ALONE = TPGroup(None, 0, 1)


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(random, "_is_capturing", lambda device: True)


def _runs_kernels(x, backend=None, what=None, why_none=""):
    return backend is None and not why_none


@pytest.fixture
def kernels(monkeypatch):
    """Triton's interpreter runs them."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    for module in (random, sdpa):
        monkeypatch.setattr(module, "runs_kernels", _runs_kernels)


def drawn(function, seed):
    """What it returns, and what is drawn after it."""
    torch.manual_seed(seed)
    return function(), torch.rand(4)


def test_no_region_is_entered_during_a_capture(captured):
    torch.manual_seed(0)
    before = random.state_of(CPU)
    for group in GROUPS:
        assert not has_region(group, CPU)
        told = f"CUDA graph .*rank {group.rank} of 2.* eval mode"
        with pytest.raises(RuntimeError, match=told), rank_rng(group, CPU):
            pass
        with pytest.raises(RuntimeError, match="not on the plain path"):
            rank_dropout(torch.ones(8), 0.5, group)
    assert random.state_of(CPU) == before
    assert has_region(ALONE, CPU)
    with rank_rng(ALONE, CPU):
        pass
    torch.manual_seed(0)
    expected = F.dropout(torch.ones(8), 0.5)
    torch.manual_seed(0)
    assert torch.equal(rank_dropout(torch.ones(8), 0.5, ALONE), expected)


def test_a_capture_draws_as_eager_calls_do(kernels, seed, request):
    """By the kernel, also on ranks with other rows, or with none."""
    rows = [torch.ones(3000, requires_grad=True), torch.ones(2000, requires_grad=True), torch.ones(0, 5)]
    calls = [partial(rank_dropout, x, 0.5, group) for x, group in zip(rows, [*GROUPS, GROUPS[0]], strict=True)]
    eager = [drawn(call, seed) for call in calls]
    request.getfixturevalue("captured")
    found = [drawn(call, seed) for call in calls]
    for (y, after), (expected, _) in zip(found, eager, strict=True):
        assert torch.equal(y, expected) and torch.equal(after, eager[0][1])
    (first, _), (second, _) = found[:2]
    for y, x in ((first, rows[0]), (second, rows[1])):
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y.detach())
    assert 0.4 < ((first[:2000] != 0) == (second != 0)).float().mean() < 0.6
    with pytest.raises(RuntimeError, match="not on the plain path"):
        rank_dropout(rows[0], 0.5, GROUPS[0], "reference")


def test_compiled_code_runs_the_kernel(kernels, seed):
    """With its gradient, in one graph; of each rank's own."""
    masks = []
    for group in GROUPS:
        x = torch.ones(600, requires_grad=True)
        torch._dynamo.reset()
        compiled = torch.compile(partial(rank_dropout, p=0.5, group=group), fullgraph=True, backend="aot_eager")
        y, after = drawn(partial(compiled, x), seed)
        expected, after_eager = drawn(partial(rank_dropout, x, 0.5, group), seed)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, expected) and torch.equal(dx, y.detach()) and torch.equal(after, after_eager)
        masks.append(y != 0)
    assert 0.3 < (masks[0] == masks[1]).float().mean() < 0.7


@pytest.mark.parametrize("learned", [False, True])
def test_attention_draws_in_a_capture(kernels, captured, seed, learned):
    """By the softmax's kernel, or for a mask that needs a gradient by the other."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 24, 8, generator=generator).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, 24, 24, requires_grad=True) if learned else None
    found, after = [], []
    for group in (*GROUPS, GROUPS[0]):
        call = partial(attention_with_probabilities, q, k, v, mask, False, 0.5, None, group)
        (out, probabilities), drawn_after = drawn(call, seed)
        found.append(probabilities.detach())
        after.append(drawn_after)
        (dv,) = torch.autograd.grad(out.sum(), v)
        torch.testing.assert_close(dv, probabilities.detach().sum(-2)[..., None].expand_as(v))
    whole = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1).detach()
    for probabilities in found:
        torch.testing.assert_close(probabilities, 2 * whole * (probabilities != 0))
    assert torch.equal(found[0], found[2]) and all(torch.equal(x, after[0]) for x in after)
    assert 0.4 < ((found[0] != 0) == (found[1] != 0)).float().mean() < 0.6


def check_attention(ctx, tp, seed):
    """It enters no region in a capture, but asks for the softmax that keeps its scores."""
    block, seen = Block(ctx, tp, "group", seed), []
    torch.manual_seed(block.seed)
    options = {"dropout": 0.5, "backend": "reference", "dtype": torch.float64, "device": block.device, **block.place}
    layer = ParallelAttention(8, 4, **options)
    x = block.randn(5, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="not on the plain path"):
            layer(x)
        patch.setattr(sdpa, "rank_dropout", lambda x, p, group, backend: seen.append((x.shape, p, backend)) or x)
        torch.testing.assert_close(layer(x), layer.eval()(x))
    assert seen == [((2, 4 // tp, 5, 5), 0.5, "reference")]


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_attention_in_a_capture(workers, tp, seed):
    workers.run(check_attention, tp, seed)
