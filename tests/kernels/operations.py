"""One small call of each operation, for tests that ask the same of all."""

import torch

from tpfused.kernels.cross_entropy import backward, loss, statistics
from tpfused.kernels.dropout import dropout
from tpfused.kernels.embedding import embedding
from tpfused.kernels.gated_act import gated_act
from tpfused.kernels.linear_act import linear_act
from tpfused.kernels.rotary import rotary_qkv
from tpfused.kernels.softmax import scale_mask_softmax


def cross_entropy(logits, target):
    """The dense loss, through the three steps of the vocabulary-parallel one, and its gradient."""
    losses, log_z = loss(statistics(logits, target, 0, False), target, logits.shape[-1], -100, 0.0, 0.0)
    ones = torch.ones_like(losses)
    return losses, backward(logits, target, log_z, ones, 0, logits.shape[-1], -100, 0.0, 0.0)


def operations(device="cuda", dtype=torch.bfloat16):
    """name -> (function of floating tensors, those tensors): one small call of each operation."""
    random = lambda *shape: torch.randn(shape, device=device, dtype=dtype)  # noqa: E731
    ids = torch.randint(40, (6, 50), device=device)  # some rows of the table are wanted often
    target = torch.randint(100, (30,), device=device)
    mask = torch.rand(2, 1, 33, 130, device=device) > 0.3
    return {
        "softmax": (lambda x: scale_mask_softmax(x, mask, 0.5, True), [random(2, 3, 33, 130)]),
        "softmax, dropout": (lambda x: scale_mask_softmax(x, mask, 0.5, dropout_p=0.3), [random(2, 3, 33, 130)]),
        "dropout": (lambda x: dropout(x, 0.3, 1), [random(33, 130)]),
        "gated_act": (gated_act, [random(5, 66)]),
        "rotary": (lambda x: torch.cat(rotary_qkv(x, 2, 16, 1e4), dim=1), [random(2, 33, 3 * 4 * 16)]),
        "embedding": (lambda w: embedding(ids, w, 5, 60), [random(20, 72)]),
        "linear_act": (lambda x, w, b: linear_act(x, w, b, "gelu"), [random(70, 64), random(48, 64), random(48)]),
        "large linear_act": (
            lambda x, w, b: linear_act(x, w, b, "gelu", backend="triton"),
            [random(2200, 512), random(2056, 512), random(2056)],
        ),
        "gated linear": (
            lambda x, w: linear_act(x, w, None, "silu", gated=True, backend="triton"),
            [random(2200, 512), random(2064, 512)],
        ),
        "cross_entropy": (lambda x: cross_entropy(x.detach(), target)[0], [random(30, 100)]),
    }


NAMES = list(operations("meta"))


def results(function, inputs):
    """The output and the gradients, from the same random state each time."""
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    if not out.requires_grad:
        return [out]
    generator = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, device=out.device, dtype=out.dtype, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
