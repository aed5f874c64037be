"""The extension's operations on tensors: outputs and workspaces are allocated here, and nothing is checked."""

from __future__ import annotations

import torch
from torch import Tensor

from tpfused.kernels.matmul import in_tf32
from tpfused.overlap.communicator import TF32, TYPES, WORKSPACE, Communicator, rounded_up
from tpfused.overlap.operators import Needs
from tpfused.overlap.plans import NormOperands, Operands, Plan
from tpfused.overlap.tiers import TIERS, exact
from tpfused.sharding import padded_shard_size

ALL_REDUCE_BLOCKS = 4  # of rows, at most: `Blocks::most` of csrc/blocks.h
MOST_NORMALIZED = 32 * 2**10  # bytes of a row, in multiples of 16: `AddNorm` of csrc/small_sums.h
# Bytes that one kernel gathers: of all ranks' rows (`most_gathered` of csrc/small_rows.h and, at most as many, the own
# ones), and of a rank's features (`most_features_gathered`).
MOST_GATHERED, MOST_FEATURES_GATHERED = 2 * 2**20, 8 * 2**20
# Bytes of a sum, for which there is room beside any slot: `one_shot_bytes` of csrc/small_sums.cu.
MOST_REDUCED = 256 * 2**10
MOST_MESSAGES = 11  # batches of rows that NCCL gathers one by one, at most: `most_messages` of csrc/transfers.h
RELU, GELU_TANH = 1, 2  # what a matmul's epilogue can do
KEPT_WORKSPACE = 80 * 2**20  # bytes; to allocate more takes no time beside the matmuls that need it
MOST_STREAMS = 4  # for which a group keeps a workspace: it is used in one stream's order

Link = tuple[Communicator, str]  # and its tier
Layout = tuple[
    int, int, bool
]  # a weight's address, the entries from one row to the next, and whether those are of [k, n]
NOWHERE = 0, 0, False


def all_gather_matmul(
    link: Link,
    plan: Plan,
    x: Tensor,
    weights: Operands,
    biases: Operands,
    epilogue: int,
    keeps_pre: bool,
    keeps_gathered: bool,
) -> tuple[list[Tensor], list[Tensor | None], Tensor | None]:
    """-> ``epilogue(gathered x @ weight.T + bias)`` of each weight, what a GELU_TANH is of, and the gathered x, if
    kept."""
    ys, pres, columns, held = [], [], [], []
    for weight, bias in zip(weights, biases, strict=True):
        (weight, layout), bias = _matrix(weight), _vector(bias)
        n = weight.shape[0]
        y = x.new_empty(*plan.leading or (plan.total,), n)
        pre = torch.empty_like(y) if keeps_pre and epilogue == GELU_TANH else None
        columns.append((n, *layout, y.data_ptr(), epilogue, _address(bias), _address(pre)))
        held.append((weight, bias))
        ys.append(y)
        pres.append(pre)
    gathered = x.new_empty(plan.total, plan.inputs) if keeps_gathered else None
    slot = plan.padded * plan.inputs
    sizes = slot, _gathered(link, plan, slot, x)
    _run(link, "all_gather_matmul", plan, x, *sizes, 0, NOWHERE, _address(gathered), columns)
    return ys, pres, gathered


def column_backward(
    link: Link, plan: Plan, needs: Needs, dpres: Operands, x: Tensor, weights: Operands
) -> tuple[Tensor | None, list[Tensor | None]]:
    """-> the gradients of x (own rows) and of the weights. x: all rows, if the plan `saves_gathered`."""
    dx = x.new_empty(plan.own, plan.inputs) if needs.x else None
    dweights, columns, held = [], [], []
    for index, (dpre, weight) in enumerate(zip(dpres, weights, strict=True)):
        weight, layout = _matrix(weight, needs, plan)
        dweight = _new_dweight(needs, weight, layout, index)
        columns.append((weight.shape[0], *layout, dpre.data_ptr(), _address(dweight)))
        held.append(weight)
        dweights.append(dweight)
    slot = plan.padded * plan.inputs
    staged = plan.total * plan.inputs + _gathered(link, plan, slot, x) + (slot if link[1] == "nccl" else 0)
    more = plan.saves_gathered, _address(dx), needs.x, _wants_dweight(needs), columns
    _run(link, "column_backward", plan, x, slot, staged, 0, NOWHERE, *more)
    return dx, dweights if needs.main_grads is None else [None] * len(dweights)


def matmul_reduce_scatter(
    link: Link, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    (weight, layout), bias = _matrix(weight), _vector(bias)
    residual = None if residual is None else _aligned(residual)
    n = weight.shape[0]
    y = x.new_empty(*plan.leading or (plan.own,), n)
    slot = plan.padded * n
    staged = plan.total * n + (slot if link[1] == "nccl" else 0)
    more = n, layout, y.data_ptr(), _address(residual), _address(bias)
    _run(link, "matmul_reduce_scatter", plan, x, slot, staged, *more)
    return y


def row_backward(
    link: Link, plan: Plan, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """-> the gradients of x (all rows) and of the weight."""
    slot = plan.padded * weight.shape[0]
    sizes = slot, _gathered(link, plan, slot, x)
    return _backward("row_backward", link, plan, needs, dy, x, weight, *sizes, needs.x, _wants_dweight(needs))


def matmul_all_reduce(link: Link, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (weight, layout), bias = _matrix(weight), _vector(bias)
    n = weight.shape[0]
    y = x.new_empty(*plan.leading or (plan.total,), n)
    more = n, layout, y.data_ptr(), _address(bias)
    _run(link, "matmul_all_reduce", plan, x, *_all_reduced(link, plan, n), *more)
    return y


def matmul_all_reduce_norm(
    link: Link, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: NormOperands
) -> tuple[Tensor, Tensor]:
    """-> the residual and what is added to it, and that normalised: rows of at most MOST_NORMALIZED bytes."""
    (weight, layout), bias, residual = _matrix(weight), _vector(bias), _aligned(residual)
    norm_weight, norm_bias = _aligned(norm.weight), None if norm.bias is None else _aligned(norm.bias)
    n, total = weight.shape[0], torch.empty_like(residual)
    y = torch.empty_like(residual)
    slot, staged = _all_reduced(link, plan, n)
    more = (
        n, layout, _address(bias), residual.data_ptr(), total.data_ptr(), y.data_ptr(),
        norm_weight.data_ptr(), _address(norm_bias), norm.eps, norm.kind == "layernorm",
    )  # fmt: skip
    _run(link, "matmul_all_reduce_norm", plan, x, slot, staged + plan.total * n, *more)
    return total, y


def whole_input_backward(
    link: Link, plan: Plan, needs: Needs, dpre: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """-> the gradients of x, all-reduced, and of the weight, whose matmul hides that."""
    sizes = _all_reduced(link, plan, plan.inputs)
    return _backward("whole_input_backward", link, plan, needs, dpre, x, weight, *sizes, _wants_dweight(needs))


def matmul_all_gather(
    link: Link, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: int, keeps_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """-> all ranks' features, and of this rank's own what a GELU_TANH is of, if kept."""
    (weight, layout), bias = _matrix(weight), _vector(bias)
    size, features = link[0].size, plan.outputs
    y = x.new_empty(*plan.leading or (plan.total,), features)
    pre = x.new_empty(plan.total, weight.shape[0]) if keeps_pre and epilogue == GELU_TANH else None
    own = plan.total * padded_shard_size(features, size)
    if link[1] == "nccl":
        staged = own * (1 + size)
    else:
        staged = own if exact[-1] else min(own, MOST_FEATURES_GATHERED // x.element_size())
    more = features, layout, y.data_ptr(), epilogue, _address(bias), _address(pre)
    _run(link, "matmul_all_gather", plan, x, plan.total * features, staged, *more)
    return y, pre


def all_reduce(communicator: Communicator, x: Tensor) -> Tensor:
    """By peers' memory: at most MOST_REDUCED bytes, in multiples of 16."""
    x = _aligned(x)
    y = torch.empty_like(x)
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    _call(communicator, "all_reduce", stream, TYPES[x.dtype], x.numel(), x.data_ptr(), y.data_ptr())
    return y


def _backward(
    operation: str, link: Link, plan: Plan, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor, slot: int, staged: int,
    *flags: int,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """-> the gradients of x and of the weight. `flags`: what the extension is told of `needs`."""
    (weight, layout), dy = _matrix(weight, needs, plan), _aligned(dy)
    dx = x.new_empty(x.shape) if needs.x else None
    dweight = _new_dweight(needs, weight, layout)
    more = dy.data_ptr(), _address(dx), _address(dweight), *flags
    _run(link, operation, plan, x, slot, staged, weight.shape[0], layout, *more)
    return dx, dweight if needs.main_grads is None else None


def _new_dweight(needs: Needs, weight: Tensor, layout: Layout, index: int = 0) -> Tensor | None:
    """What the extension writes or adds a weight's gradient to, of the weight's layout."""
    if not needs.weights:
        return None
    if needs.main_grads is not None:
        return needs.main_grads[index]
    n, k = weight.shape
    return weight.new_empty(k, n).t() if layout[2] else weight.new_empty(n, k)


def _wants_dweight(needs: Needs) -> int:
    """What the extension does there: 0 nothing, 1 write, 2 add in float32."""
    return needs.weights * (1 if needs.main_grads is None else 2)


def _gathered(link: Link, plan: Plan, entries: int, x: Tensor) -> int:
    """How much of `staged` is for the plan's `entries` that are gathered: by copy engines, they stay where peers write
    them; by NCCL, of many batches one rank's at a time come together before they are put to their places."""
    if link[1] == "nccl":
        return entries + (entries // link[0].size if plan.batch > MOST_MESSAGES else 0)
    return min(entries, MOST_GATHERED // x.element_size())


def _all_reduced(link: Link, plan: Plan, features: int) -> tuple[int, int]:
    """Entries of `slot` and `staged`."""
    entries = (plan.total + ALL_REDUCE_BLOCKS * link[0].size) * features  # each block's shares are rounded up
    if link[1] == "nccl":
        return entries, 4 * entries if exact[-1] else 0
    return entries, plan.total * features


def _run(
    link: Link, operation: str, plan: Plan, x: Tensor, slot: int, staged: int,
    n: int, weight: Layout, *more,
) -> None:  # fmt: skip
    """Call the extension. In entries of x's dtype: `slot` of memory that peers write (not by NCCL), and `staged` of
    this rank's own. `n`: output features, all ranks' where they are gathered."""
    (communicator, tier), x = link, _aligned(x)
    dtype, itemsize = x.dtype, x.element_size()
    if tier == "nccl":
        communicator.connect_nccl(operation)
    else:
        communicator.reserve(slot * itemsize, operation)
    communicator.set_deterministic(exact[-1])
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    kind = TF32 if in_tf32(dtype) else TYPES[dtype]
    size = WORKSPACE[kind] + staged * itemsize + 4096
    workspace = _workspace(communicator.workspaces, x, stream, size, stays=not plan.compiled)
    _call(
        communicator, operation, TIERS.index(tier), stream, workspace.data_ptr(), workspace.numel(), kind,
        plan.tokens, plan.each, plan.batch, x.shape[-1], n, x.data_ptr(), *weight, *more,
    )  # fmt: skip


def _call(communicator: Communicator, function: str, *arguments) -> None:
    try:
        getattr(communicator.module, function)(communicator.handle, *arguments)
    except RuntimeError:
        communicator.check_alive()  # says more: which operation was broken off, or which ranks were missing in it
        raise


def _workspace(kept: dict[int, Tensor], x: Tensor, stream: int, size: int, stays: bool = True) -> Tensor:
    """At least so many bytes, for what is on `stream` next: those `kept` for it, or more, which are kept then."""
    # What a graph is captured from, or compiled code lends to run before it captures, is not for others.
    if not stays or size > KEPT_WORKSPACE or torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(size, dtype=torch.uint8, device=x.device)
    workspace = kept.get(stream)
    if workspace is None or workspace.numel() < size:
        kept.pop(stream, None)
        if len(kept) >= MOST_STREAMS:
            kept.pop(next(iter(kept)), None)  # other threads do this, too
        workspace = torch.empty(min(rounded_up(size), KEPT_WORKSPACE), dtype=torch.uint8, device=x.device)
        kept[stream] = workspace
    return workspace


def _matrix(weight: Tensor, needs: Needs | None = None, plan: Plan | None = None) -> tuple[Tensor, Layout]:
    """A weight with rows, or columns, that cuBLASLt can step over: they must not overlap. Backward gives its `needs`
    and plan: a `main_grad` has rows, and compiled code was told that gradients have them."""
    n, k = weight.shape
    if weight.is_contiguous():
        return weight, (weight.data_ptr(), k, False)
    along_n, along_k = weight.stride()
    if along_k == 1 and (along_n >= k or n == 1):
        return weight, (weight.data_ptr(), max(along_n, k), False)
    has_columns = along_n == 1 and (along_k >= n or k == 1)  # a Conv1D's weight, which is [in, out]
    if has_columns and (needs is None or (needs.main_grads is None and not plan.compiled)):
        return weight, (weight.data_ptr(), max(along_k, n), True)
    weight = weight.contiguous()
    return weight, (weight.data_ptr(), k, False)


def _vector(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None else bias.contiguous()


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
