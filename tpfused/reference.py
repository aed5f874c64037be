"""Every layer in plain PyTorch, dense and sharded: readable, slow, the definition of right.

The sharded functions (first half) are the plain path that the layers run. The dense ones (second half) are what a model
on one device computes; tests compare the two, and later kernels with both. Names carry the shard: the lower-case letter
is the axis that is split (m tokens, k input features, n output features, v vocabulary).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused import collectives
from tpfused.collectives import (
    all_gather_tokens,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_tokens,
    scatter_to_group,
)
from tpfused.sharding import shard_range

# Pieces that are the same dense and sharded.


def activate(x: Tensor, activation: str | None) -> Tensor:
    """`activation` is None, "gelu" (erf; Hendrycks and Gimpel, 2016), "gelu_tanh" (its tanh form), "relu" or "silu"."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "silu":
        return F.silu(x)
    return x


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of a packed ``[..., 2F]``, gate and up alternating: SwiGLU, GEGLU (Shazeer, 2020)."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return activate(gate, activation) * up


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al., 2021, eq. 34) in the half-split form of LLaMA.

    `x` is ``[..., tokens, head_dim]``, `positions` ``[tokens]`` or broadcastable to ``[..., tokens]``. Angles are
    computed and applied in float32 (float64 for float64 input); the result has `x`'s dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=x.device, dtype=compute) / half)
    angles = positions.to(compute).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(compute).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_qkv(
    qkv: Tensor,
    queries: int,
    head_dim: int,
    theta: float | None,
    positions: Tensor | None = None,
    tokens_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A packed projection's heads: q ``[batch, heads, tokens, d]``, k and v ``[batch, kv_heads, tokens, d]``, the first
    two with `rotary` positions, unless `theta` is None.

    `qkv` is ``[batch, tokens, kv_heads * (queries + 2) * head_dim]``, or ``[tokens, batch, ...]`` with `tokens_first`:
    for each key-value head its queries, its key and its value. `positions` is ``[batch or 1, tokens]``; None: 0, 1, ...
    """
    if tokens_first:
        qkv = qkv.transpose(0, 1)
    heads = qkv.unflatten(-1, (-1, queries + 2, head_dim))
    # A split, for the gradients of slices would be filled up with zeros, each to the size of the whole, and added.
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in heads.split((queries, 1, 1), dim=3))
    if theta is None:
        return q, k, v
    positions = torch.arange(qkv.shape[1], device=qkv.device) if positions is None else positions.unsqueeze(1)
    return rotary(q, positions, theta), rotary(k, positions, theta), v


def normalize(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`kind` "layernorm" (Ba et al., 2016) or "rmsnorm" (Zhang and Sennrich, 2019) over the last dimension."""
    if kind == "layernorm":
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


# Sharded: the plain path.


def column_parallel_linear(
    x: Tensor,
    w_shard_n: Tensor,
    b_shard_n: Tensor | None,
    group,
    *,
    activation: str | None = None,
    gather_features: int | None = None,
    sequence_dim: int | None = None,
    total_len: int | None = None,
) -> Tensor:
    """``act(x @ w.T + b)``, output features split.

    forward: x whole on each rank, or x_shard_m all-gathered along `sequence_dim` to `total_len` tokens;
             y_shard_n, or y all-gathered to `gather_features`.
    dgrad:   dx all-reduced, or reduce-scattered along `sequence_dim`.
    wgrad, dbias: local.
    saved:   the whole x, the weight, the pre-activation.
    """
    x = _cast_for_autocast(x)
    if sequence_dim is None:
        x = copy_to_group(x, group)
    else:
        x = all_gather_tokens(x, sequence_dim, total_len, group)
    y_shard_n = activate(F.linear(x, w_shard_n, b_shard_n), activation)
    if gather_features is None:
        return y_shard_n
    return gather_from_group(y_shard_n, -1, gather_features, group)


def row_parallel_linear(
    x_shard_k: Tensor,
    w_shard_k: Tensor,
    bias: Tensor | None,
    group,
    *,
    input_is_parallel: bool = True,
    sequence_dim: int | None = None,
) -> Tensor:
    """``x @ w.T + b``, input features split; the bias is added once, after the reduction.

    forward: partial sums all-reduced, or reduce-scattered along `sequence_dim`.
    dgrad:   dy as it is, or dy_shard_m all-gathered; then local.
    wgrad:   local.  dbias: local; under sequence parallelism a partial sum, which the caller's bias reduces.
    saved:   x_shard_k, the weight.
    """
    if not input_is_parallel:
        x_shard_k = scatter_to_group(x_shard_k, -1, group)
    partial = F.linear(x_shard_k, w_shard_k)
    if sequence_dim is None:
        out = reduce_from_group(partial, group)
    else:
        out = reduce_scatter_tokens(partial, sequence_dim, group)
    return out if bias is None else out + bias.to(out.dtype)


def vocab_parallel_embedding(
    ids: Tensor,
    w_shard_v: Tensor,
    num_embeddings: int,
    group,
    *,
    padding_idx: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Rows of a table whose vocabulary is split; each id is looked up by its owner and is zero elsewhere.

    forward: partial (owned) rows all-reduced, or reduce-scattered along `sequence_dim`.
    wgrad:   dy as it is, or all-gathered; then local. `padding_idx` is a global id and gets no gradient.
    saved:   the ids.
    """
    start, stop = shard_range(num_embeddings, group.size, group.rank)
    owned = (ids >= start) & (ids < stop)
    if start == stop:
        # An empty shard still takes part, and its weight still gets its (empty) gradient.
        rows = w_shard_v.new_zeros(*ids.shape, w_shard_v.shape[1]) + w_shard_v.sum()
    else:
        local_padding = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
        rows = F.embedding(torch.where(owned, ids - start, 0), w_shard_v, local_padding)
        rows = rows.masked_fill(~owned.unsqueeze(-1), 0)
    if sequence_dim is None:
        return reduce_from_group(rows, group)
    return reduce_scatter_tokens(rows, sequence_dim, group)


def vocab_parallel_cross_entropy(
    logits_shard_v: Tensor,
    target: Tensor,
    vocab_size: int,
    group,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Per-token cross entropy, float32 (float64 for float64 logits), of logits whose vocabulary is split.

    forward: one all-reduce of the maximum, one of (sum of exponentials, target logit, sum of logits).
    dgrad:   local.
    saved:   the float32 logits below the maximum, and their exponentials.

    An ignored token's loss is 0; one with a label outside the vocabulary is NaN.
    """
    logits = logits_shard_v.to(torch.promote_types(logits_shard_v.dtype, torch.float32))
    start, stop = shard_range(vocab_size, group.size, group.rank)
    top = logits.detach().amax(-1) if stop > start else logits.new_full(target.shape, -torch.inf)
    top = collectives.all_reduce(top, group, dist.ReduceOp.MAX)

    logits = logits - top.unsqueeze(-1)
    owned = (target >= start) & (target < stop)
    if stop > start:
        own_logit = logits.gather(-1, torch.where(owned, target - start, 0).unsqueeze(-1)).squeeze(-1)
        own_logit = own_logit.masked_fill(~owned, 0)
    else:
        own_logit = logits.sum(-1)
    sums = torch.stack((logits.exp().sum(-1), own_logit, logits.sum(-1)))
    exp_sum, target_logit, logit_sum = reduce_from_group(sums, group).unbind()
    loss = exp_sum.log() - target_logit
    if label_smoothing:
        # Szegedy et al., 2016 (section 7), as F.cross_entropy has it.
        loss = (1 - label_smoothing) * loss + label_smoothing * (exp_sum.log() - logit_sum / vocab_size)
    if z_loss:
        # PaLM (Chowdhery et al., 2022, section 5).
        loss = loss + z_loss * (exp_sum.log() + top).square()
    outside = (target < 0) | (target >= vocab_size)
    return loss.masked_fill(outside, torch.nan).masked_fill(target == ignore_index, 0)


def reduce_loss(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """ "none", "sum", or "mean" over the tokens that are not ignored (NaN when all are, as in `F.cross_entropy`)."""
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of a matmul's input on `x`'s device; None where it is off, or not to be had (meta)."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _cast_for_autocast(x: Tensor) -> Tensor:
    """What autocast would do to a matmul's input, done before the collective: half the bytes to move."""
    dtype = autocast_dtype(x)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


# Dense: one device, whole weights by their unpacked names, `[batch, tokens, hidden]` throughout.


def scale_mask_softmax(
    scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool | str = False
) -> Tensor:
    """``softmax(scores * scale + mask)`` over the last dimension; rows with nothing to attend to give zeros.

    `mask` is boolean (True attends) or additive; `causal` True or "top_left" lets query i see keys 0..i, "bottom_right"
    the last query all keys.
    """
    scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        queries, keys = scores.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~seen.tril(keys - queries if causal == "bottom_right" else 0), -torch.inf)
    masked_row = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(masked_row, 0).softmax(-1).masked_fill(masked_row, 0)


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """``softmax(q @ k.T * scale + mask) @ v`` (Vaswani et al., 2017, eq. 1); rows with nothing to attend to give zeros.

    `q` is ``[batch, heads, queries, d]``, `k` and `v` ``[batch, kv_heads, keys, d]``, heads a multiple of kv_heads;
    `mask` is broadcastable to ``[batch, heads, queries, keys]``; mask and `causal` as in `scale_mask_softmax`; `scale`
    defaults to ``d ** -0.5``.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return scale_mask_softmax(q @ k.transpose(-1, -2), mask, scale, causal) @ v


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy` over the last dimension, with a z-loss."""
    loss = F.cross_entropy(
        logits.flatten(0, -2),
        target.flatten(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view_as(target)
    loss = loss + z_loss * logits.logsumexp(-1).square().masked_fill(target == ignore_index, 0)
    return reduce_loss(loss, target, ignore_index, reduction)


class Weights:
    """A view of a state dict below a prefix: ``weights("mlp.fc1", x)`` applies the linear layer of that name."""

    def __init__(self, state: dict[str, Tensor], prefix: str = ""):
        self.state, self.prefix = state, prefix

    def below(self, name: str) -> Weights:
        return Weights(self.state, f"{self.prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor | None:
        return self.state.get(self.prefix + name)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])


def mlp(x: Tensor, weights: Weights, activation: str) -> Tensor:
    return weights("fc2", activate(weights("fc1", x), activation))


def gated_mlp(x: Tensor, weights: Weights, activation: str) -> Tensor:
    return weights("down", activate(weights("gate", x), activation) * weights("up", x))


def attention(
    x: Tensor,
    weights: Weights,
    num_heads: int,
    num_kv_heads: int,
    *,
    causal: bool,
    rope_theta: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention (Ainslie et al., 2023); `rope_theta` None means no rotary positions."""
    q = weights("q", x).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    k = weights("k", x).unflatten(-1, (num_kv_heads, -1)).transpose(1, 2)
    v = weights("v", x).unflatten(-1, (num_kv_heads, -1)).transpose(1, 2)
    if rope_theta is not None:
        positions = torch.arange(x.shape[1], device=x.device)
        q, k = rotary(q, positions, rope_theta), rotary(k, positions, rope_theta)
    return weights("out", attention_core(q, k, v, mask, causal).transpose(1, 2).flatten(2))


def transformer(ids: Tensor, state: dict[str, Tensor], config, mask: Tensor | None = None) -> Tensor:
    """Logits ``[batch, tokens, vocabulary]`` of a `TransformerConfig`'s model with the weights of a full state dict."""
    weights = Weights(state)
    x = F.embedding(ids, weights["embedding.weight"])
    if config.positions == "learned":
        x = x + weights["positions.weight"][: ids.shape[1]]

    def norm(x: Tensor, at: Weights, name: str) -> Tensor:
        return normalize(x, config.norm, at[f"{name}.weight"], at[f"{name}.bias"], config.norm_eps)

    for index in range(config.num_layers):
        block = weights.below(f"blocks.{index}")
        x = x + attention(
            norm(x, block, "attention_norm"),
            block.below("attention"),
            config.num_heads,
            config.num_kv_heads or config.num_heads,
            causal=config.causal,
            rope_theta=config.rope_theta if config.positions == "rotary" else None,
            mask=mask,
        )
        feed_forward = gated_mlp if config.gated else mlp
        x = x + feed_forward(norm(x, block, "mlp_norm"), block.below("mlp"), config.activation)
    x = norm(x, weights, "norm")
    return F.linear(x, weights["embedding.weight" if config.tie_embeddings else "head.weight"], weights["head.bias"])
