"""A Transformer's sizes, and how many parameters it has, whole and on a rank. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tpfused.sharding import padded_shard_size

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """The sizes of a `ParallelTransformer`.

    Attributes:
        style: "llama" (rotary positions, RMSNorm, SwiGLU, no biases) or "gpt" (learned positions, LayerNorm, GELU,
            biases), as `TransformerConfig.llama` and `TransformerConfig.gpt`.
        positions: rows of the table of learned positions; of no account for "llama".
        tied: the head uses the embedding's weight.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    style: str = "llama"
    positions: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.style not in ("llama", "gpt"):
            raise ValueError(f"style must be 'llama' or 'gpt', not {self.style!r}")
        for name in ("hidden", "ffn", "layers", "heads", "kv_heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for over, under in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, over) % getattr(self, under):
                raise ValueError(f"{over} {getattr(self, over)} is no multiple of {under} {getattr(self, under)}")

        if self.rotary and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    @property
    def gated(self) -> bool:
        return self.style == "llama"

    @property
    def bias(self) -> bool:
        return self.style == "gpt"

    @property
    def rotary(self) -> bool:
        return self.style == "llama"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def splits(self, tp: int) -> bool:
        """Whether the layers can be built on `tp` ranks."""
        return self.why_unsplit(tp) is None

    def why_unsplit(self, tp: int) -> str | None:
        """What is in the way of building the layers on `tp` ranks, if anything: heads must divide, kv heads divide or
        be shared evenly, and each gate be on the rank of its up.
        """
        if self.heads % tp:
            return f"tp {tp} does not divide {self.heads} heads"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"of tp {tp} and {self.kv_heads} kv heads neither divides the other"
        if self.gated and padded_shard_size(2 * self.ffn, tp) != 2 * padded_shard_size(self.ffn, tp):
            return f"tp {tp} splits {self.ffn} feed-forward features so that gates and ups are on different ranks"
        return None

    def local(self, tp: int) -> Local:
        """The widths of the first of `tp` ranks, which has the most."""
        return Local(
            q=self.heads // tp * self.head_dim,
            kv=max(1, self.kv_heads // tp) * self.head_dim,
            ffn=padded_shard_size(self.ffn, tp),
            vocab=padded_shard_size(self.vocab, tp),
        )

    def block_parameters(self, tp: int = 1) -> int:
        """Of one block, on the first of `tp` ranks: projections are split, norms and row biases are whole."""
        mine, h = self.local(tp), self.hidden
        columns = mine.qkv + mine.ffn * (2 if self.gated else 1)
        weights = h * (columns + mine.q + mine.ffn)
        biases = columns + 2 * h if self.bias else 0
        return weights + biases + 2 * self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.style == "gpt" else 1)

    def embedding_parameters(self, tp: int = 1) -> int:
        """Of the embedding, split by its vocabulary, and of the positions, which are whole on each rank."""
        return self.hidden * (self.local(tp).vocab + (0 if self.rotary else self.positions))

    def head_parameters(self, tp: int = 1, own_weight: bool | None = None) -> int:
        """Of the last norm and the head. `own_weight`: False counts no weight, for the embedding's is used (default:
        as `tied` says)."""
        own_weight = not self.tied if own_weight is None else own_weight
        vocab = self.local(tp).vocab
        biases = vocab if self.bias and not self.tied else 0
        return self.norm_parameters + own_weight * self.hidden * vocab + biases

    def parameters(self, tp: int = 1) -> int:
        """Of the whole model, on the first of `tp` ranks."""
        blocks = self.layers * self.block_parameters(tp)
        return self.embedding_parameters(tp) + blocks + self.head_parameters(tp)


@dataclass(frozen=True)
class Local:
    """One rank's features: of its queries, its k (v has as many), between the feed-forward matmuls, of its logits."""

    q: int
    kv: int
    ffn: int
    vocab: int

    @property
    def qkv(self) -> int:
        return self.q + 2 * self.kv


# Dubey et al., 2024, "The Llama 3 Herd of Models", table 3; Radford et al., 2019, "Language Models are Unsupervised
# Multitask Learners", table 2 (the smallest).
PRESETS = {
    "llama3-8b": Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Shape(hidden=8192, ffn=28672, layers=80, heads=64, kv_heads=8, vocab=128256),
    "gpt2": Shape(768, 3072, layers=12, heads=12, kv_heads=12, vocab=50257, style="gpt", positions=1024, tied=True),
}
SEQUENCE = {"llama3-8b": 8192, "llama3-70b": 8192, "gpt2": 1024}
