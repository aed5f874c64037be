"""Keys and values of the tokens so far, so that a decoding step computes its new tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpfused.checks import check_dense, kind_of
from tpfused.explanation import KERNEL, PLAIN, tell
from tpfused.kernels.decode import MOST_HEAD_DIM, MOST_HEADS, decode_attention
from tpfused.layers.backend import why_plain
from tpfused.layers.sdpa import scaled_dot_product_attention
from tpfused.parameter import check_integer, check_size

if TYPE_CHECKING:
    from tpfused.layers.transformer import ParallelTransformer


@dataclass
class Step:
    """What a call that adds some tokens to a cache tells all layers.

    Attributes:
        slots: ``[new tokens]``, where in the cache the new tokens go.
        positions: ``[batch or 1, new tokens]``, for learned and rotary positions.
        seen: the new tokens attend to the first `seen` slots, causally.
        padding: ``[batch]``, how many of each sequence's slots nothing attends to; None: none.
        masked: attention needs a mask. Without one the new tokens are the whole cache, or one token, its last.
        dtype: the model's.
    """

    slots: Tensor
    positions: Tensor
    seen: int
    padding: Tensor | None
    masked: bool
    dtype: torch.dtype
    _mask: Tensor | None = field(default=None, init=False)

    @property
    def causal(self) -> bool:
        return not (self.masked or self.seen > len(self.slots))  # a bool for sizes that torch.compile leaves open, too

    @property
    def mask(self) -> Tensor | None:
        """Additive ``[batch or 1, 1, new tokens, seen]``, with no empty row; the first layer that asks makes it."""
        # No cached_property: before Python 3.12 it takes a lock, which torch.compile knows nothing of.
        if self.masked and self._mask is None:
            self._mask = self._make_mask()
        return self._mask

    def _make_mask(self) -> Tensor:
        keys, queries = torch.arange(self.seen, device=self.slots.device), self.slots.unsqueeze(-1)
        mask = (keys <= queries).unsqueeze(0)
        if self.padding is not None:
            # Padding attends to itself: an empty row would need extra care, and no one looks at the result.
            mask = mask & (keys >= self.padding[:, None, None]) | (keys == queries)
        # Additive, as attention's back ends want it: made once, not by each layer.
        mask = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        return mask.unsqueeze(1)


@dataclass(frozen=True)
class LayerCache:
    """A layer's part of a `KVCache` during one call, which adds some tokens. `KVCache.extend` makes them.

    Attributes:
        keys, values: ``[batch, own kv heads, max_tokens, head_dim]``, written in place.
        step: what is the same for all layers.
    """

    keys: Tensor
    values: Tensor
    step: Step

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        """Keep the new tokens' k and v, ``[batch, own kv heads, new tokens, d]``; -> what their queries
        ``[batch, own heads, new tokens, d]`` see in the cache, shaped like these."""
        step = self.step
        if self._decodes(q, backend):
            return decode_attention(q, k, v, self.keys, self.values, step.slots, step.seen, step.padding)
        for kept, new in ((self.keys, k), (self.values, v)):
            kept.index_copy_(2, step.slots, new.to(kept.dtype))
        k, v = self.keys[:, :, : step.seen].to(k.dtype), self.values[:, :, : step.seen].to(v.dtype)
        return scaled_dot_product_attention(q, k, v, step.mask, step.causal, 0.0, no_empty_rows=True, backend=backend)

    def _decodes(self, q: Tensor, backend: str | None) -> bool:
        """Whether the kernel for one token runs."""
        if q.shape[2] != 1 or torch.compiler.is_compiling():
            return False
        why = why_plain(q, backend) or self._why_no_kernel(q)
        tell("attention to a cache", q, PLAIN if why else KERNEL, why)
        return not why

    def _why_no_kernel(self, q: Tensor) -> str:
        """Empty in 16 bits, as tensor cores multiply, and for few heads."""
        if self.keys.shape[:2].numel() > MOST_HEADS:
            return f"faster for more than {MOST_HEADS} sequences x key-value heads"
        if q.shape[3] <= MOST_HEAD_DIM and q.dtype.itemsize == 2 and q.dtype == self.keys.dtype:
            return ""
        own, kept = (str(x.dtype).removeprefix("torch.") for x in (q, self.keys))
        return f"no kernel for {own} heads of {q.shape[3]} with a cache of {kept}"


class KVCache:
    """Keys and values of this rank's kv heads, for ``model(ids, cache=cache)``.

    Args:
        model: a causal `ParallelTransformer`; the cache gets its device. Calls of another model are refused where its
            config or number of ranks is another; one of the same config would read what this one has cached.
        batch: how many sequences.
        max_tokens: room for so many tokens of each, at most the model's `max_positions`.
        padding: int64 or int32 ``[batch]``: how many of each sequence's first tokens are padding, which nothing attends
            to and which positions do not count; None: none. Prompts of different lengths end together that way.
        dtype: None: the model's.

    `keys` and `values` are ``[layers, batch, own kv heads, max_tokens, head_dim]``; a kv head that several ranks share
    is on each of them.

    `length` counts the tokens that are cached. Each call of the model adds its own; set it to go back (0 starts anew).
    What lies behind is not attended to: zeros, or tokens of before until others take their places.
    A call can be captured in a CUDA graph: it reads the length from the device, attends to the whole cache under a
    mask, and leaves the length as it is: after each replay, ``cache.length += 1``. With ``cache.fixed = True`` calls
    outside attend like that as well: what is to be captured has to run so once before, for a kernel that is new in a
    capture may break it off.

    Raises:
        ValueError: a model that is not causal, sizes that do not fit, a length outside ``[0, max_tokens]``.
        TypeError: something else than a `ParallelTransformer`; sizes, padding or a length that are not integers; a
            dtype that is not floating-point.
    """

    def __init__(
        self,
        model: ParallelTransformer,
        batch: int,
        max_tokens: int,
        *,
        padding: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):
        _check_model(model)
        config = model.config
        batch = check_size(batch, "batch")
        max_tokens = check_size(max_tokens, "max_tokens")
        if not config.causal:
            raise ValueError("a cache is for causal attention: with causal=False new tokens change those before them")
        if max_tokens > config.max_positions:
            raise ValueError(f"max_tokens {max_tokens} is more than max_positions {config.max_positions}")
        weight, attention = model.embedding.local("weight"), model.blocks[0].attention
        if padding is not None:
            _check_padding(padding, batch, max_tokens, weight.device)
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise TypeError(f"a cache's dtype must be a floating-point torch.dtype of at least 16 bits, not {dtype!r}")
        self.config, self.ranks, self._dtype = config, model.group.size, weight.dtype
        self.batch = batch
        self.max_tokens = max_tokens
        shape = config.num_layers, batch, attention.own_kv_heads, max_tokens, attention.head_dim
        # A cache lives on after the block that it was made in, and a tensor of inference mode can't be changed outside.
        with torch.inference_mode(False):
            self.padding = None if padding is None else padding.clone(memory_format=torch.contiguous_format).long()
            # Not uninitialised: what is masked still counts zero times its value, and zero times NaN is NaN.
            self.keys, self.values = (
                torch.zeros(shape, dtype=dtype or weight.dtype, device=weight.device) for _ in range(2)
            )
            self._device_length = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.fixed = False
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        tokens = check_integer(tokens, "a cache's length")
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"a cache of max_tokens {self.max_tokens} cannot hold {tokens} tokens")
        if torch.compiler.is_compiling():
            _set_length(self._device_length, tokens)
        else:
            self._device_length.fill_(tokens)
        self._length = tokens  # last: what the device is refused is not counted

    def extend(self, tokens: int) -> list[LayerCache]:
        """What each layer needs to add `tokens` tokens. The length stays: `added` raises it when all layers have.

        Raises:
            ValueError: there is no room for them, or there are none.
        """
        tokens = check_size(tokens, "tokens to add to a cache")
        if self._length + tokens > self.max_tokens:
            raise ValueError(
                f"{self._length} cached and {tokens} new tokens are more than the cache's max_tokens {self.max_tokens}"
            )
        fixed = self.fixed or self.captured()
        seen = self.max_tokens if fixed else self._length + tokens
        slots = self._device_length + torch.arange(tokens, device=self.keys.device)
        positions = slots.unsqueeze(0)
        if self.padding is not None:
            positions = (positions - self.padding.unsqueeze(-1)).clamp(min=0)
        # Without a mask faster kernels run: they know of causal attention among the first tokens, and one token that
        # comes last sees all.
        masked = fixed or self.padding is not None or self._length > 0 and tokens > 1
        step = Step(slots, positions, seen, self.padding, masked, self._dtype)
        return [LayerCache(keys, values, step) for keys, values in zip(self.keys, self.values, strict=True)]

    def added(self, tokens: int) -> None:
        """All layers have added `tokens`. In a graph this would happen once, at the capture: there the user does it."""
        if not self.captured():
            self.length += tokens

    def captured(self) -> bool:
        """Whether a CUDA graph is being captured: shapes and numbers of the host are for all its replays then."""
        # Compiled code would hold the answer, and not each torch lets it ask; `_set_length` does.
        return self.keys.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()

    def check(self, model: ParallelTransformer, ids: Tensor) -> None:
        """Refuse `ids` ``[batch, tokens]`` that are not for this cache, and a model that it was not made for."""
        if (self.config, self.ranks) != (model.config, model.group.size):
            raise ValueError(
                f"the cache was made for {self.config} on {self.ranks} ranks, "
                f"not for {model.config} on {model.group.size}"
            )
        if ids.shape[0] != self.batch:
            raise ValueError(f"the cache is for a batch of {self.batch}, not for ids of shape {tuple(ids.shape)}")
        if model.training or torch.is_grad_enabled():
            raise ValueError(
                "a cache is for inference: call model.eval(), and the model under torch.inference_mode() or no_grad()"
            )


@torch.library.custom_op("tpfused::set_length", mutates_args=("length",), tags=(torch.Tag.cudagraph_unsafe,))
def _set_length(length: Tensor, tokens: int) -> None:
    """For compiled code, of which a CUDA graph would set the same length with each replay."""
    if length.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a compiled model's call with a KVCache cannot be captured in a CUDA graph: capture the model itself"
        )
    length.fill_(tokens)


@contextmanager
def with_attributes(module: nn.Module, **values: object) -> Iterator[None]:
    """Inside, `module` and all modules in it that have attributes of these names have these values."""
    # Of their own: a wrapper may give those of what it wraps, and would keep what it is given to itself.
    before = [(part, name, vars(part)[name]) for part in module.modules() for name in values if name in vars(part)]
    try:
        for part, name, _ in before:
            setattr(part, name, values[name])
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def _check_model(model: nn.Module) -> None:
    from tpfused.layers.transformer import ParallelTransformer  # which needs this module

    compiled = getattr(model, "_orig_mod", model)  # torch.compile's wrapper has the attributes of what it wraps
    if not isinstance(compiled, ParallelTransformer):
        raise TypeError(f"a KVCache is for a ParallelTransformer, not for {type(model).__name__}")


def _check_padding(padding: Tensor, batch: int, max_tokens: int, device: torch.device) -> None:
    if not isinstance(padding, Tensor) or padding.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"padding must be an int64 or int32 tensor, not {kind_of(padding)}")
    check_dense(padding, "KVCache", "the padding")
    if padding.shape != (batch,):
        raise ValueError(f"padding must have shape ({batch},), not {tuple(padding.shape)}")
    if padding.device != device:
        raise ValueError(f"the padding is on {padding.device}, the model on {device}")
    least, most = (int(value) for value in padding.aminmax())
    if least < 0 or most >= max_tokens:
        raise ValueError(f"padding from {least} to {most} does not fit a cache of max_tokens {max_tokens}")
