"""Megatron-LM's cross entropy of logits whose vocabulary is split."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tpfused.checks import AssertedError, check_number
from tpfused.compat.megatron.mappings import find_group
from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.compat.sizes import as_labels, size_of
from tpfused.layers import loss

IGNORED = -100


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The loss of each token.

    Args:
        vocab_parallel_logits: ``[tokens, batch, vocabulary / ranks]``, or with other leading dimensions; floating. Not
            changed.
        target: integers ``[tokens, batch]``. Megatron gives a negative label a meaningless loss, for the program to
            mask; here its loss and gradient are zero.
        label_smoothing: in [0, 1), spread over the K - 1 other labels (Megatron's rule, which `F.cross_entropy` does
            not follow) of the whole vocabulary (Megatron's own takes each rank's part for the whole); not more than
            (K - 1) / K, with which all labels are alike.
        tp_group: the tensor-parallel group.

    Returns:
        float32 ``[tokens, batch]`` (float64 for float64 logits).

    Raises:
        ValueError, TypeError: as `tpfused.vocab_parallel_cross_entropy`.
    """
    check_number(label_smoothing, "label_smoothing")
    if not 0.0 <= label_smoothing < 1.0:
        raise AssertedError(f"label_smoothing must be in [0, 1), not {label_smoothing}")
    group, target = find_group(tp_group), as_labels(target)
    if label_smoothing:
        # An amount e spread over the K - 1 others is e K / (K - 1) spread over all K.
        vocabulary = size_of(vocab_parallel_logits, -1, "vocab_parallel_cross_entropy") * group.size
        spread = label_smoothing * vocabulary / max(1, vocabulary - 1)
        if spread > 1.0 + 1e-9:  # (K - 1) / K itself is rounded
            raise AssertedError(
                f"label_smoothing {label_smoothing} would give the label itself less than each other one: of "
                f"{vocabulary} labels, at most {(vocabulary - 1) / vocabulary:.6f}"
            )
        label_smoothing = min(spread, 1.0)
    return loss.vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target.masked_fill(target < 0, IGNORED) if isinstance(target, Tensor) else target,  # refused there
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="none",
        group=group,
    )


__getattr__ = names_of("megatron.core.tensor_parallel.cross_entropy")
