"""Cross entropy on logits whose vocabulary is split (Shoeybi et al., 2019, "Megatron-LM", section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.agreement import attempt
from tpfused.autograd import apply, once_differentiable
from tpfused.collectives import all_gather
from tpfused.explanation import KERNEL, PLAIN, tell
from tpfused.group import resolve_group
from tpfused.kernels import cross_entropy as kernels
from tpfused.layers.backend import why_plain
from tpfused.layers.ids import IdCheck, check_mode
from tpfused.layers.vocabulary import whole_vocabulary
from tpfused.overlap.tiers import wanted
from tpfused.sharding import padded_shard_size, shard_range

REDUCTIONS = ("mean", "sum", "none")
_label_checks: dict[torch.device, IdCheck] = {}


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    check: str = "async",
    group=None,
    backend: str | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """`F.cross_entropy` over a vocabulary split over the ranks, without gathering the logits.

    On a GPU the logits are read once forward, and once backward, where their gradient is written: the kernels of
    `tpfused.kernels.cross_entropy`, with one all-gather of a few numbers a token, forward. Elsewhere the plain path
    runs. Differentiable once.

    Args:
        logits: ``[..., vocabulary shard]``, floating; computed in float32 (float64 for float64). Not changed, unless
            `overwrite_logits`.
        target: int64 ``[...]``, global ids, the same on every rank; `ignore_index` marks tokens left out.
        vocab_size: of the whole vocabulary, split as `tpfused.sharding` says. None: all shards are equally wide, and
            gathered logits are taken for shards. The ranks compare their widths when a size (without one, a width) is
            new to them, as `tpfused.layers.vocabulary.whole_vocabulary` says. Later, of sizes that differ between
            ranks, all are told where labels are checked at once; elsewhere the kernels give at least one rank NaN, loss
            and gradient.
        label_smoothing: in [0, 1], as `F.cross_entropy` does it, over the whole vocabulary.
        z_loss: the weight of ``log(Z)**2``, added to each token's loss; at least 0.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none" for per-token losses ``[...]``.
        check: when to raise for labels outside the vocabulary, as in `VocabParallelEmbedding`. Their loss is NaN, which
            is all that CUDA graphs tell of them, and with "async" compiled code on a GPU. What is told at once, on the
            CPU or with "sync", all ranks are told, in one small all-reduce. "async" on a GPU waits for no one: of
            labels that differ between ranks, against the contract, one rank may raise alone, and the others by their
            process group's time-out.
        group: the ProcessGroup over which the vocabulary is split.
        backend: "reference" forces the plain path, as ``with tpfused.tier("reference"):`` does.
        overwrite_logits: backward may write the gradient over the logits, which nothing else must need by then: their
            size in memory is saved. It can then run once. The plain path and compiled code leave them as they are.

    Returns:
        float32 (float64 for float64 logits), the same on every rank.

    Raises:
        ValueError: logits of the wrong width on some rank (gathered ones, say), widths that differ between ranks
            without `vocab_size`, sizes that do, shapes that do not match, a label outside the vocabulary, a number out
            of range.
        TypeError: labels that are not int64, logits that are not floating or of 8 bits, numbers that are none.

    What one rank alone is refused, all ranks raise if they compare their widths at that call. Otherwise, and for logits
    or a vocab_size of a wrong kind, the others wait for that rank until their process group's time-out.
    """
    group = resolve_group(group)
    checks.check_logits(logits, vocab_size, "vocab_parallel_cross_entropy")
    options = ignore_index, label_smoothing, z_loss, reduction, check, backend, overwrite_logits
    # Not raised yet: where the ranks compare their widths, they all hear of what one of them is refused.
    _, refused = attempt(_check_arguments, logits, target, *options)
    vocab_size = whole_vocabulary(logits, vocab_size, group, "vocab_parallel_cross_entropy", refused)
    check_labels = _label_checks.setdefault(logits.device, IdCheck("labels"))
    target, _ = check_labels(target, vocab_size, check, ignore_index, group, logits)
    fused = backend is None and wanted[-1] != "reference" and kernels.supports(logits)
    tell("cross entropy", logits, KERNEL if fused else PLAIN, "" if fused else why_plain(logits, backend))
    if fused:
        numbers = vocab_size, ignore_index, float(label_smoothing), float(z_loss)
        overwrite = overwrite_logits and not torch.compiler.is_compiling()
        loss = apply(_VocabParallelCrossEntropy, logits, target, group, overwrite, *numbers)
    else:
        loss = reference.vocab_parallel_cross_entropy(
            logits,
            target,
            vocab_size,
            group,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
    return reference.reduce_loss(loss, target, ignore_index, reduction)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """logits_shard_v ``[..., v]``, target ``[...]`` -> each token's loss ``[...]``, float32 (float64 for float64).

    forward: one all-gather of the statistics ``[parts, 5, tokens]``, in the loss's dtype; one part a rank, or several
             where tokens are few and shards wide.
    dgrad:   local, ``[..., v]`` in the logits' dtype.
    saved:   the logits as they are, the labels, and two numbers a token for log(Z).
    """

    @staticmethod
    def forward(ctx, logits, target, group, overwrite, *numbers):
        vocab_size, _, label_smoothing, _ = numbers
        start, _ = shard_range(vocab_size, group.size, group.rank)
        # Shards may be uneven or empty; all ranks give as many parts as the widest has.
        widest = padded_shard_size(vocab_size, group.size)
        stats = kernels.statistics(logits, target, start, label_smoothing > 0, widest)
        if group.size > 1:
            stats = all_gather(stats, 0, stats.shape[0] * group.size, group)
        loss, log_z = kernels.loss(stats, target, *numbers)
        ctx.save_for_backward(logits, target, log_z)
        ctx.start, ctx.numbers, ctx.overwrite, ctx.overwritten = start, numbers, overwrite, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        if ctx.overwritten:
            raise RuntimeError("overwrite_logits=True: an earlier backward has put the gradient in the logits' place")
        ctx.overwritten = ctx.overwrite
        backward = kernels.backward_in_place if ctx.overwrite else kernels.backward
        dlogits = backward(*ctx.saved_tensors, dloss, ctx.start, *ctx.numbers)
        return dlogits, None, None, None, *(None for _ in ctx.numbers)


OPTIONS = {name: value for name, value in vocab_parallel_cross_entropy.__kwdefaults__.items() if name != "group"}


def _check_arguments(logits: Tensor, target: Tensor, *options: Any) -> None:
    """Of logits that `checks.check_logits` has let through."""
    check_target(target)
    if logits.device != target.device:
        raise ValueError(f"the logits are on {logits.device}, the labels on {target.device}")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    check_options(*options)
    *_, overwrite_logits = options
    if overwrite_logits and logits.is_leaf and logits.requires_grad:
        raise ValueError("overwrite_logits=True would replace the values of a leaf that requires a gradient")


def check_target(target: Tensor) -> None:
    checks.check_dense(target, "vocab_parallel_cross_entropy", "the labels")
    if target.dtype != torch.int64:
        raise TypeError(f"labels must be int64 class indices, not {target.dtype}")


def check_options(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    check: str,
    backend: str | None,
    overwrite_logits: bool,
    vocab_size: int | None = None,
) -> None:
    """What can be refused before there are logits. Whether `vocab_size` fits those, the ranks find out together."""
    if vocab_size is not None:
        checks.check_size(vocab_size, "vocab_size")
    if not -(2**63) <= checks.check_integer(ignore_index, "ignore_index") < 2**63:
        raise ValueError(f"ignore_index must be an int64, as labels are, not {ignore_index}")
    checks.check_number(label_smoothing, "label_smoothing")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    checks.check_number(z_loss, "z_loss")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be at least 0, and finite, not {z_loss}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}")
    check_mode(check)
    checks.check_backend(backend)
    checks.check_boolean(overwrite_logits, "overwrite_logits")
