"""The extension's operations on tensors: outputs and workspaces are allocated here, and nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpfused.overlap.communicator import TF32, TYPES, WORKSPACE, Communicator
from tpfused.overlap.tiers import TIERS
from tpfused.sharding import padded_shard_size

ALL_REDUCE_BLOCKS = 4  # of rows, at most
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

    def run(self, operation: str, x: Tensor, rows: Rows, k: int, n: int, slot: int, staged: int, *arguments) -> None:
        """Call the extension. In entries of x's dtype: `slot` of memory that peers write (not by NCCL), and `staged` of
        this rank's own."""
        c = self.communicator
        bytes_ = x.element_size()
        if not self.by_nccl:
            c.reserve(slot * bytes_)
        size = WORKSPACE + staged * bytes_ + 4096
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        kind = TF32 if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else TYPES[x.dtype]
        getattr(c.module, operation)(
            c.handle, TIERS.index(self.tier), torch.cuda.current_stream(x.device).cuda_stream,
            workspace.data_ptr(), size, kind, rows.tokens, rows.each, k, n, *arguments,
        )  # fmt: skip


def all_gather_matmul(
    link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, activation: int, keeps_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """-> ``activation(gathered x @ weight.T + bias)``, and what the activation is of, for GELU_TANH."""
    n, k = weight.shape
    slot = rows.padded(link.communicator.size) * k
    y = x.new_empty(rows.total, n)
    pre = torch.empty_like(y) if keeps_pre else None
    link.run(
        "all_gather_matmul", x, rows, k, n, slot, link.by_nccl * slot,
        x.data_ptr(), weight.data_ptr(), weight.stride(0), 0, y.data_ptr(), activation,
        _address(bias), _address(pre), 0,
    )  # fmt: skip
    return y, pre


def matmul_reduce_scatter(link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, own: int) -> Tensor:
    n, k = weight.shape
    slot = rows.padded(link.communicator.size) * n
    y = x.new_empty(own, n)
    link.run(
        "matmul_reduce_scatter", x, rows, k, n, slot, rows.total * n + link.by_nccl * slot,
        x.data_ptr(), weight.data_ptr(), weight.stride(0), 0, y.data_ptr(), _address(bias),
    )  # fmt: skip
    return y


def matmul_all_reduce(link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    n, k = weight.shape
    y = x.new_empty(rows.total, n)
    slot = (rows.total + ALL_REDUCE_BLOCKS * link.communicator.size) * n  # shares of each block are rounded up
    link.run(
        "matmul_all_reduce", x, rows, k, n, slot, (not link.by_nccl) * rows.total * n,
        x.data_ptr(), weight.data_ptr(), weight.stride(0), 0, y.data_ptr(), _address(bias), 0, 0, 0,
    )  # fmt: skip
    return y


def whole_input_backward(
    link: Link, dpre: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """-> the gradients of x, all-reduced, and of the weight, whose matmul hides that."""
    n, k = weight.shape
    dx = torch.empty_like(x)
    dweight = weight.new_empty(n, k) if needs_weight else None
    slot = (rows.total + ALL_REDUCE_BLOCKS * link.communicator.size) * k
    link.run(
        "matmul_all_reduce", dpre, rows, n, k, slot, (not link.by_nccl) * rows.total * k,
        dpre.data_ptr(), weight.data_ptr(), weight.stride(0), 1, dx.data_ptr(), 0,
        x.data_ptr(), _address(dweight), needs_weight,
    )  # fmt: skip
    return dx, dweight


def matmul_all_gather(
    link: Link, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, features: int, activation: int, pre: bool
) -> tuple[Tensor, Tensor | None]:
    """-> all ranks' `features`, and of this rank's own what the activation is of, for GELU_TANH."""
    n, k = weight.shape
    y = x.new_empty(rows.total, features)
    own_pre = x.new_empty(rows.total, n) if pre else None
    padded = padded_shard_size(features, link.communicator.size)
    staged = rows.total * padded * (1 + link.communicator.size)
    link.run(
        "matmul_all_gather", x, rows, k, features, rows.total * features, link.by_nccl * staged,
        x.data_ptr(), weight.data_ptr(), weight.stride(0), 0, y.data_ptr(), activation,
        _address(bias), _address(own_pre),
    )  # fmt: skip
    return y, own_pre


def column_backward(
    link: Link, dpre: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """-> the gradients of x (own rows) and of the weight."""
    n, k = weight.shape
    slot = rows.padded(link.communicator.size) * k
    dx = torch.empty_like(x) if needs_x else None
    dweight = weight.new_empty(n, k) if needs_weight else None
    link.run(
        "column_backward", dpre, rows, k, n, slot, rows.total * k + link.by_nccl * 2 * slot,
        dpre.data_ptr(), x.data_ptr(), weight.data_ptr(), weight.stride(0), _address(dx), _address(dweight),
        needs_x, needs_weight,
    )  # fmt: skip
    return dx, dweight


def row_backward(
    link: Link, dy: Tensor, x: Tensor, weight: Tensor, rows: Rows, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """-> the gradients of x (all rows) and of the weight."""
    n, k = weight.shape
    slot = rows.padded(link.communicator.size) * n
    dx = torch.empty_like(x) if needs_x else None
    dweight = weight.new_empty(n, k) if needs_weight else None
    link.run(
        "row_backward", dy, rows, k, n, slot, link.by_nccl * slot,
        dy.data_ptr(), x.data_ptr(), weight.data_ptr(), weight.stride(0), _address(dx), _address(dweight),
        needs_x, needs_weight,
    )  # fmt: skip
    return dx, dweight


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
