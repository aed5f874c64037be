"""Attention by torch's `scaled_dot_product_attention`.

Attention of the layers is torch's, with masks, dropout and grouped heads too: no scores are kept. But for one new token
and a cache, for which `tpfused.kernels.decode` is there, and for who wants the probabilities themselves, which
`tpfused.kernels.softmax` makes.

Which of its back ends runs is left to torch. From 2.11 on it asks cuDNN's first on Hopper and data-centre Blackwell,
which takes 275 us where flash attention takes 590 (causal, 8 heads of 128, 8192 tokens, bf16, H100), and makes a plan
for each number of tokens: its first call takes 50 ms on an H200. Where lengths change all the time,
`torch.backends.cuda.enable_cudnn_sdp(False)` may be better.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from tpfused import reference
from tpfused.explanation import MOST_TOLD, tell
from tpfused.group import TPGroup
from tpfused.kernels.launch import relaxed_capture
from tpfused.kernels.softmax import scale_mask_softmax
from tpfused.layers.backend import runs_kernels
from tpfused.random import rank_dropout


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    no_empty_rows: bool = False,
    backend: str | None = None,
) -> Tensor:
    """torch's, for grouped-query heads, with `mask` and `causal` together, and zeros for rows that attend to nothing.

    `q` ``[batch, heads, tokens, d]``, `k` and `v` ``[batch, kv_heads, keys, d]``, `mask` boolean or additive,
    broadcastable to ``[batch, heads, tokens, keys]``; `causal` for as many keys as tokens.
    `no_empty_rows`: the mask is known to leave each token something to attend to. `backend`: the layer's; on the plain
    path k and v are repeated. Equals `reference.attention_core`.
    """
    queries = q.shape[1] // k.shape[1]
    if queries > 1 and q.shape[2] == 1 and (mask is None or mask.shape[1] == 1):
        # One token, as in decoding: the heads that share a k and v are so many tokens of one head, nothing is repeated.
        rows = q.reshape(*k.shape[:2], queries, q.shape[3])
        return scaled_dot_product_attention(rows, k, v, mask, False, dropout, no_empty_rows, backend).reshape(q.shape)
    shares = mask is None and shares_heads(q, backend)
    if queries > 1 and not shares:
        k, v = k.repeat_interleave(queries, dim=1), v.repeat_interleave(queries, dim=1)
    if mask is None:
        return _attend(q, k, v, None, dropout, causal, shares=queries > 1 and shares)
    if mask.dtype != torch.bool:
        mask = mask.to(q.dtype)  # first, for a large negative number may become -inf
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        mask = mask & ~future if mask.dtype == torch.bool else mask.masked_fill(future, -torch.inf)
    if no_empty_rows:
        return _attend(q, k, v, mask, dropout, causal=False, shares=False)
    # Back ends differ on rows with nothing to attend to (zeros, the mean of v, NaN): let them attend to all, and drop
    # them.
    if mask.dtype == torch.bool:
        dead = ~mask.any(-1, keepdim=True)
        mask = mask | dead
    else:
        dead = (mask == -torch.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(dead, 0)
    out = _attend(q, k, v, mask, dropout, causal=False, shares=False)
    return out.masked_fill(dead, 0)


def attention_with_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    backend: str | None,
    group: TPGroup,
) -> tuple[Tensor, Tensor]:
    """As `scaled_dot_product_attention` with dropout of this rank's own, and what the values are weighted by, ``[batch,
    heads, tokens, keys]``: the probabilities, after dropout. The scores are kept for backward."""
    queries = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(queries, dim=1), v.repeat_interleave(queries, dim=1)
    captured = not torch.compiler.is_compiling() and q.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured:
        _make_blas_handle()
    scores, scale = q @ k.transpose(-1, -2), q.shape[-1] ** -0.5
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    why_none = "no kernel for a mask's gradient" if mask is not None and mask.requires_grad else ""
    if runs_kernels(q, backend, "softmax of attention", why_none):
        probabilities = scale_mask_softmax(scores, mask, scale, causal, dropout, group.rank)
    else:
        probabilities = reference.scale_mask_softmax(scores, mask, scale, causal)
        probabilities = rank_dropout(probabilities, dropout, group, backend) if dropout else probabilities
    out = probabilities @ v
    for result in (out, scores):  # whichever has a gradient: autograd has a thread of its own
        if captured and result.requires_grad:
            result.register_hook(_make_blas_handle)
    return out, probabilities


def _make_blas_handle(_: Tensor | None = None) -> None:
    """For torch's matmuls in a capture. A thread makes it when it first multiplies, which allocates, and captures
    forbid that; the calls before need not have, for the layers' matmuls and torch's attention have their own."""
    with relaxed_capture():
        torch.cuda.current_blas_handle()


def shares_heads(q: Tensor, backend: str | None) -> bool:
    """Whether `enable_gqa` serves queries without a mask, where several share a key and a value.

    cuDNN's and flash attention take fewer heads of k and v, on CUDA from Ampere on, in 16 bits; of torch 2.11's other
    back ends only the one that keeps all scores does.
    """
    cuda = torch.backends.cuda
    return (
        q.dtype.itemsize == 2
        and runs_kernels(q, backend)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and (cuda.cudnn_sdp_enabled() or cuda.flash_sdp_enabled())
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, shares: bool) -> Tensor:
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
