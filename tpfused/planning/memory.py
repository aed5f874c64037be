"""What a rank's memory holds during training. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tpfused.planning.block import Setting
from tpfused.planning.shape import Shape

# Of the card: NCCL's and cuBLAS's buffers, the allocator's gaps and short-lived results take the rest.
USABLE = 0.9


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs the most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def fits(self, card: float) -> bool:
        return self.total <= USABLE * card


def state_bytes(parameters: int, size: int) -> tuple[int, int, int]:
    """Bytes of these parameters of `size` bytes, of their gradients, and of AdamW's state: two moments in fp32 and,
    where the parameters have 16 bits, a copy of them in fp32. 16 bytes a parameter in all (Rajbhandari et al., 2020,
    "ZeRO", section 3.1).
    """
    return size * parameters, size * parameters, (8 if size >= 4 else 12) * parameters


def block_activations(shape: Shape, setting: Setting) -> float:
    """Bytes that one block keeps for its backward.

    Counted as in Korthikanti et al., 2022, section 4, without dropout masks and, as after their selective recomputation
    (section 5), without scores, which flash attention computes again. For a GPT block with feed-forward features of
    four times `hidden`, in 16 bits, with s tokens and b sequences: 32 sbh on one rank (their 34 less two masks),
    sbh (8 + 24 / tp) on more, 32 sbh / tp with sequence parallelism. Its plain path also keeps the gathered inputs of
    its two column-parallel matmuls: sbh (4 + 28 / tp).
    """
    mine, h = shape.local(setting.tp), shape.hidden
    inputs = setting.own_rows if setting.overlap else setting.rows
    tokens = 2 * h * setting.own_rows + 2 * h * inputs  # of the norms, and of the column-parallel matmuls
    # q, k and v as attention sees them (kv heads repeated for the queries they serve), and its output; between the
    # feed-forward matmuls the input of each function and of the last matmul.
    features = 4 * mine.q + mine.ffn * (4 if shape.gated else 2)
    statistics = 4 * setting.rows * mine.q // shape.head_dim  # fp32, of attention
    return setting.bytes * (tokens + features * setting.rows) + statistics


def checkpointed_activations(shape: Shape, setting: Setting) -> float:
    """Bytes that one block keeps when it is computed again in backward: its input (their section 5, full
    recomputation: 2 sbh, and with sequence parallelism 2 sbh / tp)."""
    return setting.bytes * shape.hidden * setting.own_rows


def head_activations(shape: Shape, setting: Setting) -> float:
    """Bytes of the last norm's and the head's inputs, of the logits and of their gradient."""
    vocab = shape.local(setting.tp).vocab
    return setting.bytes * (2 * shape.hidden * setting.rows + 2 * vocab * setting.rows)


def stage_memory(
    shape: Shape, setting: Setting, layers: int, kept: int, *, first: bool, last: bool, checkpointed: bool
) -> Memory:
    """Of a pipeline stage of `layers` blocks that keeps the activations of `kept` micro-batches. The first stage has
    the embedding, the last one the head, with a weight of its own even where it is tied, if it is another stage.
    """
    parameters = layers * shape.block_parameters(setting.tp)
    parameters += shape.embedding_parameters(setting.tp) if first else 0
    parameters += shape.head_parameters(setting.tp, not shape.tied or not first) if last else 0
    block = block_activations(shape, setting)
    if checkpointed:
        activations = kept * layers * checkpointed_activations(shape, setting) + block
    else:
        activations = kept * layers * block
    activations += head_activations(shape, setting) if last else 0
    return Memory(*state_bytes(parameters, setting.bytes), activations)
