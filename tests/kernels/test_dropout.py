"""The dropout kernel: how much is kept, by whom, and that the gradient is of the same entries."""

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

from tpfused.kernels import dropout as module
from tpfused.kernels.dropout import draw_seed, dropout, kept

ENTRIES = 20_000  # several programs, and a last one that is not full


@triton.jit
def _draw(seed_ptr, out_ptr, row, BLOCK: tl.constexpr):
    survives = kept(seed_ptr, row + tl.zeros((1, 1), tl.int64), 0, 0.5, 1, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK)[None, :], survives.to(tl.float32))


def run(x, p, rank=0, seed=3):
    """-> y, and the gradient of its sum; x is a leaf of its own."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = dropout(x, p, rank)
    return y.detach(), *torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keeps_the_expected_share_and_scales_it(device, dtypes, p):
    for dtype in dtypes:
        y, dx = run(torch.ones(ENTRIES, device=device, dtype=dtype), p)
        assert y.dtype == dx.dtype == dtype and torch.equal(y, dx)
        share = (y != 0).double().mean().item()
        assert abs(share - (1 - p)) < 5 * (p * (1 - p) / ENTRIES) ** 0.5
        assert (y[y != 0] == torch.tensor(1 / (1 - p), dtype=dtype)).all()


def test_values_and_gradients(device, dtypes):
    for dtype in dtypes:
        x, grad = torch.randn(2, 30, 101, device=device, dtype=dtype).unbind()
        mask = run(torch.ones_like(x, dtype=torch.float64), 0.3)[0] != 0
        torch.manual_seed(3)
        y = dropout(x.requires_grad_(), 0.3)
        (dx,) = torch.autograd.grad(y, x, grad)
        for actual, given in ((y.detach(), x.detach()), (dx, grad)):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            torch.testing.assert_close(actual, (given.to(wide) * mask / 0.7).to(dtype))
            assert not actual[~mask].any() and (actual[mask] != 0).double().mean() > 0.99


def test_strides_of_inputs_and_gradients_do_not_matter(device):
    x = torch.randn(40, 30, 20, device=device)
    expected, grads = run(x, 0.4)
    for strided in (x.permute(2, 0, 1).contiguous().permute(1, 2, 0), torch.stack((x, x), -1)[..., 1]):
        y, dx = run(strided, 0.4)
        assert not strided.is_contiguous() and torch.equal(y, expected) and torch.equal(dx, grads)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = dropout(leaf, 0.4)
    grad = torch.randn(20, 30, 40, device=device).permute(2, 1, 0)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    torch.testing.assert_close(dx, grad * (grads != 0) / 0.6)


def test_ranks_drop_their_own_and_stay_in_step(device):
    ones, after = torch.ones(ENTRIES, device=device), []
    masks = []
    for rank in (0, 1, 2, 7):
        masks.append((run(ones, 0.5, rank)[0] != 0).double())
        after.append(torch.rand(4, device=device))
        assert torch.equal(run(ones[: 100 * rank], 0.5, rank)[0], 2 * masks[-1][: 100 * rank].float())
        assert torch.equal(torch.rand(4, device=device), after[0])  # however many entries it has
    assert all(torch.equal(x, after[0]) for x in after)
    correlation = torch.corrcoef(torch.stack(masks))
    assert (correlation - torch.eye(4, device=device)).abs().max() < 5 / ENTRIES**0.5


def test_calls_and_programs_draw_apart(device):
    ones = torch.ones(10 * module.BLOCK, device=device)
    torch.manual_seed(0)
    masks = torch.stack([dropout(ones, 0.5) != 0 for _ in range(2)]).double()
    assert torch.corrcoef(masks)[0, 1].abs() < 5 / ones.numel() ** 0.5
    correlation = torch.corrcoef(masks[0].view(10, -1))
    assert (correlation - torch.eye(10, device=device)).abs().max() < 6 / module.BLOCK**0.5


def test_programs_beyond_32_bits_draw_numbers_of_their_own(device):
    """The number of a program is all of the counter's that a large tensor makes large."""
    rows, seed = (5, 5 + 2**31, 5 + 2**32), draw_seed(device)
    drawn = torch.empty(len(rows), 1024, device=device)
    for row, out in zip(rows, drawn, strict=True):
        _draw[(1,)](seed, out, row, BLOCK=1024)
    assert (torch.corrcoef(drawn) - torch.eye(len(rows), device=device)).abs().max() < 5 / 32


def test_none_almost_all_and_nothing(device):
    x = torch.randn(1000, device=device)
    assert torch.equal(run(x, 0.0)[0], x)
    y, dx = run(torch.ones(ENTRIES, device=device), 0.999)
    assert 0 < (y != 0).sum() < 60 and torch.equal(y, dx)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1000.0))
    for shape in ((0,), (3, 0, 5)):
        y, dx = run(torch.ones(shape, device=device), 0.5)
        assert y.shape == dx.shape == shape
    assert run(torch.ones((), device=device), 0.5)[0].shape == ()


def test_nothing_but_the_seed_is_saved(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        dropout(torch.ones(100, device=device, requires_grad=True), 0.5)
    assert [(x.shape, x.dtype) for x in saved] == [((1,), torch.int64)]


def test_recomputation_drops_the_same(device):
    x = torch.ones(500, device=device, requires_grad=True)
    y = checkpoint(lambda x: dropout(x, 0.5, 1) ** 2, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, 2 * y.detach())  # x is 1: y and half the derivative are the squares


def test_operator(device):
    x = torch.randn(3, 7, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.tpfused.dropout.default, (x, draw_seed(device, 2), 0.3))


def test_bad_input_is_refused(device):
    x = torch.ones(3, device=device)
    for error, told, arguments in (
        (TypeError, "int64", (x.long(), 0.5)),
        (ValueError, "1.0", (x, 1.0)),
        (ValueError, "-0.1", (x, -0.1)),
        (ValueError, "meta", (x.to("meta"), 0.5)),
    ):
        with pytest.raises(error, match=told):
            dropout(*arguments)
