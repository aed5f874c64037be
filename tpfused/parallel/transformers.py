"""What is transformers' own: the head's logits, sharded or gathered, and the loss from sharded ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tpfused.layers.linear import ColumnParallelLinear
from tpfused.layers.loss import vocab_parallel_cross_entropy

LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}  # transformers' -> whether a token predicts the next one
# Classes whose forward calls no `loss_function` that could be replaced.
_OWN_LOSS = {"BertForMaskedLM"}


def shard_logits(model: nn.Module, head: ColumnParallelLinear) -> None:
    """The head's logits stay sharded, for the loss, in training with labels; they are gathered everywhere else."""
    model.loss_function = ShardedLoss(model.loss_function, head)  # transformers' own place for another loss
    signature = inspect.signature(type(model).forward)
    takes_labels_away = any(base.__name__ in _OWN_LOSS for base in type(model).__mro__)
    labels = None

    def before(model: nn.Module, args: tuple, kwargs: dict):
        nonlocal labels
        given = signature.bind_partial(model, *args, **kwargs).arguments
        head.gather_output = given.get("labels") is None or not model.training
        if takes_labels_away and not head.gather_output:
            labels = given.pop("labels")
            given.pop("self")
            return (), {**given.pop("kwargs", {}), **given}

    def after(model: nn.Module, args: tuple, kwargs: dict, output):
        nonlocal labels
        if labels is None:
            return None
        of_logits, labels = labels, None
        loss = model.loss_function(_logits(output), of_logits, model.config.vocab_size, **kwargs)
        if isinstance(output, tuple):
            return loss, *output
        output["loss"] = loss
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)


class ShardedLoss:
    """A model's language-modelling loss: of sharded logits by `vocab_parallel_cross_entropy`, of whole ones its own."""

    def __init__(self, dense: Callable[..., Tensor], head: ColumnParallelLinear):
        self.dense = dense
        self.head = head
        self.shifts = LOSSES[dense.__name__]

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        if self.head.gather_output:
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            if shift_labels is not None:
                options["shift_labels"] = shift_labels
            return self.dense(logits, labels, vocab_size, **options)
        if self.shifts:
            # The logits of a token are for the next one; the last token's are for none.
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.to(logits.device).view(logits.shape[:-1]),
            vocab_size=self.head.out_features,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            group=self.head.group,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _logits(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.logits
