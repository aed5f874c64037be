"""Which of torch's back ends attention runs by.

All attention of the layers is torch's `scaled_dot_product_attention`, with masks, dropout and grouped heads too: no
scores are kept. `tpfused.kernels.softmax` is for who wants the probabilities themselves, which no layer returns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpfused.overlap.explain import MOST_TOLD, tell

ORDER = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
LEAST_TOKENS = 512  # not measured: below, the host's time should decide


def cudnn_first(q: Tensor, k: Tensor) -> AbstractContextManager:
    """Within it, torch asks cuDNN's attention first, then flash attention: 275 us where flash takes 590 (causal, 8
    heads of 128, 8192 tokens, bf16, H100). A back end that cannot do a shape, or that the caller has switched off, is
    passed over; an order that the caller has set stays.

    `q` ``[batch, heads, tokens, d]``, `k` ``[batch, kv heads, keys, d]``. With other keys than queries, as in decoding,
    the order is torch's: cuDNN makes a plan for each number of keys.
    """
    tokens = q.shape[2]
    if not q.is_cuda or q.dtype.itemsize != 2 or tokens != k.shape[2] or tokens < LEAST_TOKENS:
        return nullcontext()
    return sdpa_kernel(_enabled(), set_priority=True) if torch.compiler.is_compiling() else _CUDNN_FIRST


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, shares: bool) -> Tensor:
    """torch's `scaled_dot_product_attention`; `explain` is told which back end that takes. `shares`: `enable_gqa`."""
    if type(q) is Tensor and not torch.compiler.is_compiling():
        kind = (
            q.dtype, q.device, q.requires_grad, q.shape[1], k.shape[1], q.shape[3],
            q.shape[2].bit_length(), k.shape[2].bit_length(), mask is None, dropout > 0, causal,
        )  # fmt: skip
        if kind not in _told and len(_told) < MOST_TOLD:
            _told.add(kind)
            chosen = torch._fused_sdp_choice(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=shares
            )
            by = SDPBackend(chosen).name.lower().removesuffix("_attention") + " (torch)"
            tell("attention", q, by, _described(q, k, mask, dropout, causal))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=shares
    )


_told: set[tuple] = set()


def _described(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> str:
    heads = f"{q.shape[1]} heads" if q.shape[1] == k.shape[1] else f"{q.shape[1]} heads, {k.shape[1]} of keys"
    options = {"causal": causal, "mask": mask is not None, "dropout": dropout > 0}
    sizes = f"{heads} of {q.shape[3]}, {q.shape[2]:,} tokens on {k.shape[2]:,}"
    return ", ".join([sizes, *(name for name, is_on in options.items() if is_on)])


class _CudnnFirst:
    """`sdpa_kernel` without its 20 us of host time: only the order is set."""

    def __init__(self):
        self.usual = torch._C._get_sdp_priority_order()
        first = [int(backend) for backend in ORDER]
        self.wanted = first + [backend for backend in self.usual if backend not in first]

    def __enter__(self) -> None:
        if torch._C._get_sdp_priority_order() == self.usual:
            torch._C._set_sdp_priority_order(self.wanted)

    def __exit__(self, *exception) -> None:
        if torch._C._get_sdp_priority_order() == self.wanted:
            torch._C._set_sdp_priority_order(self.usual)


@torch.compiler.assume_constant_result
def _enabled() -> list[SDPBackend]:
    """Those that the caller has not switched off, when its code is compiled."""
    cuda = torch.backends.cuda
    asked = cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled
    return [backend for backend, is_on in zip(ORDER, asked, strict=True) if is_on()]


_CUDNN_FIRST = _CudnnFirst()
