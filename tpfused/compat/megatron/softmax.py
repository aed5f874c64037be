"""Megatron-LM's softmax of attention scores."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from tpfused import reference
from tpfused.checks import check_integer, check_number, check_tensor
from tpfused.kernels.softmax import scale_mask_softmax
from tpfused.layers.backend import has_kernels, runs_kernels


class AttnMaskType(Enum):
    """Megatron's kinds of attention masks."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class FusedScaleMaskSoftmax(nn.Module):
    """``softmax(mask(scale * scores))`` over the last dimension.

    Args:
        input_in_fp16, input_in_bf16: the scores are, and the result shall be, of this dtype.
        attn_mask_type: Megatron's `AttnMaskType` or this module's. The causal ones hide later keys from each query.
        scaled_masked_softmax_fusion: one kernel on a GPU, plain PyTorch elsewhere. A key is hidden by the mask, by a
            causal type, or by both; a query that sees no key gets zeros. False: `mask_func` in plain PyTorch.
        mask_func: ``mask_func(scores, mask)`` returns masked scores; called without fusion only. A causal type then
            means the mask, if there is one.
        softmax_in_fp32: the softmax of half-precision scores is computed in float32. Fusion always does.
        scale: of the scores; None: 1.
        window_size: ``(left, right)``: how many keys before and after its own place each query sees, whatever the mask.

    Shapes: scores ``[batch, heads, queries, keys]``; a boolean mask broadcastable to them, where True is hidden. A
    single query sees all keys under a causal type, and more queries than one with another number of keys need a mask.
    A `softmax_offset` of an entry a head is the score of one more key, which has no value (an attention sink); with it,
    plain PyTorch computes.

    Raises:
        ValueError: both input dtypes, a scale without `softmax_in_fp32`, neither fusion nor a `mask_func`, scores that
            are not four-dimensional, a causal type without a mask for other than square scores, a `softmax_offset` of
            another number of entries; under fusion, a mask that is not broadcastable to the scores.
        TypeError: scores, a mask or a `softmax_offset` that is no tensor; under fusion, a mask that is not boolean; an
            argument of the constructor of another kind.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ):
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16 and input_in_bf16 exclude each other")
        if attn_mask_type is not None and not isinstance(attn_mask_type, Enum):
            raise TypeError(f"attn_mask_type must be an AttnMaskType or None, not {attn_mask_type!r}")
        if mask_func is not None and not callable(mask_func):
            raise TypeError(f"mask_func must be a function of scores and a mask, or None, not {mask_func!r}")
        if scale is not None:
            check_number(scale, "scale")
        if window_size is not None:
            _check_window(window_size)
        if scale is not None and not softmax_in_fp32:
            raise ValueError(f"scale {scale} wants softmax_in_fp32=True")
        if mask_func is None and not scaled_masked_softmax_fusion:
            raise ValueError("scaled_masked_softmax_fusion=False needs a mask_func")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        check_tensor(input, "the scores")
        for given, what in ((mask, "the mask"), (softmax_offset, "softmax_offset")):
            if given is not None:
                check_tensor(given, what)
        if input.ndim != 4:
            raise ValueError(f"the scores must be [batch, heads, queries, keys], not of shape {tuple(input.shape)}")
        if softmax_offset is not None and softmax_offset.numel() != input.shape[1]:
            raise ValueError(f"{input.shape[1]} heads need as many softmax_offsets, not {tuple(softmax_offset.shape)}")
        queries, keys = input.shape[-2:]
        if self.window_size is not None:
            mask, causal = _outside_window(input, *self.window_size), False  # in place of the mask, as in Megatron
        else:
            causal = self._is_causal(mask, queries, keys)
        compute = self._fused if self.scaled_masked_softmax_fusion else self._plain
        probabilities = compute(input, mask, causal, softmax_offset)
        if self.input_in_fp16 or self.input_in_bf16:
            return probabilities.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)
        return probabilities

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether one kernel does it all, unless there is a `softmax_offset`: whatever the sizes, on a current GPU that
        has kernels."""
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return self.scaled_masked_softmax_fusion and has_kernels(here)

    def _is_causal(self, mask: Tensor | None, queries: int, keys: int) -> bool:
        # By name, for Megatron's own enumeration is another class.
        if self.attn_mask_type is None or "causal" not in self.attn_mask_type.name or queries == 1:
            return False
        if queries != keys and mask is None:
            raise ValueError(f"a causal mask needs as many queries as keys, not {queries} and {keys}")
        return queries == keys

    def _fused(self, scores: Tensor, mask: Tensor | None, causal: bool, offset: Tensor | None) -> Tensor:
        if mask is not None:
            _check_mask(mask, scores)
        seen = None if mask is None else ~mask
        scale = 1.0 if self.scale is None else self.scale
        if offset is None and runs_kernels(scores, what="masked softmax"):
            return scale_mask_softmax(scores, seen, scale, causal)
        compute = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if offset is None:
            probabilities = reference.scale_mask_softmax(compute, seen, scale, causal)
        else:
            hidden = torch.zeros((), dtype=torch.bool, device=scores.device) if mask is None else mask
            hidden = hidden | _later_keys(scores) if causal else hidden
            probabilities = _softmax((compute * scale).masked_fill(hidden, -torch.inf), offset)
        return probabilities.to(scores.dtype)

    def _plain(self, scores: Tensor, mask: Tensor | None, causal: bool, offset: Tensor | None) -> Tensor:
        if self.softmax_in_fp32 and (self.input_in_fp16 or self.input_in_bf16):
            scores = scores.float()
        if self.scale is not None:
            scores = scores * self.scale
        if mask is None and causal:
            mask = _later_keys(scores)
        return _softmax(scores if mask is None else self.mask_func(scores, mask), offset)


def _check_window(window_size: tuple[int, int]) -> None:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size must be (left, right) or None, not {window_size!r}")
    for side, size in zip(("left", "right"), window_size, strict=True):
        check_integer(size, f"window_size's {side}")


def _check_mask(mask: Tensor, scores: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"the mask must be boolean, True is masked out, not {mask.dtype}")
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], scores.shape[::-1], strict=False)):
        raise ValueError(f"the mask, {tuple(mask.shape)}, is not broadcastable to the scores, {tuple(scores.shape)}")


def _softmax(scores: Tensor, offset: Tensor | None) -> Tensor:
    """Over the keys, and over one more of the score `offset` a head, whose probability is dropped."""
    if offset is None:
        return scores.softmax(-1)
    sink = offset.to(scores).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _later_keys(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


def _outside_window(scores: Tensor, left: int, right: int) -> Tensor:
    """``[queries, keys]``, True outside; the last query's own place is the last key."""
    queries, keys = scores.shape[-2:]
    every = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    own = keys - queries
    return ~(every.triu(own - left) & every.tril(own + right))
