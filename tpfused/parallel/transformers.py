"""What is transformers' own: the head's logits, sharded or gathered, and the loss from sharded ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpfused.layers.linear import ColumnParallelLinear
from tpfused.layers.loss import check_target, vocab_parallel_cross_entropy

LOSSES = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}  # transformers' -> whether a token predicts the next one
# Classes whose forward calls no `loss_function` that could be replaced: it is given no labels, and the loss added.
_OWN_LOSS = {"BertForMaskedLM"}


def shard_logits(model: nn.Module, head: ColumnParallelLinear) -> None:
    """The head's logits stay sharded, for the loss, in training with labels; they are gathered everywhere else."""
    loss = ShardedLoss(model.loss_function, head)
    loss.keeps_labels = any(base.__name__ in _OWN_LOSS for base in type(model).__mro__)
    model.loss_function = loss  # transformers' own place for another loss
    # Methods, not closures: a deep copy of the model has them of its own loss and head.
    model.register_forward_pre_hook(loss.before_forward, with_kwargs=True)
    model.register_forward_hook(loss.after_forward, with_kwargs=True)


class ShardedLoss:
    """A model's language-modelling loss: of sharded logits by `vocab_parallel_cross_entropy`, of whole ones its own."""

    def __init__(self, dense: Callable[..., Tensor], head: ColumnParallelLinear):
        self.dense = dense
        self.head = head
        self.shifts = LOSSES[dense.__name__]
        self.keeps_labels = False
        self.labels: Tensor | None = None  # those kept from the model, during its forward

    def before_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        labels = given.pop("labels", None)
        self.head.gather_output = labels is None or not model.training
        self.labels = None
        if not self.head.gather_output:
            ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
            if isinstance(embedded, Tensor):
                _check_labels(labels, embedded.shape[:-1])
            elif isinstance(ids, Tensor):
                _check_labels(labels, ids.shape)
        if self.head.gather_output or not self.keeps_labels:
            return None
        self.labels = labels
        given.pop("self")
        return (), {**given.pop("kwargs", {}), **given}

    def after_forward(self, model: nn.Module, args: tuple, kwargs: dict, output):
        if self.labels is None:
            return None
        labels, self.labels = self.labels, None
        if isinstance(output, tuple):
            return self(output[0], labels, self.head.out_features), *output
        loss = self(output.logits, labels, self.head.out_features)
        return type(output)(**{**output, "loss": loss})  # made anew: in its own order, the loss before the logits

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
        _check_labels(labels, logits.shape[:-1])  # which may be of the last tokens only
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.to(logits.device).reshape(logits.shape[:-1]),
            vocab_size=self.head.out_features,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            group=self.head.group,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _check_labels(labels: Tensor, tokens: torch.Size) -> None:
    """As transformers, which flattens both."""
    check_target(labels)
    if labels.numel() != tokens.numel():
        raise ValueError(f"labels of shape {tuple(labels.shape)} are not one for each of {tuple(tokens)} tokens")
