"""scale_mask_softmax against its twin: masks, causal, long rows, dropout, odd inputs."""

from itertools import product

import pytest
import torch

from tests.kernels.compare import assert_matches
from tpfused import reference
from tpfused.kernels import softmax
from tpfused.kernels.softmax import scale_mask_softmax

SHAPES = [(2, 3, 1, 1), (2, 3, 5, 7), (1, 2, 3, 40), (2, 1, 9, 5), (2, 2, 0, 4)]


def masks(shape, device, dtype):
    batch, heads, queries, keys = shape
    return {
        "none": None,
        "boolean": torch.rand(batch, 1, queries, keys, device=device) > 0.4,
        "keys": torch.rand(batch, 1, 1, keys, device=device) > 0.4,
        "additive": torch.randn(heads, 1, keys, device=device, dtype=dtype),
        "all of a row": torch.zeros(1, 1, queries, 1, dtype=torch.bool, device=device),
    }


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("whole_row", [True, False])
def test_equals_its_twin(device, dtypes, causal, whole_row, monkeypatch):
    if not whole_row:
        monkeypatch.setattr(softmax, "WHOLE_ROW", 16)
        monkeypatch.setattr(softmax, "LONG_ROW_BLOCK", 16)
    for dtype, shape in product(dtypes, SHAPES):
        scores = torch.randn(shape, device=device, dtype=dtype)
        some = list(masks(shape, device, dtype).items())
        for name, mask in some if dtype == torch.float64 else some[:4:3]:  # the others only round otherwise

            def twin(x, mask=mask):
                mask = mask.to(x.dtype) if mask is not None and mask.is_floating_point() else mask
                return reference.scale_mask_softmax(x, mask, 0.7, causal)

            assert_matches(
                lambda x, mask=mask: scale_mask_softmax(x, mask, 0.7, causal), twin, [scores], f"{shape} {name}"
            )


def test_strided_and_expanded_scores(device):
    base = torch.randn(3, 5, 2, 8, device=device)
    for scores in (base.permute(2, 0, 1, 3), base.transpose(-1, -2), base[:1].expand(4, 5, 2, 8), base[..., 1::2]):
        assert_matches(
            lambda x: scale_mask_softmax(x, None, 0.5),
            lambda x: reference.scale_mask_softmax(x, None, 0.5),
            [scores],
            str(scores.stride()),
        )


def test_nan_beyond_the_diagonal_is_not_read(device):
    scores = torch.randn(1, 1, 4, 4, device=device)
    scores[0, 0].masked_fill_(torch.ones(4, 4, dtype=torch.bool, device=device).triu(1), torch.nan)
    y = scale_mask_softmax(scores.requires_grad_(), causal=True)
    assert y.isfinite().all() and (y.sum(-1) - 1).abs().max() < 1e-6
    (grad,) = torch.autograd.grad(y, scores, torch.full_like(y, torch.nan).tril().nan_to_num(1.0) + y.detach())
    assert grad.isfinite().all()


def test_rows_of_the_lowest_number_and_with_nan(device):
    scores = torch.randn(1, 1, 3, 5, device=device)
    mask = torch.zeros(1, 1, 3, 5, device=device)
    mask[..., 1, :] = mask[..., 2, :2] = torch.finfo(torch.float32).min
    torch.testing.assert_close(scale_mask_softmax(scores, mask), (scores + mask).softmax(-1))
    scores[..., 0, 2] = torch.nan
    y = scale_mask_softmax(scores, mask)
    assert y[..., 0, :].isnan().all() and y[..., 1:, :].isfinite().all()


def test_dropout_keeps_the_expected_share_and_repeats_with_the_generator(device):
    scores = torch.randn(2, 2, 16, 64, device=device, dtype=torch.float64)

    def run(x):
        torch.manual_seed(7)
        return scale_mask_softmax(x, dropout_p=0.25)

    dropped, whole = run(scores), scale_mask_softmax(scores)
    kept = dropped != 0
    assert 0.65 < kept.double().mean() < 0.85
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-6, atol=0)
    assert torch.equal(run(scores), dropped)
    torch.manual_seed(8)
    assert not torch.equal(scale_mask_softmax(scores, dropout_p=0.25), dropped)
    assert torch.autograd.gradcheck(run, scores[:1, :1, :2, :9].clone().requires_grad_())


def test_ranks_drop_their_own_and_stay_in_step(device):
    scores = torch.randn(2, 2, 16, 64, device=device)
    masks, after = [], []
    for rank in (0, 1, 3, 1):
        torch.manual_seed(7)
        masks.append((scale_mask_softmax(scores, dropout_p=0.5, rank=rank) != 0).double().flatten())
        after.append(torch.rand(4, device=device))
    assert all(torch.equal(x, after[0]) for x in after) and torch.equal(masks[1], masks.pop())
    assert (torch.corrcoef(torch.stack(masks)) - torch.eye(3, device=device)).abs().max() < 5 / 64


def test_operator(device):
    scores = torch.randn(1, 2, 4, 9, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.tpfused.scale_mask_softmax.default, (scores, None, None, 1.0, 1, 0.0))


def test_bad_input_is_refused(device):
    scores = torch.randn(2, 3, 4, 5, device=device)
    for error, told, arguments in (
        (ValueError, r"\(3, 4, 5\)", {"scores": scores[0]}),
        (TypeError, "int64", {"scores": scores.long()}),
        (ValueError, "lower", {"causal": "lower"}),
        (ValueError, "1.0", {"dropout_p": 1.0}),
        (TypeError, "int64", {"mask": torch.ones(4, 5, dtype=torch.int64, device=device)}),
        (ValueError, "meta", {"mask": torch.ones(4, 5, dtype=torch.bool, device="meta")}),
        (ValueError, r"\(4, 6\)", {"mask": torch.ones(4, 6, dtype=torch.bool, device=device)}),
        (ValueError, "gradient", {"mask": torch.ones(4, 5, device=device, requires_grad=True)}),
    ):
        with pytest.raises(error, match=told):
            scale_mask_softmax(**{"scores": scores} | arguments)


def test_recomputation_draws_the_same_dropout(device):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(1, 2, 5, 40, device=device, requires_grad=True)
    grad = torch.randn(1, 2, 5, 40, device=device)
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        call = lambda x: scale_mask_softmax(x, None, 1.0, dropout_p=0.4)  # noqa: E731
        y = checkpoint(call, x, use_reentrant=False) if again else call(x)
        results.append((y.detach(), *torch.autograd.grad(y, x, grad)))
    assert all(map(torch.equal, *results))


def test_rows_that_an_additive_mask_leaves_nothing_of(device):
    x = torch.randn(1, 1, 3, 20, device=device, requires_grad=True)
    mask = torch.zeros(3, 20, device=device)
    mask[1] = -float("inf")
    y = scale_mask_softmax(x, mask)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert not y[0, 0, 1].any() and not grad[0, 0, 1].any()
    torch.testing.assert_close(y[0, 0, ::2], x[0, 0, ::2].softmax(-1))
    assert scale_mask_softmax(x[..., :0], mask[:, :0]).shape == (1, 1, 3, 0)
