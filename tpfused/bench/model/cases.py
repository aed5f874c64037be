"""The models and passes that are measured, and the work that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpfused.layers.transformer import TransformerConfig

OPERATIONS = ("train", "decode")
PASSES = ("fwd", "fwd+bwd")
BATCHES = (1, 8, 64)  # of decoding
QUICK_BATCH = 8


@dataclass(frozen=True)
class Size:
    """A LLaMA-style model.

    Attributes:
        layers: how many are measured by default: those that fit one card of 80 GB.
        whole: how many the model has.
        sequences: tokens that are trained on by default.
        context: tokens that a decoding step attends to.
        compared: layers that are compared with float32.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    theta: float
    layers: int
    whole: int
    sequences: tuple[int, ...]
    context: int
    compared: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self, layers: int, tokens: int, sequence_parallel: bool) -> TransformerConfig:
        return TransformerConfig.llama(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_layers=layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            ffn_size=self.ffn,
            max_positions=tokens,
            rope_theta=self.theta,
            sequence_parallel=sequence_parallel,
        )

    def multiplied(self, layers: int) -> int:
        """Weights that each token is multiplied by: all but the norms' and the embedding's."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary

    def flops(self, layers: int, sequence: int, direction: str) -> int:
        """Of one sequence: the matmuls, and causal attention, whose products are half of what is not masked.

        Backward is twice forward. Nothing is counted that a program computes again.
        """
        attention = layers * 2 * sequence**2 * self.heads * self.head_dim
        forward = 2 * sequence * self.multiplied(layers) + attention
        return forward * (3 if direction == "fwd+bwd" else 1)

    def decode_bytes(self, layers: int, batch: int, itemsize: int) -> int:
        """What one decoding step reads at least: the weights once, and all sequences' keys and values."""
        cached = layers * batch * self.context * 2 * self.kv_heads * self.head_dim
        return itemsize * (self.multiplied(layers) + cached)


SIZES = {
    "8B": Size(4096, 14336, 32, 8, 128256, 5e5, 8, 32, (2048, 8192), 2048, 2),
    "tiny": Size(32, 48, 4, 2, 64, 5e5, 2, 2, (16, 32), 16, 2),
}


@dataclass(frozen=True)
class Degree:
    """`tp` ranks split a model, of which `dp` ranks keep a part of each shard (FSDP2); 1: all of it."""

    tp: int
    dp: int = 1

    def __str__(self) -> str:
        return f"TP {self.tp}" + f" x FSDP {self.dp}" * (self.dp > 1)


@dataclass(frozen=True)
class Case:
    """A pass of a model at one degree: a step of `batch` sequences of `tokens`, or decoding their next tokens."""

    op: str
    name: str
    direction: str
    degree: Degree
    tokens: int
    batch: int
    quick: bool

    @property
    def label(self) -> str:
        return f"{self.op} {self.name} {self.direction}"

    @property
    def together(self) -> tuple[str, int, int]:
        """Cases that agree in this differ in their degree only, and are measured in the same rounds."""
        return self.direction, self.tokens, self.batch


def degrees_of(tps: Sequence[int], world: int) -> list[Degree]:
    """Each alone, in groups side by side, and with FSDP2 over the other ranks where there are some: of TP 1 it is what
    one would take in place of tensor parallelism."""
    sharded = [Degree(tp, world // tp) for tp in tps if tp < world]
    return [*map(Degree, tps), *sharded]


def cases(op: str, size: Size, degrees: Sequence[Degree], sequences: Sequence[int]) -> list[Case]:
    if op == "train":
        quick = max(sequences), "fwd+bwd"
        return [
            Case(op, f"{tokens} tokens {degree}", direction, degree, tokens, 1, (tokens, direction) == quick)
            for tokens in sequences
            for direction in PASSES
            for degree in degrees
        ]
    return [
        Case(op, f"batch {batch} {degree}", "fwd", degree, size.context, batch, batch == QUICK_BATCH)
        for batch in BATCHES
        for degree in degrees
        if degree.dp == 1
    ]
