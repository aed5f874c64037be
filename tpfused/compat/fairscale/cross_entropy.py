"""fairscale's cross entropy on logits whose vocabulary is split.

Differs from fairscale: the logits are not changed, the loss of 16-bit logits is float32, and a label outside the
vocabulary is an error (there its loss is a number without meaning), but for -100, whose loss and gradient are zero.
"""

from __future__ import annotations

from torch import Tensor

from tpfused.compat.fairscale.initialize import get_model_parallel_group as get_model_parallel_group
from tpfused.compat.fairscale.initialize import get_model_parallel_rank as get_model_parallel_rank
from tpfused.compat.fairscale.initialize import get_model_parallel_world_size as get_model_parallel_world_size
from tpfused.compat.fairscale.initialize import tp_group
from tpfused.compat.fairscale.utils import VocabUtility as VocabUtility
from tpfused.compat.sizes import as_labels
from tpfused.layers import loss


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Each token's loss.

    Args:
        vocab_parallel_logits: this rank's ``[..., vocabulary / ranks]``.
        target: integers ``[...]``, ids in the whole vocabulary, the same on every rank.

    Returns:
        ``[...]``, float32 (float64 for float64), the same on every rank.

    Raises:
        ValueError, TypeError: as `tpfused.vocab_parallel_cross_entropy`.
    """
    return loss.vocab_parallel_cross_entropy(
        vocab_parallel_logits, as_labels(target), reduction="none", group=tp_group()
    )
