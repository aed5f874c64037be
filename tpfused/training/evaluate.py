"""After the last step of a text run: loss and accuracy on the held-out tail, and a continuation of it."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpfused import vocab_parallel_argmax, vocab_parallel_cross_entropy
from tpfused.collectives import gather_from_group
from tpfused.training.data import TextData
from tpfused.training.model import Trainable

WINDOWS_AT_A_TIME = 8
PROMPT_BYTES = 96
TEMPERATURE = 0.7


@torch.no_grad()
def validate(
    trainable: Trainable, data: TextData, autocast: AbstractContextManager, dp: DeviceMesh | None
) -> dict[str, float]:
    """Mean loss and token accuracy over the held-out windows, each window on one data-parallel rank.

    Every rank runs the same number of forwards, as FSDP2 needs: one that runs out of windows repeats the last with
    weight 0.
    """
    rank, ranks = (dp.get_local_rank(), dp.size()) if dp is not None else (0, 1)
    ids, labels = data.held_out()
    share = -(-len(ids) // ranks)
    mine = torch.arange(rank * share, (rank + 1) * share)
    weights = (mine < len(ids)).double()
    mine = mine.clamp(max=len(ids) - 1)
    model, device = trainable.model, next(trainable.model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right guesses, tokens
    for some, weight in zip(mine.split(WINDOWS_AT_A_TIME), weights.split(WINDOWS_AT_A_TIME), strict=True):
        some_ids, some_labels, weight = (
            ids[some].to(device),
            labels[some].to(device),
            weight.to(device)[:, None],
        )
        with autocast:
            logits_shard = trainable.logits(some_ids)
        loss = vocab_parallel_cross_entropy(
            logits_shard, some_labels, vocab_size=model.config.vocab_size, reduction="none", group=model.group
        )
        guesses = vocab_parallel_argmax(logits_shard, model.config.vocab_size, model.group)
        right = guesses == some_labels
        sums += torch.stack([(loss * weight).sum(), (right * weight).sum(), weight.sum() * ids.shape[1]])
    if dp is not None:
        dist.all_reduce(sums, group=dp.get_group())
    loss, right, tokens = sums.tolist()
    return {"loss": loss / tokens, "accuracy": right / tokens, "tokens": int(tokens)}


@torch.no_grad()
def sample(
    trainable: Trainable, data: TextData, autocast: AbstractContextManager, length: int, seed: int
) -> dict[str, str]:
    """A prompt from the held-out tail, and the `length` bytes the model writes after it, alike on all ranks.

    Not by the model's `generate`, which ends at `max_positions`: the text may be longer than the window, which slides.
    """
    generator = torch.Generator().manual_seed(seed)
    context = data.window - 1
    model, device = trainable.model, next(trainable.model.parameters()).device
    text = data.prompt(min(PROMPT_BYTES, context))
    prompt = len(text)
    for _ in range(length):
        with autocast:
            logits_shard = trainable.logits(text[None, -context:].to(device))
        last = gather_from_group(logits_shard[0, -1], -1, model.config.vocab_size, model.group).double().cpu()
        text = torch.cat([text, torch.multinomial((last / TEMPERATURE).softmax(-1), 1, generator=generator)])
    return {"prompt": _printable(text[:prompt]), "continuation": _printable(text[prompt:])}


def _printable(tokens: Tensor) -> str:
    """As text; what a terminal could take for a command becomes a question mark."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
