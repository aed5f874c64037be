"""Attention softmax: scale, mask or causal, softmax, dropout."""

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tpfused.bench.case import (
    Case,
    Outputs,
    Setting,
    Variant,
    Work,
    call_of,
    copy_floor,
    exact_of,
    optional,
    variants_of,
)

SUMMARY = "softmax(scale * scores + mask), dropout; floor: a copy of the bytes it must touch"
SCALE = 0.125
ATTENDS = 0.9  # the share of True in the boolean masks
PLAIN = "without scale and mask"


def case(shape: tuple[int, int, int, int], mode: str, direction: str, dropout: float = 0.0, quick=False) -> Case:
    """`shape` is ``[batch, heads, queries, keys]``; `mode` "masked" (boolean, of one head) or "causal"."""
    name = "x".join(map(str, shape)) + f" {mode}" + (f" dropout {dropout:g}" if dropout else "")
    variants = ("ours", "eager", "compile", *(() if dropout else ("torch.softmax", "liger")))
    work = partial(build, shape=shape, mode=mode, direction=direction, dropout=dropout)
    return Case("softmax", name, direction, variants, work, quick)


def build(setting: Setting, shape: tuple[int, int, int, int], mode: str, direction: str, dropout: float) -> Work:
    from tpfused.kernels.softmax import scale_mask_softmax

    batch, _, queries, keys = shape
    x, grad = setting.random(*shape), setting.random(*shape)
    if mode == "masked":
        mask = torch.rand(batch, 1, queries, keys, device=setting.device) < ATTENDS
        mask[..., 0] = True  # a row that attends to nothing is NaN in plain PyTorch
        hidden = ~mask
    else:
        mask, hidden = None, torch.ones(queries, keys, dtype=torch.bool, device=setting.device).triu(1)

    def probabilities(scores):
        return torch.softmax((scores * SCALE).masked_fill(hidden, -torch.inf), dim=-1)

    def eager(scores):
        y = probabilities(scores)
        return F.dropout(y, dropout) if dropout else y

    def ours(scores):
        return scale_mask_softmax(scores, mask, SCALE, mode == "causal", dropout)

    functions = {"ours": ours, "eager": eager, "compile": setting.compile(eager)}
    moved = bytes_of(shape, mode, direction, dropout, x.element_size())
    floor = copy_floor(moved, setting.device)
    if dropout:
        variants = {
            name: _with_dropout(direction, function, probabilities, x, grad, dropout, hidden)
            for name, function in functions.items()
        }
        return Work(variants, tuple, floor, moved)

    variants = variants_of(direction, functions, [x], grad)
    if direction == "bwd":
        causal = int(mode == "causal")
        y = cache(lambda: probabilities(x))

        def operator():
            return torch.ops.tpfused.scale_mask_softmax_backward(y(), None, grad, None, SCALE, causal, 0.0)

        variants["ours"] = replace(variants["ours"], fallback=operator)
    plain = partial(torch.softmax, dim=-1)
    plain_exact = exact_of(direction, plain, [x], grad)
    liger = optional("liger_kernel.transformers.functional", "liger_softmax")
    for name, function in {"torch.softmax": plain, "liger": liger}.items():
        if function is not None:
            variants[name] = Variant(
                call_of(direction, function, [x], grad), lambda _: plain_exact(), "torch.softmax", None, False, PLAIN
            )
    return Work(variants, exact_of(direction, eager, [x], grad), floor, moved)


def bytes_of(shape: tuple[int, int, int, int], mode: str, direction: str, dropout: float, size: int) -> int:
    """What must be touched. Causal rows are read up to the diagonal, and written whole.

    With dropout the backward reads the scores and the mask in place of the result, and computes it again.
    """
    batch, heads, queries, keys = shape
    rows = batch * heads * queries
    whole = rows * keys * size
    read = whole if mode == "masked" else batch * heads * size * sum(min(i + 1, keys) for i in range(queries))
    mask = batch * queries * keys if mode == "masked" and (direction == "fwd" or dropout) else 0
    return (read if direction == "fwd" else 2 * read) + whole + mask


def _with_dropout(
    direction: str, function, probabilities, x: Tensor, grad: Tensor, dropout: float, hidden: Tensor
) -> Variant:
    """Each variant draws a mask of its own: what is right is made from what it kept."""

    def scaled(kept: Tensor) -> Tensor:
        share = kept[(~hidden).expand(kept.shape)].double().mean()
        return kept / (1 - dropout) if abs(share - (1 - dropout)) < 0.02 else kept * torch.nan  # a wrong share

    if direction == "fwd":

        def exact(outputs: Outputs) -> Outputs:
            return [probabilities(x.double()) * scaled(outputs[0] != 0)]

        return Variant(call_of("fwd", function, [x]), exact)

    leaf = x.detach().requires_grad_()
    y = cache(lambda: function(leaf))

    def exact_backward(_: Outputs) -> Outputs:
        p = probabilities(x.double())
        dp = grad.double() * scaled(y() != 0)
        return [SCALE * p * (dp - (p * dp).sum(-1, keepdim=True))]

    return Variant(lambda: torch.autograd.grad(y(), leaf, grad, retain_graph=True), exact_backward)


def _square(batch: int, heads: int, length: int) -> tuple[int, int, int, int]:
    return batch, heads, length, length


SHAPES = [
    _square(8, 32, 1024),
    _square(2, 16, 2048),
    _square(1, 8, 4096),
    _square(1, 4, 8192),
    _square(1, 2, 16384),
    _square(8, 32, 128),
]
CASES = [
    case(shape, mode, direction, quick=shape == _square(2, 16, 2048))
    for shape in SHAPES
    for mode in ("masked", "causal")
    for direction in ("fwd", "bwd")
] + [case(_square(2, 16, 2048), "masked", direction, dropout=0.1) for direction in ("fwd", "bwd")]
