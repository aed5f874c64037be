"""The extension's operations on tensors: outputs and workspaces are allocated here, and nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfused.overlap.communicator import TF32, TYPES, WORKSPACE, Communicator
from tpfused.overlap.tiers import TIERS
from tpfused.sharding import padded_shard_size

ALL_REDUCE_BLOCKS = 4  # of rows, at most: `Blocks::most` of csrc/blocks.h
RELU, GELU_TANH = 1, 2  # what a matmul's epilogue can do


@dataclass(frozen=True)
class Rows:
    """All ranks' rows: `tokens`, split like `torch.chunk`, of `each` rows."""

    tokens: int
    each: int

    @property
    def total(self) -> int:
        return self.tokens * self.each

    def padded(self, size: int) -> int:
        """As many rows as `size` of the largest shards hold."""
        return padded_shard_size(self.tokens, size) * size * self.each


def batch_of(x: Tensor, dim: int) -> tuple[int, ...]:
    """The dimensions of ``[..., features]`` beside the tokens'."""
    return (*x.shape[:dim], *x.shape[dim + 1 : -1])


def to_rows(x: Tensor, dim: int) -> Tensor:
    """``[..., features]`` -> ``[tokens * batch, features]``, `dim` being the tokens'."""
    if dim:
        x = x.movedim(dim, 0)
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def from_rows(y: Tensor, tokens: int, batch: tuple[int, ...], dim: int) -> Tensor:
    """The inverse of `to_rows`: a view."""
    if not batch:
        return y
    y = y.view(tokens, *batch, y.shape[-1])
    return y.movedim(0, dim) if dim else y


@dataclass(frozen=True)
class Link:
    """Who talks to whom, and how."""

    communicator: Communicator
    tier: str

    @property
    def by_nccl(self) -> bool:
        return self.tier == "nccl"

    def run(self, operation: str, x: Tensor, weight: Tensor, rows: Rows, n: int, slot: int, staged: int, *more) -> None:
        """Call the extension. `n`: output features, all ranks' where they are gathered. In entries of x's dtype: `slot`
        of memory that peers write (not by NCCL), and `staged` of this rank's own."""
        c = self.communicator
        bytes_ = x.element_size()
        if not self.by_nccl:
            c.reserve(slot * bytes_)
        size = WORKSPACE + staged * bytes_ + 4096
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        kind = TF32 if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else TYPES[x.dtype]
        k = weight.shape[1]
        getattr(c.module, operation)(
            c.handle, TIERS.index(self.tier), torch.cuda.current_stream(x.device).cuda_stream,
            workspace.data_ptr(), size, kind, rows.tokens, rows.each, k, n,
            x.data_ptr(), weight.data_ptr(), max(weight.stride(0), k), *more,
        )  # fmt: skip


def as_matrix(weight: Tensor) -> Tensor:
    """A weight whose rows cuBLASLt can step over: contiguous ones that do not overlap."""
    by_rows = weight.stride(1) == 1 and (weight.shape[0] == 1 or weight.stride(0) >= weight.shape[1])
    return weight if by_rows else weight.contiguous()


def all_gather_matmul(
    link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: int, keeps_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """-> ``activation(gathered x @ weight.T + bias)``, and what the activation is of, for GELU_TANH."""
    n, k = weight.shape
    slot = rows.padded(link.communicator.size) * k
    y = x.new_empty(rows.total, n)
    pre = torch.empty_like(y) if keeps_pre else None
    more = y.data_ptr(), activation, _address(bias), _address(pre)
    link.run("all_gather_matmul", x, weight, rows, n, slot, link.by_nccl * slot, *more)
    return y, pre


def matmul_reduce_scatter(link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, own: int) -> Tensor:
    n = weight.shape[0]
    slot = rows.padded(link.communicator.size) * n
    y = x.new_empty(own, n)
    staged = rows.total * n + link.by_nccl * slot
    link.run("matmul_reduce_scatter", x, weight, rows, n, slot, staged, y.data_ptr(), _address(bias))
    return y


def matmul_all_reduce(link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    n = weight.shape[0]
    y = x.new_empty(rows.total, n)
    slot, staged = _all_reduced(link, rows, n)
    link.run("matmul_all_reduce", x, weight, rows, n, slot, staged, y.data_ptr(), _address(bias))
    return y


def whole_input_backward(
    link: Link, dpre: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """-> the gradients of x, all-reduced, and of the weight, whose matmul hides that."""
    sizes = _all_reduced(link, rows, weight.shape[1])
    return _backward("whole_input_backward", link, dpre, x, weight, rows, *sizes, (True, needs_weight), needs_weight)


def matmul_all_gather(
    link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, features: int, activation: int, pre: bool
) -> tuple[Tensor, Tensor | None]:
    """-> all ranks' `features`, and of this rank's own what the activation is of, for GELU_TANH."""
    y = x.new_empty(rows.total, features)
    own_pre = x.new_empty(rows.total, weight.shape[0]) if pre else None
    padded = padded_shard_size(features, link.communicator.size)
    slot, staged = rows.total * features, rows.total * padded * (1 + link.communicator.size)
    more = y.data_ptr(), activation, _address(bias), _address(own_pre)
    link.run("matmul_all_gather", x, weight, rows, features, slot, link.by_nccl * staged, *more)
    return y, own_pre


def column_backward(
    link: Link, dpre: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """-> the gradients of x (own rows) and of the weight."""
    k = weight.shape[1]
    slot = rows.padded(link.communicator.size) * k
    needs = needs_x, needs_weight
    staged = rows.total * k + link.by_nccl * 2 * slot
    return _backward("column_backward", link, dpre, x, weight, rows, slot, staged, needs, *needs)


def row_backward(
    link: Link, dy: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """-> the gradients of x (all rows) and of the weight."""
    slot = rows.padded(link.communicator.size) * weight.shape[0]
    needs = needs_x, needs_weight
    return _backward("row_backward", link, dy, x, weight, rows, slot, link.by_nccl * slot, needs, *needs)


def _backward(operation, link, dy, x, weight, rows, slot, staged, needs, *flags) -> tuple[Tensor | None, Tensor | None]:
    """`needs`: which gradients, of x and of the weight; `flags`: what the extension is told of that."""
    dx = torch.empty_like(x) if needs[0] else None
    dweight = weight.new_empty(weight.shape) if needs[1] else None
    more = dy.data_ptr(), _address(dx), _address(dweight), *flags
    link.run(operation, x, weight, rows, weight.shape[0], slot, staged, *more)
    return dx, dweight


def _all_reduced(link: Link, rows: Rows, features: int) -> tuple[int, int]:
    """Entries of `slot` and `staged`."""
    shares = ALL_REDUCE_BLOCKS * link.communicator.size  # of each block, rounded up
    return (rows.total + shares) * features, (not link.by_nccl) * rows.total * features


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
