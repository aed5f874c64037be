"""Tokens from a tensor-parallel language model: greedy, or sampled with a temperature and top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpfused import checks
from tpfused.collectives import gather_from_group
from tpfused.group import TPGroup, resolve_group
from tpfused.layers.cache import KVCache, with_attributes
from tpfused.layers.ids import IdCheck
from tpfused.layers.vocabulary import whole_vocabulary
from tpfused.parameter import check_size
from tpfused.sharding import shard_range

if TYPE_CHECKING:
    import torch.distributed as dist

    from tpfused.layers.transformer import ParallelTransformer


def generate(
    model: ParallelTransformer,
    ids: Tensor,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    temperature: float | None = 0.0,
    top_p: float | None = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each prompt by up to `max_new_tokens` tokens, the same on every rank. A method of `ParallelTransformer`.

    Dropout is off, no gradient is kept, and the model is left in the mode it was in. Collective over the
    tensor-parallel group, and under FSDP2 over all ranks, which must then make equally many steps (no `eos_id`).

    Args:
        ids: int64 or int32 ``[batch, tokens]``, the prompts, whole on each rank.
        max_new_tokens: together with the prompt at most `max_positions`.
        mask: boolean ``[batch, tokens]``, False for padding, which must come first: prompts of different lengths are
            padded on the left.
        temperature: 0 or None: the likeliest token (of equals the one with the lowest id). Otherwise tokens are drawn
            from ``softmax(logits / temperature)``.
        top_p: draw from the fewest likeliest tokens that together have this probability (Holtzman et al., 2020);
            1 or None: from all.
        eos_id: ends a sequence; then it is repeated until all sequences have ended.
        generator: for the draws, on the model's device; None: torch's default one. The group's first rank draws for
            all of them.

    Returns:
        The prompts and their continuations, ``[batch, tokens + new tokens]``: fewer than `max_new_tokens` where all
        sequences have ended.

    Raises:
        ValueError: more tokens than `max_positions`, ids outside the vocabulary, padding that does not come first, a
            temperature or top_p out of range, a model that is not causal, a generator of another device.
        TypeError: ids that are not integers, a mask that is not boolean, sizes or an eos_id that are not integers, a
            temperature or top_p that is no number, a generator that is no torch.Generator.
    """
    vocab_size = model.config.vocab_size
    tokens, padding = _check_prompts(model, ids, max_new_tokens, mask)
    temperature = 0.0 if temperature is None else temperature
    top_p = 1.0 if top_p is None else top_p
    _check_sampling(temperature, top_p, eos_id, vocab_size)
    _check_generator(generator, ids.device, temperature)

    # Not inference_mode: parameters that FSDP2 gathers there, and ids made there, cannot be trained with afterwards.
    with torch.no_grad(), with_attributes(model, training=False, sequence_parallel=False):
        cache = KVCache(model, ids.shape[0], tokens + max_new_tokens - 1, padding=padding)
        ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        out, new = [ids], ids
        for _ in range(max_new_tokens):
            logits = model(new, cache=cache, last_only=True)[:, -1]
            if temperature == 0.0:
                chosen = vocab_parallel_argmax(logits, vocab_size, model.group)
            else:
                logits = gather_from_group(logits, -1, vocab_size, model.group)
                drawn = sample(logits, temperature, top_p, generator)
                # One rank's draw counts: ranks may be seeded apart, and GPUs sum probabilities in changing order.
                chosen = gather_from_group(drawn.unsqueeze(0), 0, model.group.size, model.group)[0]
            if eos_id is not None:
                chosen = chosen.masked_fill(ended, eos_id)
                ended = ended | (chosen == eos_id)
            new = chosen.unsqueeze(-1).to(ids.dtype)
            out.append(new)
            if eos_id is not None and ended.all():
                break
        return torch.cat(out, dim=-1)


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, vocab_size: int, group: dist.ProcessGroup | TPGroup | None = None) -> Tensor:
    """The likeliest tokens of logits whose vocabulary is split: `torch.argmax` of the whole, without gathering it.

    One all-gather of a value and an id a rank for each token, both as float64, which holds either exactly.

    Args:
        logits: ``[..., vocabulary shard]``, floating.
        vocab_size: of the whole vocabulary, split as `tpfused.sharding` says, evenly or not. The ranks compare the
            widths of their logits when a size is new to them, as `tpfused.layers.vocabulary.whole_vocabulary` says:
            sizes that differ between ranks, but are known to each, give wrong ids.
        group: the ProcessGroup over which it is split; None: the default one.

    Returns:
        int64 ``[...]``, the same on every rank: of equal logits the lowest id.

    Raises:
        ValueError: logits of the wrong width on some rank (gathered ones, say), a vocabulary without an id.
        TypeError: logits that are not floating or of 8 bits, a vocab_size that is not an integer.
    """
    group = resolve_group(group)
    vocab_size = check_size(vocab_size, "vocab_size")
    checks.check_logits(logits, vocab_size, "vocab_parallel_argmax")
    whole_vocabulary(logits, vocab_size, group, "vocab_parallel_argmax")
    start, stop = shard_range(vocab_size, group.size, group.rank)
    if start == stop:
        best = logits.new_full((2, *logits.shape[:-1]), -torch.inf, dtype=torch.float64)
    else:
        index = logits.argmax(-1, keepdim=True)
        value = logits.gather(-1, index)
        best = torch.stack((value.squeeze(-1).double(), (index.squeeze(-1) + start).double()))
    values, ids = gather_from_group(best.unsqueeze(0), 0, group.size, group).unbind(1)
    # Of equal values the first rank's, whose ids are the lowest.
    return ids.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()


def sample(logits: Tensor, temperature: float, top_p: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draw ids ``[batch]`` from whole logits ``[batch, vocabulary]``, as `generate` says; in float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest taken off first: divided by a small temperature it might be infinite. One that is 0 in this dtype is
    # the smallest instead.
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if top_p == 1.0:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    probabilities, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    likelier = probabilities.cumsum(-1) - probabilities  # than each, together; 0 for the first, which always stays
    nucleus = probabilities.masked_fill(likelier >= top_p, 0)
    return ids.gather(-1, torch.multinomial(nucleus, 1, generator=generator)).squeeze(-1)


def _check_prompts(
    model: ParallelTransformer, ids: Tensor, max_new_tokens: int, mask: Tensor | None
) -> tuple[int, Tensor | None]:
    """-> the tokens of the prompts, and how many of each one's first are padding."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be an int64 or int32 tensor, not {checks.kind_of(ids)}")
    checks.check_dense(ids, "generate", "ids")
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"ids must be [batch, tokens], at least one of each, not of shape {tuple(ids.shape)}")
    check_size(max_new_tokens, "max_new_tokens")
    tokens, most = ids.shape[1], model.config.max_positions
    if tokens + max_new_tokens > most:
        raise ValueError(f"{tokens} tokens and {max_new_tokens} new ones are more than max_positions {most}")
    IdCheck("token ids")(ids, model.config.vocab_size, "sync")
    if mask is None:
        return tokens, None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"the mask must be a boolean tensor, not {checks.kind_of(mask)}")
    checks.check_dense(mask, "generate", "the mask")
    if mask.shape != ids.shape or mask.device != ids.device:
        raise ValueError(
            f"the mask, {tuple(mask.shape)} on {mask.device}, must be as the ids, {tuple(ids.shape)} on {ids.device}"
        )
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("the mask must be False for each prompt's first tokens only: pad prompts on the left")
    return tokens, (~mask).sum(-1)


def _check_generator(generator: torch.Generator | None, device: torch.device, temperature: float) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    if temperature and generator.device.type != device.type:
        raise ValueError(f"the generator is on {generator.device}, the ids on {device}")


def _check_sampling(temperature: float, top_p: float, eos_id: int | None, vocab_size: int) -> None:
    checks.check_number(temperature, "temperature")
    checks.check_number(top_p, "top_p")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, and finite, not {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], not {top_p}")
    if top_p < 1.0 and temperature == 0.0:
        raise ValueError(f"top_p {top_p} needs a temperature above 0: at 0 the most likely token is taken")
    if eos_id is None:
        return
    checks.check_integer(eos_id, "eos_id")
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id {eos_id} is outside a vocabulary of {vocab_size}")
