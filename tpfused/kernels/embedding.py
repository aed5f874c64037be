"""Masked lookup in one shard of an embedding table: range test, gather and zero in one kernel; deterministic backward.

Floor: forward reads each wanted row once and writes it once. Backward reads dy once and writes the whole gradient once,
which for a large table is mostly zeros; into a `main_grad` it touches only the rows used.

Backward sorts the ids (stable), so that one program owns each used row, adds its tokens in their order in float32, and
rounds once: the same bits at every run. The zeros are written while the ids are sorted, on a stream beside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.launch import block_of, compute_type, needs_kernel_device, on_device_of, register, unit_stride

BLOCK = 4096  # features a program, at most


@triton.jit
def _forward_kernel(
    ids_ptr, weight_ptr, out_ptr, features, blocks, weight_stride, vocab_start, rows, vocab_size,
    CHECK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    id = tl.load(ids_ptr + token).to(tl.int64)
    row = id - vocab_start
    owned = tl.where((row >= 0) & (row < rows), features, 0)
    x = tl.load(weight_ptr + row * weight_stride + at, mask=at < owned, other=0.0)
    if CHECK:
        known = tl.where((id >= 0) & (id < vocab_size), features, 0)
        x = tl.where(at < known, x, float("nan"))
    tl.store(out_ptr + token * features + at, x, mask=inside)


@triton.jit
def _backward_kernel(
    sorted_ptr, order_ptr, dy_ptr, grad_ptr, tokens, features, blocks, dy_stride, grad_stride, rows, padding_row,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, block): if sorted id i begins a run of equal ids, the sum of that run's dy; nothing otherwise."""
    i = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    row = tl.load(sorted_ptr + i).to(tl.int64)
    before = tl.load(sorted_ptr + i - 1, mask=i > 0, other=-1).to(tl.int64)
    if (row != before) & (row >= 0) & (row < rows) & (row != padding_row):
        total = tl.zeros((BLOCK,), COMPUTE)
        out = grad_ptr + row * grad_stride + at
        if ACCUMULATE:
            total += tl.load(out, mask=inside, other=0.0).to(COMPUTE)
        j = i
        same = row
        while same == row:
            token = tl.load(order_ptr + j).to(tl.int64)
            total += tl.load(dy_ptr + token * dy_stride + at, mask=inside, other=0.0).to(COMPUTE)
            j += 1
            same = tl.load(sorted_ptr + j, mask=j < tokens, other=-1).to(tl.int64)
        tl.store(out, total.to(grad_ptr.dtype.element_ty), mask=inside)


def embedding(
    ids: Tensor,
    weight: Tensor,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    padding_idx: int | None = None,
    check: bool = True,
) -> Tensor:
    """Rows of `weight` for the ids this shard owns, zeros for the others. Differentiable in `weight`.

    Args:
        ids: int64 or int32 ``[...]``, global ids.
        weight: ``[rows, features]``: rows `vocab_start` and following of a table of `vocab_size` (None: the end of
            these).
        padding_idx: a global id whose row gets no gradient.
        check: write NaN for ids outside ``[0, vocab_size)``, instead of zeros.

    Returns:
        ``[..., features]``, of the weight's dtype.

    Raises:
        ValueError: tensors on different devices, a weight that is not two-dimensional, a shard outside the vocabulary.
        TypeError: ids that are not integers.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int64 or int32, not {ids.dtype}")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be floating-point [rows, features], not {weight.dtype} {tuple(weight.shape)}")
    if ids.device != weight.device:
        raise ValueError(f"the ids are on {ids.device}, the weight on {weight.device}")
    end = vocab_start + weight.shape[0]
    vocab_size = end if vocab_size is None else vocab_size
    if not 0 <= vocab_start <= end <= vocab_size:
        raise ValueError(f"rows {vocab_start} to {end} are not part of a vocabulary of {vocab_size}")
    needs_kernel_device(weight, "embedding")
    padding_row = -1 if padding_idx is None else padding_idx - vocab_start
    return _embedding(ids, weight, vocab_start, vocab_size, padding_row, check)


def accumulate_gradient(
    main_grad: Tensor, ids: Tensor, dy: Tensor, vocab_start: int = 0, padding_idx: int | None = None
) -> None:
    """Add the gradient of `embedding` to `main_grad` ``[rows, features]``, any floating dtype, touching only rows
    used.
    """
    padding_row = -1 if padding_idx is None else padding_idx - vocab_start
    _sum_rows(main_grad, ids, dy, vocab_start, padding_row, sort(ids, vocab_start), accumulate=True)


def sort(ids: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """Each id's row in the shard, sorted, and the token each came from, in order among equals."""
    return torch.sort((ids.reshape(-1) - vocab_start).to(torch.int32), stable=True)


def _sum_rows(grad, ids, dy, vocab_start, padding_row, in_order, *, accumulate) -> None:
    tokens, features = ids.numel(), grad.shape[1]
    if tokens == 0 or grad.numel() == 0:
        return
    dy = unit_stride(dy.reshape(-1, features))
    block = block_of(features, BLOCK)
    blocks = triton.cdiv(features, block)
    compute = compute_type(grad if grad.dtype == torch.float64 else dy)
    with on_device_of(grad):
        _backward_kernel[(tokens * blocks,)](
            *in_order, dy, grad, tokens, features, blocks, dy.stride(0), grad.stride(0), grad.shape[0], padding_row,
            ACCUMULATE=accumulate, COMPUTE=compute, BLOCK=block, num_warps=8,
        )  # fmt: skip


def _forward(ids: Tensor, weight: Tensor, vocab_start: int, vocab_size: int, padding_row: int, check: bool) -> Tensor:
    features = weight.shape[1]
    out = weight.new_empty(*ids.shape, features)
    if out.numel() == 0:
        return out
    weight = unit_stride(weight)
    block = block_of(features, BLOCK)
    blocks = triton.cdiv(features, block)
    with on_device_of(weight):
        _forward_kernel[(ids.numel() * blocks,)](
            ids.contiguous(), weight, out, features, blocks, weight.stride(0), vocab_start, weight.shape[0], vocab_size,
            CHECK=check, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def _fake_forward(ids, weight, vocab_start, vocab_size, padding_row, check):
    return weight.new_empty(*ids.shape, weight.shape[1])


def _backward(dy: Tensor, ids: Tensor, rows: int, vocab_start: int, padding_row: int) -> Tensor:
    grad = torch.empty(rows, dy.shape[-1], dtype=dy.dtype, device=dy.device)
    if not grad.is_cuda:
        _sum_rows(grad.zero_(), ids, dy, vocab_start, padding_row, sort(ids, vocab_start), accumulate=False)
        return grad
    caller, beside = torch.cuda.current_stream(grad.device), _side_stream(grad.device)
    beside.wait_stream(caller)
    with torch.cuda.stream(beside):
        grad.zero_()
    in_order = sort(ids, vocab_start)
    caller.wait_stream(beside)
    _sum_rows(grad, ids, dy, vocab_start, padding_row, in_order, accumulate=False)
    return grad


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)
    return _side_streams[device]


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _fake_backward(dy, ids, rows, vocab_start, padding_row):
    return dy.new_empty(rows, dy.shape[-1])


_embedding_backward = register("embedding_backward", _backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    ids, weight, ctx.vocab_start, _, ctx.padding_row, _ = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _gradient(ctx, dy):
    (ids,) = ctx.saved_tensors
    grad = _embedding_backward(dy, ids, ctx.rows, ctx.vocab_start, ctx.padding_row)
    return None, grad, None, None, None, None


_embedding = register("embedding", _forward, _fake_forward, _save_for_backward, _gradient)
