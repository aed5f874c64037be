"""Self-attention with its heads split over the ranks (Shoeybi et al., 2019, "Megatron-LM", section 3)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tpfused import checks, reference
from tpfused.collectives import copy_to_group, copy_to_replicas, own_slice
from tpfused.group import resolve_group, with_replicas
from tpfused.kernels.rotary import rotary_qkv
from tpfused.layers.backend import runs_kernels
from tpfused.layers.cache import LayerCache
from tpfused.layers.linear import PackedColumnParallelLinear, RowParallelLinear, Then, column_forward, joined
from tpfused.layers.sdpa import attention_with_probabilities, scaled_dot_product_attention
from tpfused.main_grad import into_main_grad
from tpfused.packing import QKVPacking
from tpfused.parameter import LinearParameters, check_size
from tpfused.random import has_region, rank_rng
from tpfused.sharding import divide


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query self-attention (Ainslie et al., 2023), heads split over the ranks.

    Args:
        hidden_size, num_heads: of the whole layer.
        num_kv_heads: heads of k and v, a divisor of `num_heads`; None: as many as `num_heads`.
        head_dim: None: ``hidden_size / num_heads``.
        bias: of all projections.
        causal: each token attends to itself and earlier ones.
        dropout: probability, on the attention probabilities; each rank draws its own for its heads.
        rope_theta: the base of rotary positions; None: no rotary positions.
        sequence_parallel, init_method, backend, accumulate_main_grad, save_gathered, group, mesh: as in
            `ColumnParallelLinear`.
        sequence_dim: 0 for ``[tokens, batch, hidden]``, 1 for ``[batch, tokens, hidden]``.

    Where `num_kv_heads` is a multiple of the ranks, q, k and v are one packed projection ``qkv``. Where the ranks are a
    multiple of `num_kv_heads`, ``k`` and ``v`` are projections of their own, each head's whole on the ranks that share
    it, their gradients summed over those ranks.

    Shapes: input and output ``[tokens, batch, hidden]`` or ``[batch, tokens, hidden]``, this rank's tokens under
    sequence parallelism. `mask` covers all tokens: boolean (True attends) ``[batch, keys]``, or boolean or additive,
    four-dimensional and broadcastable to ``[batch, num_heads, queries, keys]``. A token that may attend to nothing gets
    zeros from attention (and then the output projection's bias).

    Raises:
        ValueError: head counts that do not divide, a mask that does not broadcast, a cache of other sizes or where
            there can be none, and as `ColumnParallelLinear`.
        TypeError: a mask that is neither boolean nor floating, another cache than a `LayerCache`; and as
            `ColumnParallelLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        rope_theta: float | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init_method: Callable[[Tensor], object] | None = None,
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        save_gathered: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        checks.check_booleans(ParallelAttention.__init__, locals())
        super().__init__()
        self.group = resolve_group(group, mesh)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_size, num_heads, num_kv_heads, head_dim = check_heads(
            hidden_size, num_heads, num_kv_heads, head_dim, self.group.size, rope_theta is not None
        )
        checks.check_sequence_dim(sequence_dim)
        if sequence_dim not in (0, 1):
            raise ValueError(f"sequence_dim must be 0 or 1 for attention, not {sequence_dim}")
        checks.check_dropout(dropout, "dropout")
        if rope_theta is not None:
            checks.check_rope_theta(rope_theta)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.causal = causal
        self.dropout = dropout
        self.rope_theta = rope_theta
        self.sequence_parallel = sequence_parallel
        self.sequence_dim = sequence_dim
        self.backend = backend
        self.save_gathered = save_gathered

        place = {"init_method": init_method, "group": group, "mesh": mesh, "device": device, "dtype": dtype}
        parallel = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim, "backend": backend}
        parallel["accumulate_main_grad"] = accumulate_main_grad
        rows, kv_rows = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.kv_replicas = max(1, self.group.size // num_kv_heads)
        self.own_kv_heads = max(1, num_kv_heads // self.group.size)
        self.packed_children = {}
        if self.kv_replicas == 1:
            packing = QKVPacking(num_heads, num_kv_heads)
            self.packed_children["qkv"] = packing
            column = {**place, **parallel, "save_gathered": save_gathered}
            self.qkv = PackedColumnParallelLinear(hidden_size, (rows, kv_rows, kv_rows), packing, bias, **column)
            self.qkv.called = "ParallelAttention"
        else:
            shared_place = {**place, "shard_group": with_replicas(self.group, self.kv_replicas)}
            self.q = LinearParameters(hidden_size, rows, bias, 0, **place)
            self.k = LinearParameters(hidden_size, kv_rows, bias, 0, **shared_place)
            self.v = LinearParameters(hidden_size, kv_rows, bias, 0, **shared_place)
            for part in (self.q, self.k, self.v):
                part.accumulate_main_grad = accumulate_main_grad
        self.out = RowParallelLinear(rows, hidden_size, bias, **place, **parallel)
        self.out.called = "ParallelAttention"

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        total_len: int | None = None,
        cache: LayerCache | None = None,
        residual: Tensor | None = None,
        then: Then | None = None,
        return_probabilities: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`total_len`: all ranks' tokens, where they do not divide evenly under sequence parallelism.

        `cache`: attend to the tokens in it too, and add these; causal, without a mask or sequence parallelism.
        `residual`, `then`: as in `RowParallelLinear`, in the input's layout.

        `return_probabilities`: -> the output, and what each of this rank's heads weights the values by, after dropout:
        ``[batch, own heads, tokens, tokens]``; without a cache or `then`.
        """
        checks.check_tensor(x, "ParallelAttention: the input")
        if x.ndim != 3:
            raise ValueError(f"ParallelAttention: expected a three-dimensional tensor, got {tuple(x.shape)}")
        added = joined(x, self.hidden_size, residual, then, "ParallelAttention")
        if mask is not None:
            mask = self._own_mask(mask, x, total_len)
        checks.check_boolean(return_probabilities, "return_probabilities")
        if return_probabilities and (cache is not None or then is not None):
            raise ValueError("ParallelAttention: return_probabilities goes with neither a cache nor `then`")
        if cache is not None:
            self._check_cache(cache, x, mask)
        q, k, v = self._heads(self._project(x, total_len), cache)
        dropout, backend = self.dropout * self.training, self.backend
        if cache is not None:
            out = cache.attend(q, k, v, backend)
        elif return_probabilities or dropout and not has_region(self.group, x.device):
            out, probabilities = attention_with_probabilities(q, k, v, mask, self.causal, dropout, backend, self.group)
        else:
            with rank_rng(self.group, x.device) if dropout else nullcontext():
                out = scaled_dot_product_attention(q, k, v, mask, self.causal, dropout, backend=backend)
        # [batch, heads, tokens, d] -> the input's layout
        out = out.permute(2, 0, 1, 3) if self.sequence_dim == 0 else out.transpose(1, 2)
        out = out.flatten(2)
        out = self.out(out, **added)
        return (out, probabilities) if return_probabilities else out

    def _project(self, x: Tensor, total_len: int | None) -> Tensor:
        """All tokens' q, k and v of this rank's heads, rows packed by kv head; the tokens where `sequence_dim` says."""
        if self.kv_replicas == 1:
            return self.qkv(x, total_len=total_len)
        # One kv head is on this rank, so its queries, k and v one after the other are group-major already. k and v are
        # computed on every rank that shares them, each time for other queries: their gradients are partial sums.
        shared = with_replicas(self.group, self.kv_replicas)

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat((q, copy_to_replicas(k, shared), copy_to_replicas(v, shared)))

        parts = self.q, self.k, self.v
        weight = packed(*(into_main_grad(*part.weight_and_main_grad()) for part in parts))
        bias = None if self.q.bias is None else packed(*(part.local("bias") for part in parts))
        sequence_dim = self.sequence_dim if self.sequence_parallel else None
        return column_forward(
            x,
            weight,
            bias,
            self.group,
            out_features=weight.shape[0] * self.group.size,
            sequence_dim=sequence_dim,
            total_len=total_len,
            backend=self.backend,
            save_gathered=self.save_gathered,
            layer="ParallelAttention",
        )

    def _heads(self, qkv: Tensor, cache: LayerCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """-> q ``[batch, own heads, tokens, d]``, k and v ``[batch, own kv heads, tokens, d]``, positions applied."""
        split = reference.rotary_qkv
        if self.rope_theta is not None and runs_kernels(qkv, self.backend, "rotary positions"):
            split = rotary_qkv
        queries = self.num_heads // self.group.size // self.own_kv_heads
        positions = None if cache is None else cache.step.positions
        return split(qkv, queries, self.head_dim, self.rope_theta, positions, tokens_first=self.sequence_dim == 0)

    def _check_cache(self, cache: LayerCache, x: Tensor, mask: Tensor | None) -> None:
        if not isinstance(cache, LayerCache):
            raise TypeError(
                f"ParallelAttention: a layer's cache must be a LayerCache, one of KVCache.extend(tokens), not "
                f"{type(cache).__name__}: a KVCache is for the whole ParallelTransformer"
            )
        if not self.causal or self.sequence_parallel or mask is not None:
            raise ValueError(
                f"ParallelAttention: a cache needs causal=True, sequence_parallel=False and mask=None, not "
                f"{self.causal}, {self.sequence_parallel} and {'a mask' if mask is not None else None}"
            )
        batch, tokens = x.shape[1 - self.sequence_dim], x.shape[self.sequence_dim]
        of_cache = (cache.keys.shape[0], cache.step.slots.shape[0])
        if (batch, tokens) != of_cache:
            raise ValueError(f"ParallelAttention: the cache is for (batch, tokens) {of_cache}, not {(batch, tokens)}")

    def _own_mask(self, mask: Tensor, x: Tensor, total_len: int | None) -> Tensor:
        """As `scaled_dot_product_attention` wants it: four-dimensional, this rank's heads of a mask that has heads."""
        batch, tokens = x.shape[1 - self.sequence_dim], x.shape[self.sequence_dim]
        if self.sequence_parallel:
            tokens = checks.total_tokens(x, self.sequence_dim, total_len, self.group, "ParallelAttention")
        check_mask(mask, batch, self.num_heads, tokens, x.device, "ParallelAttention")
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        if mask.requires_grad:
            mask = copy_to_group(mask, self.group)  # each rank's heads give a part of a learned bias's gradient
        return own_slice(mask, 1, self.group) if mask.shape[1] > 1 else mask


def check_mask(mask: Tensor, batch: int, heads: int, tokens: int, device: torch.device, layer: str) -> None:
    """Refuse what is no mask of so many tokens, as `ParallelAttention` takes it."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{layer}: the mask must be a boolean or floating-point tensor, not {checks.kind_of(mask)}")
    checks.check_dense(mask, layer, "the mask")
    if mask.device != device:
        raise ValueError(f"{layer}: the mask is on {mask.device}, the input on {device}")
    whole = (batch, heads, tokens, tokens)
    fits = mask.ndim == 4 and all(m in (1, w) for m, w in zip(mask.shape, whole, strict=True))
    if not fits and (mask.dtype != torch.bool or mask.shape != (batch, tokens)):
        raise ValueError(
            f"{layer}: a mask of {mask.dtype} and shape {tuple(mask.shape)} is neither boolean and {(batch, tokens)}, "
            f"per key, nor four-dimensional and broadcastable to {whole}"
        )


def check_heads(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None, ranks: int, rotary: bool
) -> tuple[int, int, int, int]:
    """The four sizes, `head_dim` too. Refuses head counts that do not divide as they must, naming them."""
    hidden_size = check_size(hidden_size, "hidden_size")
    num_heads, num_kv_heads = check_size(num_heads, "num_heads"), check_size(num_kv_heads, "num_kv_heads")
    divide(num_heads, num_kv_heads, "num_heads over num_kv_heads")
    check_heads_split("ParallelAttention", num_heads, num_kv_heads, ranks)
    if head_dim is None:
        head_dim = divide(hidden_size, num_heads, "hidden_size over num_heads")
    head_dim = check_size(head_dim, "head_dim")
    if rotary and head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
    return hidden_size, num_heads, num_kv_heads, head_dim


def check_heads_split(name: str, heads: int, kv_heads: int, ranks: int) -> None:
    """Refuse ranks over which the heads of the attention called `name` cannot be split, naming the degrees that fit.

    Each rank has as many query heads, and as many key-value heads or, of fewer than ranks, one that others share.
    """

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(ranks):
        choices = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise ValueError(
            f"{name}: {heads} attention heads and {kv_heads} key-value heads cannot be split over {ranks} "
            f"tensor-parallel ranks; they can over {choices}"
        )
