"""The three steps of the cross entropy, over shards, against the dense loss."""

import pytest
import torch

from tests.kernels.compare import assert_within
from tpfused import reference
from tpfused.kernels import cross_entropy

SHARDS = [(0, 20), (20, 20), (20, 50)]  # one is empty


def parallel(logits, target, dloss, smoothing, z_loss):
    """Loss and gradient, the vocabulary split as in SHARDS."""
    vocab = logits.shape[-1]
    widest = max(b - a for a, b in SHARDS)
    stats = [cross_entropy.statistics(logits[..., a:b], target, a, smoothing > 0, widest) for a, b in SHARDS]
    assert len({one.shape for one in stats}) == 1  # as an all-gather needs it
    loss, log_z = cross_entropy.loss(torch.cat(stats), target, vocab, -100, smoothing, z_loss)
    grads = [
        cross_entropy.backward(logits[..., a:b], target, log_z, dloss, a, vocab, -100, smoothing, z_loss)
        for a, b in SHARDS
    ]
    return loss, torch.cat(grads, dim=-1)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.01)])
def test_shards_together_are_the_dense_loss(device, dtypes, block, smoothing, z_loss, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK", block)
    for dtype in dtypes:
        logits = torch.randn(3, 5, 50, device=device, dtype=dtype).transpose(0, 1)  # tokens first, as a model's are
        target = torch.randint(50, (5, 3), device=device)
        target[0, 0] = -100
        exact = logits.double().requires_grad_()
        expected = reference.cross_entropy(exact, target, label_smoothing=smoothing, z_loss=z_loss, reduction="none")
        dloss = torch.randn(5, 3, device=device, dtype=torch.promote_types(dtype, torch.float32))
        (grad,) = torch.autograd.grad(expected, exact, dloss.double())
        loss, dlogits = parallel(logits, target, dloss, smoothing, z_loss)
        assert dlogits.dtype == dtype and loss.dtype == dloss.dtype and loss[0, 0] == 0
        # the numbers (smoothing, z_loss) are float32 in the kernels
        torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=3e-6)
        eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-9
        assert (dlogits.double() - grad).abs().max() <= 2 * eps * grad.abs().max() + 1e-6 * (dtype != torch.float64)
        assert dlogits[0, 0].eq(0).all()


def test_logits_far_from_zero(device):
    """What all logits of a token have in common costs no digits."""
    logits = torch.randn(4, 50, device=device) + 1000
    target = torch.randint(50, (4,), device=device)
    ones = torch.ones(4, device=device)

    for smoothing in (0.0, 0.1, 1.0):

        def dense(x, smoothing=smoothing):
            x = x.requires_grad_()
            loss = reference.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
            return loss.detach(), *torch.autograd.grad(loss, x, ones.to(x.dtype))

        results = parallel(logits, target, ones, smoothing, 0.0), dense(logits.double()), dense(logits.clone())
        for what, actual, exact, eager in zip(("loss", "gradient"), *results, strict=True):
            assert_within(actual, exact, eager, f"{what} {smoothing}")


def test_logits_of_overlapping_memory(device):
    """A gradient has memory of its own, and all of it is written."""
    logits = torch.randn(2, 10, device=device).unfold(1, 8, 1)  # [2, 3, 8]
    target = torch.randint(8, (2, 3), device=device)
    actual = parallel(logits, target, torch.ones(2, 3, device=device), 0.0, 0.0)
    expected = parallel(logits.contiguous(), target, torch.ones(2, 3, device=device), 0.0, 0.0)
    assert all(map(torch.equal, actual, expected))


def test_labels_outside_the_vocabulary_give_nan(device):
    logits = torch.randn(4, 50, device=device)
    target = torch.tensor([50, 3, -1, -100], device=device)
    loss, grad = parallel(logits, target, torch.ones(4, device=device), 0.0, 0.0)
    assert loss.isnan().tolist() == grad.isnan().any(-1).tolist() == [True, False, True, False]


def test_rows_of_minus_infinity_and_nothing_to_do(device):
    logits = torch.full((2, 50), -torch.inf, device=device)
    logits[0, 30] = 1.0
    target = torch.tensor([30, -100], device=device)
    loss, grad = parallel(logits, target, torch.ones(2, device=device), 0.0, 0.0)
    assert loss.tolist() == [0.0, 0.0] and grad.eq(0).all()
    loss, grad = parallel(logits[:0], target[:0], torch.ones(0, device=device), 0.0, 0.0)
    assert loss.shape == (0,) and grad.shape == (0, 50)


def test_operators(device):
    logits, target = torch.randn(4, 50, device=device), torch.randint(50, (4,), device=device)
    stats = cross_entropy.statistics(logits, target, 0, True)
    loss, log_z = cross_entropy.loss(stats, target, 50, -100, 0.1, 0.0)
    ops = torch.ops.tpfused
    for widest in (None, 60):
        torch.library.opcheck(ops.cross_entropy_statistics.default, (logits, target, 0, True, widest))
    torch.library.opcheck(ops.cross_entropy_loss.default, (stats, target, 50, -100, 0.1, 0.0))
    for laid_out in (logits, logits.t().contiguous().t()):
        arguments = laid_out, target, log_z, loss, 0, 50, -100, 0.1, 0.0
        torch.library.opcheck(ops.cross_entropy_backward.default, arguments)
