"""What one rank does in a Transformer block, and before and after the blocks. No torch.

The matmuls and collectives are those of Shoeybi et al., 2019, "Megatron-LM", section 3, and with sequence parallelism
those of Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2. The
passes are those of the eager layers: on a GPU this package's kernels, which read and write each value once; where there
is none, and elsewhere, `tpfused.reference`'s functions, one after the other, and what autograd does to their gradients.
`tests/planning/test_block.py` counts those of the layers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpfused.planning.shape import Shape
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Collective, Matmul, Pair, Pass, Work


@dataclass(frozen=True)
class Setting:
    """How a block is run, on one rank.

    Attributes:
        tokens, batch: of a sequence, and sequences, of one forward (a micro-batch).
        bytes: of a number.
        sequence_parallel: between the matmuls each rank holds its own tokens.
        overlap: matmuls and collectives as `tpfused.overlap` runs them, which gather the tokens again in backward;
            False: the plain path, which keeps them.
        kernels: rotary positions and gated activations are one kernel each way, and grouped queries share their keys
            and values, as on a GPU.
    """

    tp: int
    tokens: int
    batch: int
    bytes: int
    sequence_parallel: bool
    overlap: bool
    kernels: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether there is a collective to overlap, and it is."""
        return self.overlap and self.tp > 1

    @property
    def rows(self) -> int:
        """All tokens."""
        return self.tokens * self.batch

    @property
    def own_rows(self) -> int:
        """The tokens that this rank holds between the matmuls."""
        return -(-self.tokens // self.tp) * self.batch if self.sequence_parallel else self.rows


@dataclass(frozen=True)
class Both:
    """The work of a forward and of its backward."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)


def block(shape: Shape, setting: Setting) -> Both:
    """A `ParallelTransformerBlock`."""
    mine, h = shape.local(setting.tp), shape.hidden
    up = mine.ffn * (2 if shape.gated else 1)
    attention = (
        norm(shape, setting)
        + column(h, mine.qkv, shape.bias, setting)
        + shared_heads(shape, setting)
        + heads(shape, setting)
        + row(mine.q, h, shape.bias, setting)
        + residual(shape, setting)
    )
    feed_forward = (
        norm(shape, setting)
        + column(h, up, shape.bias, setting)
        + activation(shape, setting)
        + row(mine.ffn, h, shape.bias, setting)
        + residual(shape, setting)
    )
    return attention + feed_forward


def column(k: int, n: int, bias: bool, setting: Setting) -> Both:
    """A column-parallel matmul and its collectives; the bias is in the matmul, its gradient a sum."""
    m = setting.rows
    forward, dgrad, wgrad = (Matmul(kind, m, k, n) for kind in ("forward", "dgrad", "wgrad"))
    size = m * k * setting.bytes
    sums = [Pass("bias", CONTIGUOUS, m * n * setting.bytes)] if bias else []
    if setting.tp == 1:
        return Both((forward,), (dgrad, wgrad, *sums))
    if not setting.sequence_parallel:
        copy = Pass("copy", CONTIGUOUS, 2 * size)  # the all-reduce is not in place
        return Both((forward,), (dgrad, *([] if setting.overlap else [copy]), Pair(wgrad, reduce(size)), *sums))
    gathered_again = Pair(dgrad, gather(size)) if setting.overlap else dgrad
    return Both((Pair(forward, gather(size)),), (gathered_again, Pair(wgrad, scatter(size)), *sums))


def row(k: int, n: int, bias: bool, setting: Setting) -> Both:
    """A row-parallel matmul and its collectives; the bias is added afterwards, but for an overlapped operation, which
    has it in the sum of the ranks' parts.
    """
    m = setting.rows
    forward, dgrad, wgrad = (Matmul(kind, m, k, n) for kind in ("forward", "dgrad", "wgrad"))
    size, own = m * n * setting.bytes, setting.own_rows * n * setting.bytes
    added = [Pass("bias", CONTIGUOUS, 2 * own)] if bias and not setting.overlaps else []
    sums = [Pass("bias", CONTIGUOUS, own)] if bias else []
    if setting.tp == 1:
        return Both((forward, *added), (dgrad, wgrad, *sums))
    if not setting.sequence_parallel:
        copy = Pass("copy", CONTIGUOUS, 2 * size)
        return Both((Pair(forward, reduce(size)), *([] if setting.overlap else [copy]), *added), (dgrad, wgrad, *sums))
    shared = [reduce(n * setting.bytes)] if bias else []
    return Both((Pair(forward, scatter(size)), *added), (Pair(dgrad, gather(size)), wgrad, *sums, *shared))


def norm(shape: Shape, setting: Setting) -> Both:
    """x read and y written; in backward dy and x are read twice, for dx and for the weight's gradient, which under
    sequence parallelism is summed over the ranks.
    """
    size = setting.own_rows * shape.hidden * setting.bytes
    parts = shape.norm_parameters // shape.hidden
    shared = [reduce(shape.hidden * setting.bytes)] * parts if setting.sequence_parallel and setting.tp > 1 else []
    return Both((Pass("norm", CONTIGUOUS, 2 * size),), (Pass("norm", CONTIGUOUS, 5 * size), *shared))


def residual(shape: Shape, setting: Setting) -> Both:
    """A sum, and the sum of the two branches' gradients. An overlapped reduce-scatter takes the residual into the sum
    of the ranks' parts (``matmul_reduce_scatter(residual=)``), which it writes in any case: forward has no pass then.
    """
    added = Pass("residual", CONTIGUOUS, 3 * setting.own_rows * shape.hidden * setting.bytes)
    joined = setting.overlaps and setting.sequence_parallel
    return Both(() if joined else (added,), (added,))


def shared_heads(shape: Shape, setting: Setting) -> Both:
    """With fewer kv heads than ranks: the gradients of k's and v's weights, summed over the ranks that share a head,
    all heads in one all-reduce each; the weights joined to one.
    """
    if setting.tp <= shape.kv_heads:
        return Both((), ())
    joined = Pass("joined", CONTIGUOUS, 2 * shape.local(setting.tp).qkv * shape.hidden * setting.bytes)
    return Both((joined,), (reduce(shape.kv_heads * shape.head_dim * shape.hidden * setting.bytes),) * 2)


def heads(shape: Shape, setting: Setting) -> Both:
    """From the packed projection to what the output projection reads: unpacking, rotary positions, repeated kv heads
    and attention itself.
    """
    mine, size = shape.local(setting.tp), setting.bytes
    q, kv = setting.rows * mine.q, setting.rows * mine.kv  # numbers
    own = Attention(setting.batch, mine.q // shape.head_dim, setting.tokens, shape.head_dim)
    if setting.kernels and shape.rotary:
        if size == 2:  # else keys and values are repeated
            own = replace(own, kv_heads=mine.kv // shape.head_dim)
        packed = Pass("rotary", CONTIGUOUS, 2 * size * (q + 2 * kv))
        # Attention's output has sequences first, and the projection tokens first.
        copied = [_copy("heads", q, size)] if setting.batch > 1 else []
        return Both((packed, own, *copied), (replace(own, backward=True), packed, *copied))
    forward: list[Work] = [own]
    # The gradients of q, k and v, joined.
    backward: list[Work] = [replace(own, backward=True)]
    backward.append(Pass("heads", JOINED, 2 * size * (q + 2 * kv), q + 2 * kv))
    if setting.batch > 1:  # that gradient has sequences first, and the projection tokens first
        backward.append(_copy("heads", q + 2 * kv, size))
    if shape.heads > shape.kv_heads:
        # The queries of each kv head, side by side; k and v, read once and written for every query head, and the sums
        # of these heads' gradients.
        forward += [_copy("heads", q, size), Pass("heads", STRIDED, 2 * size * (q + kv), 2 * q)]
        backward += [Pass("heads", CONTIGUOUS, 2 * size * (q + kv))]
    if shape.rotary:
        # In fp32, on halves of heads: four products, in backward a sign, two sums, the halves joined, two casts.
        values = q + kv
        sums = Pass("rotary", CONTIGUOUS, (12 + (2 * (size + 4) if size < 4 else 0)) * values)
        joined = Pass("rotary", JOINED, 8 * values, values)
        forward += [sums, joined, Pass("rotary", STRIDED, 16 * values, 2 * values)]
        backward += [sums, joined, Pass("rotary", STRIDED, 20 * values, 2.5 * values)]
        forward.append(_copy("heads", q, size))  # attention's output, whose heads are not side by side then
    return Both(tuple(forward), tuple(backward))


def _copy(name: str, numbers: float, size: int) -> Pass:
    """Numbers from or to where they are not side by side."""
    return Pass(name, STRIDED, 2 * size * numbers, numbers)


def activation(shape: Shape, setting: Setting) -> Both:
    """GELU: x read, y written; backward dy and x read, dx written. SwiGLU on alternating gates and ups, each read with
    the other's memory: silu, product; backward two products, silu's derivative, the two gradients laid side by side.
    """
    numbers = setting.rows * shape.local(setting.tp).ffn
    size = numbers * setting.bytes
    if not shape.gated or setting.kernels:
        read = 2 if shape.gated else 1
        forward, backward = (Pass("activation", CONTIGUOUS, each * size) for each in (read + 1, 2 * read + 1))
        return Both((forward,), (backward,))
    backward = (
        Pass("activation", CONTIGUOUS, 3 * size),
        Pass("activation", STRIDED, 8 * size, 2 * numbers),
        Pass("activation", JOINED, 4 * size, 2 * numbers),
    )
    return Both((Pass("activation", STRIDED, 7 * size, 2 * numbers),), backward)


def embedding(shape: Shape, setting: Setting) -> Both:
    """Rows looked up and masked, then reduced; backward zeros a gradient as large as the table and adds to it."""
    size, own = (rows * shape.hidden * setting.bytes for rows in (setting.rows, setting.own_rows))
    table = shape.embedding_parameters(setting.tp) * setting.bytes
    looked_up = Pass("embedding", CONTIGUOUS, 4 * size + (0 if shape.rotary else 3 * own))
    gradient = Pass("embedding", CONTIGUOUS, table + 3 * size)
    if setting.tp == 1:
        return Both((looked_up,), (gradient,))
    if not setting.sequence_parallel:
        return Both((looked_up, reduce(size)), (gradient,))
    return Both((looked_up, scatter(size)), (gather(size), gradient))


def head(shape: Shape, setting: Setting) -> Both:
    """The last norm, the projection to this rank's part of the vocabulary, and the fused cross entropy: logits read
    twice, and their gradient written; three numbers a token are gathered.
    """
    vocab = shape.local(setting.tp).vocab
    logits = setting.rows * vocab * setting.bytes
    exchanged = [] if setting.tp == 1 else [gather(12 * setting.rows * setting.tp)]
    loss = Both((Pass("loss", CONTIGUOUS, logits), *exchanged), (Pass("loss", CONTIGUOUS, 2 * logits),))
    return norm(shape, setting) + column(shape.hidden, vocab, shape.bias and not shape.tied, setting) + loss


def gather(size: float) -> Collective:
    return Collective("all_gather", size)


def scatter(size: float) -> Collective:
    return Collective("reduce_scatter", size)


def reduce(size: float) -> Collective:
    return Collective("all_reduce", size)
