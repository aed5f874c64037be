"""The softmax of attention scores as a module, with Megatron-LM's signature and its ways to be overridden."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from tpfused import reference
from tpfused.checks import AssertedError, check_booleans, check_integer, check_number, check_tensor
from tpfused.explanation import PLAIN, tell
from tpfused.kernels.softmax import scale_mask_softmax
from tpfused.layers.backend import has_kernels, runs_kernels, why_plain

WHAT = "masked softmax"  # for `explain`


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
        attn_mask_type: Megatron's `AttnMaskType` or this module's. Only `causal` hides later keys from each query: what
            is hidden under all other types, and under `causal` with a mask and no fusion, is what the mask says.
        scaled_masked_softmax_fusion: one kernel on a GPU, plain PyTorch elsewhere, and a query that sees no key gets
            zeros. False: `mask_func` in plain PyTorch.
        mask_func: ``mask_func(scores, mask)`` returns masked scores; called without fusion only.
        softmax_in_fp32: the softmax of half-precision scores is computed in float32. Fusion always does.
        scale: of the scores; None: 1.
        window_size: ``(left, right)``: how many keys before and after its own place each query sees, whatever the mask.

    Shapes: scores ``[batch, heads, queries, keys]``; a mask (boolean, or uint8) broadcastable to them, where True is
    hidden. A single query sees all keys under `causal`, and more queries than one with another number of keys need a
    mask. A `softmax_offset` of an entry a head is the score of one more key, which has no value (an attention sink).

    `forward` calls `forward_fused_softmax` where `is_kernel_available` says so and there is no `softmax_offset`, else
    `forward_torch_softmax`; a program's subclass may override all three.

    Differs from Megatron: a kernel is there for all sizes and dtypes, and follows windows. Under fusion and `causal`
    both the mask and later keys are hidden, where Megatron's kernel hides the later keys alone and its plain PyTorch
    the mask alone. `mask_func` is not called under fusion, on a CPU neither, so that the results there are a GPU's.

    Raises:
        ValueError: both input dtypes, a scale without `softmax_in_fp32`, scores that are not four-dimensional,
            `causal` without a mask for other than square scores (these are an `AssertionError`, too), a
            `softmax_offset` of another number of entries; under fusion, a mask that is not broadcastable to the scores,
            and without it, one without a `mask_func`.
        TypeError: scores, a mask or a `softmax_offset` that is no tensor; under fusion, a mask that is neither boolean
            nor uint8; an argument of the constructor of another kind.
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
        check_booleans(FusedScaleMaskSoftmax.__init__, locals())
        if input_in_fp16 and input_in_bf16:
            raise AssertedError("input_in_fp16 and input_in_bf16 exclude each other")
        if attn_mask_type is not None and not isinstance(attn_mask_type, Enum):
            raise TypeError(f"attn_mask_type must be an AttnMaskType or None, not {attn_mask_type!r}")
        if mask_func is not None and not callable(mask_func):
            raise TypeError(f"mask_func must be a function of scores and a mask, or None, not {mask_func!r}")
        if scale is not None:
            check_number(scale, "scale")
        if window_size is not None:
            _check_window(window_size)
        if scale is not None and not softmax_in_fp32:
            raise AssertedError(f"scale {scale} wants softmax_in_fp32=True")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
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
            raise AssertedError(f"the scores must be [batch, heads, queries, keys], not of shape {tuple(input.shape)}")
        if softmax_offset is not None and softmax_offset.numel() != input.shape[1]:
            raise ValueError(f"{input.shape[1]} heads need as many softmax_offsets, not {tuple(softmax_offset.shape)}")
        if softmax_offset is None and self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask, softmax_offset)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether one kernel does it all, unless there is a `softmax_offset`: whatever the sizes, on a current GPU that
        has kernels."""
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return self.scaled_masked_softmax_fusion and has_kernels(here)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """1, for programs that ask whether sizes divide by it: the kernel takes them all."""
        return 1

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """By a kernel; where there is none for these scores, by `forward_torch_softmax`."""
        if not runs_kernels(input, what=WHAT):
            return self.forward_torch_softmax(input, mask)
        mask, causal = self._mask_and_causal(input, mask)
        seen = None if mask is None else ~_as_boolean(mask, input)
        return self._as_asked(scale_mask_softmax(input, seen, 1.0 if self.scale is None else self.scale, causal))

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """By plain PyTorch."""
        tell(WHAT, input, PLAIN, self._why_plain(input, softmax_offset))
        mask, causal = self._mask_and_causal(input, mask)
        if causal:
            mask = _later_keys(input) if mask is None else _later_keys(input) | _as_boolean(mask, input)
        plain = self._as_the_kernel if self.scaled_masked_softmax_fusion else self._by_mask_func
        return self._as_asked(plain(input, mask, softmax_offset))

    def _why_plain(self, scores: Tensor, offset: Tensor | None) -> str:
        if why := why_plain(scores, None):
            return why
        if not self.scaled_masked_softmax_fusion:
            return "scaled_masked_softmax_fusion=False"
        return "no kernel with a softmax_offset" if offset is not None else "a program called forward_torch_softmax"

    def _mask_and_causal(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor | None, bool]:
        """The mask that counts, and whether later keys are hidden, too."""
        if self.window_size is not None:
            return _outside_window(scores, *self.window_size), False
        queries, keys = scores.shape[-2:]
        # By name, for Megatron's own enumeration is another class.
        causal = getattr(self.attn_mask_type, "name", None) == "causal" and queries > 1
        if causal and queries != keys and mask is None:
            raise AssertedError(f"a causal mask needs as many queries as keys, not {queries} and {keys}")
        # A mask of padding alone is causal to Megatron's kernels, and is not to its plain PyTorch.
        causal = causal and queries == keys and (mask is None or self.scaled_masked_softmax_fusion)
        return mask, causal

    def _as_asked(self, probabilities: Tensor) -> Tensor:
        if not self.input_in_float16:
            return probabilities
        return probabilities.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)

    def _as_the_kernel(self, scores: Tensor, mask: Tensor | None, offset: Tensor | None) -> Tensor:
        mask = None if mask is None else _as_boolean(mask, scores)
        scale = 1.0 if self.scale is None else self.scale
        compute = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if offset is None:
            return reference.scale_mask_softmax(compute, None if mask is None else ~mask, scale, False).to(scores.dtype)
        compute = compute * scale
        return _softmax(compute if mask is None else compute.masked_fill(mask, -torch.inf), offset).to(scores.dtype)

    def _by_mask_func(self, scores: Tensor, mask: Tensor | None, offset: Tensor | None) -> Tensor:
        if self.softmax_in_fp32 and self.input_in_float16:
            scores = scores.float()
        if self.scale is not None:
            scores = scores * self.scale
        if mask is None:
            return _softmax(scores, offset)
        if self.mask_func is None:
            raise ValueError("a mask, without fusion, needs a mask_func")
        return _softmax(self.mask_func(scores, mask), offset)


def _check_window(window_size: tuple[int, int]) -> None:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size must be (left, right) or None, not {window_size!r}")
    for side, size in zip(("left", "right"), window_size, strict=True):
        check_integer(size, f"window_size's {side}")


def _as_boolean(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"the mask must be boolean, True is masked out, not {mask.dtype}")
    if mask.ndim > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], scores.shape[::-1], strict=False)):
        raise ValueError(f"the mask, {tuple(mask.shape)}, is not broadcastable to the scores, {tuple(scores.shape)}")
    return mask.bool()


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
