"""Cross entropy of logits whose vocabulary may be split: statistics, loss, gradient.

Three steps, so that the one collective between them stays outside the kernels:

1. `statistics`: one read of this rank's logits gives, for each token, the maximum, the sum of exponentials below it
   (online; Milakov and Gimelshein, 2018), the target's logit if it is here, and the sum of logits for label smoothing.
   Wide rows are split over several programs; their parts and the ranks' are alike, and joined in the next step.
2. `loss`: from all parts, in order, the loss of each token and the logarithm of its partition function Z.
3. `backward`: one more read of the logits, one write of their gradient.

Floor: 6 bytes a logit in half precision, forward and backward together.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.launch import (
    INTERPRET,
    block_of,
    capability,
    cdiv,
    compute_type,
    launch,
    on_device_of,
    register,
    unit_stride,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BLOCK = 8192  # logits a program holds at a time
ENOUGH_PROGRAMS = 1024  # split rows until there are about as many: eight for each multiprocessor of a large GPU


@triton.jit
def _row_of(ptr, row, inner, outer_stride, inner_stride):
    return ptr + (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _statistics_kernel(
    logits_ptr, target_ptr, stats_ptr, tokens, width, vocab_start, part_width, inner, outer_stride, inner_stride,
    WITH_SUM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    begin = part * part_width
    end = tl.minimum(begin + part_width, width)
    logits_row = _row_of(logits_ptr, row, inner, outer_stride, inner_stride)

    top = tl.full((), -float("inf"), COMPUTE)
    exp_sum = tl.zeros((), COMPUTE)
    below = tl.zeros((), COMPUTE)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_row + at, mask=at < end, other=-float("inf")).to(COMPUTE)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        exp_sum = exp_sum * tl.exp(top - finite_top) + tl.sum(tl.exp(x - finite_top), axis=0)
        if WITH_SUM:
            # Below the maximum: their raw sum would lose the digits in which they differ.
            below += tl.where(start > begin, (start - begin) * (top - finite_top), 0.0)
            below += tl.sum(tl.where(at < end, x - finite_top, 0.0), axis=0)
        top = new_top

    target = tl.load(target_ptr + row).to(tl.int64) - vocab_start
    own = tl.zeros((), COMPUTE)
    if (target >= begin) & (target < end):
        own = tl.load(logits_row + target).to(COMPUTE)
    out = stats_ptr + part * 5 * tokens + row
    tl.store(out, top)
    tl.store(out + tokens, exp_sum)
    tl.store(out + 2 * tokens, own)
    tl.store(out + 3 * tokens, below)
    tl.store(out + 4 * tokens, tl.maximum(end - begin, 0).to(COMPUTE))


@triton.jit
def _loss_kernel(
    stats_ptr, target_ptr, loss_ptr, log_z_ptr, tokens, parts, vocab_size, ignore_index,
    smoothing: tl.float64, z_loss: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    smoothing = tl.full((), smoothing, COMPUTE)
    z_loss = tl.full((), z_loss, COMPUTE)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    top = tl.full((BLOCK,), -float("inf"), COMPUTE)
    for part in range(parts):
        top = tl.maximum(top, tl.load(stats_ptr + part * 5 * tokens + token, mask=inside, other=0.0))
    finite_top = tl.where(top == -float("inf"), 0.0, top)
    exp_sum = tl.zeros((BLOCK,), COMPUTE)
    target_logit = tl.zeros((BLOCK,), COMPUTE)
    below = tl.zeros((BLOCK,), COMPUTE)
    counted = tl.zeros((BLOCK,), tl.int64)
    for part in range(parts):
        at = stats_ptr + part * 5 * tokens + token
        part_top = tl.load(at, mask=inside, other=0.0)
        exp_sum += tl.load(at + tokens, mask=inside, other=0.0) * tl.exp(part_top - finite_top)
        target_logit += tl.load(at + 2 * tokens, mask=inside, other=0.0)
        count = tl.load(at + 4 * tokens, mask=inside, other=0.0)
        counted += count.to(tl.int64)
        below += tl.load(at + 3 * tokens, mask=inside, other=0.0)
        below += tl.where(count > 0, count * (part_top - finite_top), 0.0)
    log_sum = tl.log(exp_sum)
    # Ranks that give different vocabulary sizes may each find their own width right. They cannot all find the sum of
    # the widths right, and whoever does not takes neither loss nor gradient. Counts beyond 2**24 are rounded.
    log_sum = tl.where(tl.abs(counted - vocab_size) > vocab_size // (1 << 24), float("nan"), log_sum)
    log_z = top + log_sum
    target = tl.load(target_ptr + token, mask=inside, other=0)
    # The maximum less the target's logit is exact, or nearly, where log_z has lost the digits of log_sum.
    loss = (1.0 - smoothing) * (log_sum + (top - target_logit)) + z_loss * log_z * log_z
    if smoothing != 0:
        loss += smoothing * (log_sum - below / vocab_size)
    loss = tl.where((target >= 0) & (target < vocab_size), loss, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + token, loss, mask=inside)
    tl.store(log_z_ptr + token, top, mask=inside)
    tl.store(log_z_ptr + tokens + token, log_sum, mask=inside)


@triton.jit
def _backward_kernel(
    logits_ptr, target_ptr, log_z_ptr, dloss_ptr, dlogits_ptr, width, vocab_start, vocab_size, ignore_index,
    smoothing: tl.float64, z_loss: tl.float64, inner, outer_stride, inner_stride, d_outer_stride, d_inner_stride,
    dloss_stride, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    smoothing = tl.full((), smoothing, COMPUTE)
    z_loss = tl.full((), z_loss, COMPUTE)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    target = tl.load(target_ptr + row).to(tl.int64)
    known = (target >= 0) & (target < vocab_size)
    # An ignored token's gradient is zero, and one with a bad label's NaN, whatever stands in their logits.
    counted = tl.where((target != ignore_index) & known, width, 0)
    instead = tl.where((target == ignore_index) | known, 0.0, float("nan"))
    dloss = tl.load(dloss_ptr + row * dloss_stride).to(COMPUTE)
    logits_row = _row_of(logits_ptr, row, inner, outer_stride, inner_stride)
    x = tl.load(logits_row + at, mask=at < counted, other=0.0).to(COMPUTE)
    top = tl.load(log_z_ptr + row)
    log_sum = tl.load(log_z_ptr + tl.num_programs(0) + row)
    dx = tl.exp((x - top) - log_sum) * (1.0 + 2.0 * z_loss * (top + log_sum)) - smoothing / vocab_size
    dx = tl.where(at + vocab_start == target, dx - (1.0 - smoothing), dx) * dloss
    dx = tl.where(at < counted, dx, instead)
    out = _row_of(dlogits_ptr, row, inner, d_outer_stride, d_inner_stride) + at
    tl.store(out, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


def supports(logits: Tensor) -> bool:
    """Whether the kernels can run on them: on CUDA from Ampere on, or on the CPU under ``TRITON_INTERPRET=1``."""
    if logits.dtype not in DTYPES:
        return False
    return capability(logits.device) >= (8, 0) if logits.is_cuda else INTERPRET and logits.device.type == "cpu"


def _three_dimensional(logits: Tensor) -> Tensor:
    """``[outer, inner, vocabulary]`` with neighbouring logits: a view of any ``[b, s, v]``, transposed ones too."""
    if logits.ndim != 3:
        logits = logits.reshape(1, prod(logits.shape[:-1]), logits.shape[-1])
    return unit_stride(logits)


def _statistics(logits: Tensor, target: Tensor, vocab_start: int, with_sum: bool, widest: int | None = None) -> Tensor:
    """-> ``[parts, 5, tokens]``: maximum, sum of exponentials, target's logit or 0, sum of the logits below the maximum
    or 0, number of logits.

    `logits` is ``[..., width]``, ids `vocab_start` and following; `target` int64 ``[...]``. In float32 (float64).
    `widest` is the width of the widest rank's shard, None for this one's: the number of parts follows from it, and so
    is the same on all ranks.
    """
    stats = _new_statistics(logits, target, widest)
    parts, _, tokens = stats.shape
    if tokens == 0:
        return stats
    width = logits.shape[-1]
    part_width = cdiv(width, parts)
    x = _three_dimensional(logits)
    with on_device_of(x):
        launch(
            _statistics_kernel, (tokens, parts),
            x, target.contiguous(), stats, tokens, width, vocab_start, part_width, x.shape[1], x.stride(0), x.stride(1),
            WITH_SUM=with_sum, COMPUTE=compute_type(x), BLOCK=block_of(part_width, BLOCK), num_warps=16,
        )  # fmt: skip
    return stats


def _loss(
    stats: Tensor, target: Tensor, vocab_size: int, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """All ranks' `statistics`, joined along the parts -> each token's loss, shaped as `target`, and its log(Z).

    log(Z) is ``[2, tokens]``: the maximum, and the logarithm of the sum below it. Their sum is what is meant, but it
    rounds the smaller one to the spacing of the larger. An ignored token's loss is 0, one with a label outside the
    vocabulary NaN. Where the parts are not of `vocab_size` logits together, all others' are NaN, and their gradients.
    """
    parts, _, tokens = stats.shape
    out = torch.empty(target.shape, dtype=stats.dtype, device=stats.device)
    log_z = stats.new_empty(2, tokens)
    if tokens:
        with on_device_of(stats):
            launch(
                _loss_kernel, (cdiv(tokens, 256),),
                stats, target.contiguous(), out, log_z, tokens, parts, vocab_size, ignore_index, smoothing, z_loss,
                COMPUTE=compute_type(stats), BLOCK=256, num_warps=4,
            )  # fmt: skip
    return out, log_z


def _backward(
    logits: Tensor,
    target: Tensor,
    log_z: Tensor,
    dloss: Tensor,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Tensor:
    """The gradient of the logits from each token's ``dloss``, in the logits' dtype."""
    dlogits = _new_gradient(logits)
    numbers = vocab_start, vocab_size, ignore_index, smoothing, z_loss
    _write_gradient(_three_dimensional(dlogits), _three_dimensional(logits), target, log_z, dloss, *numbers)
    return dlogits


def backward_in_place(logits: Tensor, *arguments) -> Tensor:
    """`backward`, over the logits where each has memory of its own that can be written as it lies."""
    x = _three_dimensional(logits)
    if x.data_ptr() != logits.data_ptr() or _overlaps(logits):  # a copy; expanded
        return _backward(logits, *arguments)
    _write_gradient(x, x, *arguments)
    torch.autograd.graph.increment_version(logits)  # whoever else has saved them is refused, not misled
    return logits


def _overlaps(x: Tensor) -> bool:
    """Whether two entries may share memory."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _write_gradient(dx: Tensor, x: Tensor, target: Tensor, log_z: Tensor, dloss: Tensor, *numbers) -> None:
    """To `dx`, which may be `x`: a program has read what it writes. `numbers`: `_backward`'s."""
    if x.numel() == 0:
        return
    dloss = dloss.reshape(-1)
    width = x.shape[-1]
    block = block_of(width, BLOCK)
    with on_device_of(x):
        launch(
            _backward_kernel, (target.numel(), cdiv(width, block)),
            x, target.contiguous(), log_z, dloss, dx, width, *numbers,
            x.shape[1], x.stride(0), x.stride(1), dx.stride(0), dx.stride(1), dloss.stride(0),
            COMPUTE=compute_type(x), BLOCK=block, num_warps=16,
        )  # fmt: skip


def _new_statistics(logits: Tensor, target: Tensor, widest: int | None) -> Tensor:
    tokens = target.numel()
    widest = logits.shape[-1] if widest is None else widest
    parts = max(1, min(cdiv(widest, BLOCK), ENOUGH_PROGRAMS // max(1, tokens)))
    return logits.new_empty(parts, 5, tokens, dtype=torch.promote_types(logits.dtype, torch.float32))


def _new_gradient(logits: Tensor) -> Tensor:
    """Laid out as the logits where the kernel can write so."""
    keeps_layout = logits.ndim == 3 and logits.stride(-1) == 1 and not _overlaps(logits)
    return torch.empty_like(logits, memory_format=torch.preserve_format if keeps_layout else torch.contiguous_format)


def _fake_statistics(logits, target, vocab_start, with_sum, widest=None):
    return _new_statistics(logits, target, widest)


def _fake_loss(stats, target, vocab_size, ignore_index, smoothing, z_loss):
    return stats.new_empty(target.shape), stats.new_empty(2, target.numel())


def _fake_backward(logits, target, log_z, dloss, vocab_start, vocab_size, ignore_index, smoothing, z_loss):
    return _new_gradient(logits)


statistics = register("cross_entropy_statistics", _statistics, _fake_statistics)
loss = register("cross_entropy_loss", _loss, _fake_loss)
backward = register("cross_entropy_backward", _backward, _fake_backward)
