"""A whole Transformer, GPT or LLaMA style, from one config."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpfused import checks, generation
from tpfused.collectives import own_slice
from tpfused.explanation import PLAIN, tell
from tpfused.group import TPGroup, resolve_group
from tpfused.layers.attention import ParallelAttention, check_heads, check_mask
from tpfused.layers.cache import KVCache, LayerCache, with_attributes
from tpfused.layers.embedding import VocabParallelEmbedding
from tpfused.layers.linear import ColumnParallelLinear, RowParallelLinear, column_forward
from tpfused.layers.loss import OPTIONS, check_options, check_target, vocab_parallel_cross_entropy
from tpfused.layers.mlp import ParallelGatedMLP, ParallelMLP, check_gates
from tpfused.layers.norm import Norm
from tpfused.overlap.matmul_all_reduce import NORM_OF_SUM
from tpfused.overlap.plans import NORM_KINDS
from tpfused.overlap.tiers import recomputed_alike
from tpfused.parameter import ParallelModule, check_size, local
from tpfused.random import rank_dropout


@dataclass(frozen=True)
class TransformerConfig:
    """The shape and style of a `ParallelTransformer`.

    Attributes:
        vocab_size, hidden_size, num_layers, num_heads, ffn_size, max_positions: sizes.
        num_kv_heads, head_dim: as in `ParallelAttention`.
        positions: "learned" (a table of `max_positions`) or "rotary" (base `rope_theta`).
        norm, norm_eps: "layernorm" or "rmsnorm", before attention, before the feed-forward layer, and at the end.
        activation, gated: of the feed-forward layer; `gated` selects SwiGLU ("silu") or GEGLU ("gelu").
        bias: of every projection, the untied head's included.
        tie_embeddings: the head uses the embedding's weight and has no bias.
        causal: each token attends to itself and earlier ones only.
        dropout, attention_dropout: probabilities.
        sequence_parallel: between the blocks' matmuls each rank holds its own tokens only.
        sequence_dim: 0 keeps activations as ``[tokens, batch, hidden]``, 1 as ``[batch, tokens, hidden]``. Not visible
            outside.
        init: "default" (`nn.Linear`'s) or "xavier": Xavier-uniform on each projection's whole shape, zero biases
            (Glorot and Bengio, 2010). Embeddings and positions are normal(0, 1).
        accumulate_main_grad: of every projection and the embedding, as in `ColumnParallelLinear`.
        save_gathered: under sequence parallelism, of the blocks' column-parallel layers, as in `ColumnParallelLinear`.
        checkpoint_activations: recompute each block in backward instead of keeping its activations.
        backend: of every layer and the loss, as in `ColumnParallelLinear`: "reference" forces the plain path.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    positions: str = "learned"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    tie_embeddings: bool = False
    causal: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rope_theta: float = 10000.0
    sequence_parallel: bool = False
    sequence_dim: int = 0
    init: str = "default"
    accumulate_main_grad: bool = False
    save_gathered: bool = False
    checkpoint_activations: bool = False
    backend: str | None = None

    @classmethod
    def gpt(cls, **fields: Any) -> TransformerConfig:
        """GPT style: learned positions, LayerNorm, GELU, biases."""
        return cls(**fields)

    @classmethod
    def llama(cls, **fields: Any) -> TransformerConfig:
        """LLaMA style: rotary positions, RMSNorm, SwiGLU, no biases."""
        style = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False}
        return cls(**(style | fields))

    def check(self, ranks: int = 1) -> None:
        """Refuse what cannot be built on `ranks` tensor-parallel ranks.

        Raises:
            ValueError: names the numbers.
            TypeError: sizes that are not integers, probabilities that are not numbers, switches that are neither True
            nor False.
        """
        checks.check_booleans(TransformerConfig, vars(self))
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size", "max_positions"):
            check_size(getattr(self, name), name)
        _check_choice("positions", self.positions, ("learned", "rotary"))
        _check_choice("norm", self.norm, NORM_KINDS)
        _check_choice("init", self.init, ("default", "xavier"))
        _check_choice("sequence_dim", self.sequence_dim, (0, 1))
        checks.check_backend(self.backend)
        checks.check_eps(self.norm_eps, "norm_eps")
        for name in ("dropout", "attention_dropout"):
            checks.check_dropout(getattr(self, name), name)
        if self.gated:
            check_gates(self.ffn_size, self.activation, ranks)
        else:
            checks.check_activation(self.activation)
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        checks.check_rope_theta(self.rope_theta)
        check_heads(self.hidden_size, self.num_heads, kv_heads, self.head_dim, ranks, self.positions == "rotary")


class PositionEmbedding(ParallelModule):
    """A learned vector a position, the table whole on each rank."""

    def __init__(self, max_positions: int, hidden_size: int, *, sequence_parallel: bool, group, mesh, device, dtype):
        super().__init__(group, mesh)
        self.sequence_parallel = sequence_parallel
        self.new_parameter("weight", (max_positions, hidden_size), device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(local(self.weight))

    def forward(self, tokens: int, cache: LayerCache | None = None) -> Tensor:
        """``[1, tokens, hidden]``, or this rank's tokens of them; ``[batch, tokens, hidden]`` with a padded cache."""
        rows = self.replicated("weight", sharded_tokens=self.sequence_parallel)
        if cache is not None:
            return F.embedding(cache.step.positions, rows)
        rows = rows[:tokens]
        return (own_slice(rows, 0, self.group) if self.sequence_parallel else rows).unsqueeze(0)


class ParallelTransformerBlock(nn.Module):
    """A pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Shapes: ``[tokens, batch, hidden]`` (``[batch, tokens, hidden]`` with ``config.sequence_dim`` 1) in and out, this
    rank's tokens under sequence parallelism. `mask` as in `ParallelAttention`. ``with tpfused.tier("reference"):``
    around a call forces the plain path.
    """

    def __init__(self, config: TransformerConfig, *, group=None, mesh=None, device=None, dtype=None):
        super().__init__()
        self.group = resolve_group(group, mesh)
        _check_config(config, self.group)
        self.config = config
        place = {"group": group, "mesh": mesh, "device": device, "dtype": dtype}
        place["sequence_parallel"] = config.sequence_parallel
        parallel = {**place, "sequence_dim": config.sequence_dim, "init_method": _init_method(config)}
        parallel |= {"accumulate_main_grad": config.accumulate_main_grad, "backend": config.backend}
        parallel["save_gathered"] = config.save_gathered
        self.attention_norm = Norm(config.norm, config.hidden_size, config.norm_eps, **place)
        self.attention = ParallelAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.bias,
            causal=config.causal,
            dropout=config.attention_dropout,
            rope_theta=config.rope_theta if config.positions == "rotary" else None,
            **parallel,
        )
        self.mlp_norm = Norm(config.norm, config.hidden_size, config.norm_eps, **place)
        feed_forward = ParallelGatedMLP if config.gated else ParallelMLP
        self.mlp = feed_forward(config.hidden_size, config.ffn_size, config.activation, config.bias, **parallel)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        total_len: int | None = None,
        cache: LayerCache | None = None,
        normed: Tensor | None = None,
        following: Norm | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`total_len`, `cache`: as in `ParallelAttention`.

        `normed`, `following`: for a decoding step, ``attention_norm(x)`` and the norm that comes after this block: ->
        its result, and that normalised, for each of the block's two sums goes with a norm into an all-reduce.
        """
        if normed is not None or following is not None:
            if normed is None or following is None or mask is not None or total_len is not None:
                raise ValueError("ParallelTransformerBlock: normed and following go together, without mask, total_len")
            x, normed = self.attention(normed, cache=cache, then=(x, self.mlp_norm))
            return self.mlp(normed, then=(x, following))
        if self._joins_residuals():
            x = self.attention(self.attention_norm(x), mask, total_len=total_len, cache=cache, residual=x)
            return self.mlp(self.mlp_norm(x), total_len=total_len, residual=x)
        attended = self.attention(self.attention_norm(x), mask, total_len=total_len, cache=cache)
        x = x + hidden_dropout(attended, self.config, self.group, self.training)
        fed = self.mlp(self.mlp_norm(x), total_len=total_len)
        return x + hidden_dropout(fed, self.config, self.group, self.training)

    def _joins_residuals(self) -> bool:
        """Whether the sums of the ranks' parts take the residuals too: where nobody sees what is between."""
        if self.config.dropout and self.training or torch.compiler.is_compiling():  # compilers fuse it themselves
            return False
        return self._has_untouched_sums()

    def _has_untouched_sums(self) -> bool:
        """Whether what is around the two sums of the ranks' parts is as it was built."""
        mlp, row = (ParallelGatedMLP, "down") if self.config.gated else (ParallelMLP, "fc2")
        return (
            _is_untouched(self.attention, ParallelAttention)
            and _is_untouched(self.attention.out, RowParallelLinear)
            and _is_untouched(self.mlp, mlp)
            and _is_untouched(getattr(self.mlp, row), RowParallelLinear)
        )


class ParallelTransformer(nn.Module):
    """Embedding, blocks, final norm and vocabulary head, as `config` says.

    Shapes: int64 ids ``[batch, tokens]``, whole on each rank; logits ``[batch, tokens, vocabulary shard]``. `mask` as
    in `ParallelAttention`.

    Its layers run the fastest way measured; ``with tpfused.tier("reference"):`` around a call forces the plain path.

    With a `KVCache`, ids are the tokens that follow those in it (a prompt, several tokens, or one), and are added to
    it. `last_only` then gives the last token's logits alone, ``[batch, 1, vocabulary shard]``. Such calls do without
    sequence parallelism, which has no use for single tokens: the weights are the same.

    Raises:
        ValueError: sizes that cannot be split over the ranks, more tokens than `max_positions`, ids outside the
        vocabulary; a cache that is full, or made for another config, number of ranks or batch, or used with
        gradients or a mask.
        TypeError: a config that is no `TransformerConfig`, a cache that is no `KVCache`, ids that are no tensor.
    """

    generate = generation.generate

    def __init__(self, config: TransformerConfig, *, group=None, mesh=None, device=None, dtype=None):
        super().__init__()
        self.group: TPGroup = resolve_group(group, mesh)
        _check_config(config, self.group)
        self.config = config
        self.sequence_parallel = config.sequence_parallel
        place = {"group": group, "mesh": mesh, "device": device, "dtype": dtype}
        parallel = {**place, "sequence_parallel": config.sequence_parallel, "sequence_dim": config.sequence_dim}
        parallel |= {"accumulate_main_grad": config.accumulate_main_grad, "backend": config.backend}
        shared = {**place, "sequence_parallel": config.sequence_parallel}
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **parallel)
        self.positions = None
        if config.positions == "learned":
            self.positions = PositionEmbedding(config.max_positions, config.hidden_size, **shared)
        self.blocks = nn.ModuleList(ParallelTransformerBlock(config, **place) for _ in range(config.num_layers))
        self.norm = Norm(config.norm, config.hidden_size, config.norm_eps, **shared)
        self.head = None
        if not config.tie_embeddings:
            self.head = ColumnParallelLinear(
                config.hidden_size, config.vocab_size, config.bias, init_method=_init_method(config), **parallel
            )

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, *, cache: KVCache | None = None, last_only: bool = False
    ) -> Tensor:
        config = self.config
        checks.check_tensor(ids, "ParallelTransformer: ids")
        if ids.ndim != 2:
            raise ValueError(f"ParallelTransformer: expected ids [batch, tokens], got shape {tuple(ids.shape)}")
        checks.check_boolean(last_only, "last_only")
        tokens = ids.shape[1]
        if tokens > config.max_positions:
            raise ValueError(f"{tokens} tokens are more than max_positions {config.max_positions}")
        if cache is None:
            if last_only:
                raise ValueError("last_only is for calls with a cache")
            if mask is not None:  # by each layer too, but here before the embedding's collective
                check_mask(mask, ids.shape[0], config.num_heads, tokens, ids.device, "ParallelTransformer")
            return self._forward(ids, mask, [None] * config.num_layers)
        if mask is not None:
            raise ValueError("give the cache the prompts' padding, KVCache(..., padding=), instead of a mask")
        if not isinstance(cache, KVCache):
            raise TypeError(f"ParallelTransformer: cache must be a KVCache, not {type(cache).__name__}")
        cache.check(self, ids)
        whole_tokens = with_attributes(self, sequence_parallel=False) if self.sequence_parallel else nullcontext()
        with whole_tokens:
            logits = self._forward(ids, None, cache.extend(tokens), last_only)
        cache.added(tokens)
        return logits

    def _forward(
        self, ids: Tensor, mask: Tensor | None, caches: list[LayerCache | None], last_only: bool = False
    ) -> Tensor:
        config, tokens = self.config, ids.shape[1]
        total_len = tokens if self.sequence_parallel else None
        tokens_first = config.sequence_dim == 0
        x = self.embedding(ids.t() if tokens_first else ids)
        if self.positions is not None:
            positions = self.positions(tokens, caches[0])
            x = x + (positions.transpose(0, 1) if tokens_first else positions)
        x = hidden_dropout(x, config, self.group, self.training)
        if tokens == 1 and caches[0] is not None:
            if self._is_as_built():
                return self._logits_of_step(x, caches)
            tell(NORM_OF_SUM, x, PLAIN, "a module was wrapped, replaced or given a hook")
        for block, cache in zip(self.blocks, caches, strict=True):
            if config.checkpoint_activations and self.training:
                # Compiled, a `context_fn` is for something else, and the tier is chosen when the operator runs.
                alike = {} if torch.compiler.is_compiling() else {"context_fn": recomputed_alike}
                x = checkpoint(block, x, mask, total_len=total_len, use_reentrant=False, **alike)
            else:
                x = block(x, mask, total_len=total_len, cache=cache)
        if last_only:
            x = x.narrow(config.sequence_dim, tokens - 1, 1)
        logits = self._logits(self.norm(x), total_len)
        return logits.transpose(0, 1) if tokens_first else logits

    def _is_as_built(self) -> bool:
        """Whether what a decoding step joins may be joined."""
        return (
            not self.training
            and _is_untouched(self.norm, Norm)
            and all(
                _is_untouched(block, ParallelTransformerBlock)
                and _is_untouched(block.attention_norm, Norm)
                and _is_untouched(block.mlp_norm, Norm)
                and block._has_untouched_sums()
                for block in self.blocks
            )
        )

    def _logits_of_step(self, x: Tensor, caches: list[LayerCache]) -> Tensor:
        """A new token's, of its embedding: blocks hand on what they give normalised, too."""
        normed = self.blocks[0].attention_norm(x)
        following = [*(block.attention_norm for block in self.blocks[1:]), self.norm]
        for block, cache, norm in zip(self.blocks, caches, following, strict=True):
            x, normed = block(x, cache=cache, normed=normed, following=norm)
        logits = self._logits(normed, None)
        return logits.transpose(0, 1) if self.config.sequence_dim == 0 else logits

    def loss(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """`vocab_parallel_cross_entropy` of the logits; `labels` is int64 ``[batch, tokens]``, `options` go through."""
        checks.check_tensor(ids, "ParallelTransformer: ids")
        check_target(labels)
        if labels.shape != ids.shape:
            raise ValueError(f"labels must have the ids' shape {tuple(ids.shape)}, not {tuple(labels.shape)}")
        if unknown := options.keys() - OPTIONS.keys():
            raise TypeError(f"ParallelTransformer.loss: no options {sorted(unknown)}; there are {', '.join(OPTIONS)}")
        options = {"vocab_size": self.config.vocab_size, "backend": self.config.backend} | options
        check_options(**(OPTIONS | options))
        return vocab_parallel_cross_entropy(self(ids, mask), labels, group=self.group, **options)

    def _logits(self, x: Tensor, total_len: int | None) -> Tensor:
        if self.head is not None:
            return self.head(x, total_len=total_len)
        sequence_dim = self.config.sequence_dim if self.sequence_parallel else None
        weight, main_grad = self.embedding.weight_and_main_grad()
        return column_forward(
            x,
            weight,
            None,
            self.group,
            out_features=self.config.vocab_size,
            sequence_dim=sequence_dim,
            total_len=total_len,
            backend=self.config.backend,
            main_grad=main_grad,
        )


def _is_untouched(module: nn.Module, kind: type) -> bool:
    """Whether nobody has wrapped or replaced it, as FSDP and LoRA do, or is called before, after or instead of it."""
    return (
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in vars(module)
        and not nn.modules.module._has_any_global_hook()
    )


def hidden_dropout(x: Tensor, config: TransformerConfig, group: TPGroup, training: bool) -> Tensor:
    """Dropout on activations between sharded regions: common to the ranks, unless each holds its own tokens."""
    if not (training and config.dropout):
        return x
    if config.sequence_parallel:
        return rank_dropout(x, config.dropout, group, config.backend)
    return F.dropout(x, config.dropout)


def _init_method(config: TransformerConfig):
    return nn.init.xavier_uniform_ if config.init == "xavier" else None


def _check_config(config: TransformerConfig, group: TPGroup) -> None:
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a tpfused.TransformerConfig, not {type(config).__name__} {config!r}")
    config.check(group.size)


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
