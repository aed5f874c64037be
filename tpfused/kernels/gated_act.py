"""``act(gate) * up``: SwiGLU, GEGLU (Shazeer, 2020, "GLU Variants Improve Transformer"), forward and backward in one
pass.

Floor, in values moved a result: forward 3 (gate, up, y), backward 5 (gate, up, dy; dgate, dup). Three layouts:

- packed: ``[..., 2F]``, gate and up alternating, as the layers store their rows; pairs are split in registers;
- halves: ``[..., 2F]``, all gates first;
- separate tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpfused.kernels.activations import ACTIVATIONS, activate, activate_and_derive
from tpfused.kernels.launch import (
    block_of,
    cdiv,
    compute_type,
    is_floating,
    is_half,
    launch,
    needs_kernel_device,
    on_device_of,
    register,
    rows_of,
)

# Features a program, at most: 16 bytes a thread. Packed and backward, four pairs a thread: with more, its gradients
# would be of other pairs than its inputs and would have to change threads. Forward, 16-byte stores are worth that.
BLOCK, PACKED_BACKWARD_BLOCK = 2048, 1024


@triton.jit
def _load_pair(gate_row, up_row, start, width, COMPUTE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """gate and up of `BLOCK` features from `start`; packed, they are one contiguous load. `width`: of a row of gate."""
    if PACKED:
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_row + at, mask=at < width, other=0.0).to(COMPUTE)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        at = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_row + at, mask=at < width, other=0.0).to(COMPUTE)
        up = tl.load(up_row + at, mask=at < width, other=0.0).to(COMPUTE)
    return gate, up


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, features, width, blocks, gate_stride, up_stride,
    ACT: tl.constexpr, HALF: tl.constexpr, COMPUTE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, width, COMPUTE, PACKED, BLOCK)
    y = activate(gate, ACT, HALF) * up
    at = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * features + at, y.to(y_ptr.dtype.element_ty), mask=at < features)


@triton.jit
def _backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, features, width, blocks,
    gate_stride, up_stride, dy_stride, out_stride,
    ACT: tl.constexpr, HALF: tl.constexpr, COMPUTE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, width, COMPUTE, PACKED, BLOCK)
    at = start + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + at, mask=at < features, other=0.0).to(COMPUTE)
    value, slope = activate_and_derive(gate, ACT, HALF)
    dgate = (dy * up * slope).to(dgate_ptr.dtype.element_ty)
    dup = (dy * value).to(dgate_ptr.dtype.element_ty)
    if PACKED:
        both = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(dgate_ptr + row * out_stride + at, both, mask=at < width)
    else:
        tl.store(dgate_ptr + row * out_stride + at, dgate, mask=at < features)
        tl.store(dup_ptr + row * out_stride + at, dup, mask=at < features)


def gated_act(gate_up: Tensor, up: Tensor | None = None, *, activation: str = "silu", packed: bool = True) -> Tensor:
    """``act(gate) * up``, computed in float32 (float64 for float64) and rounded once. Differentiable.

    Args:
        gate_up: ``[..., 2F]``: gate and up alternating, or with ``packed=False`` all gates first. With `up`, the gate
            alone, ``[..., F]``.
        up: ``[..., F]``.
        activation: of the gate: "silu" (SwiGLU), "gelu" (erf) or "gelu_tanh" (GEGLU), "relu" (ReGLU).

    Returns:
        ``[..., F]`` of the inputs' dtype.

    Raises:
        ValueError: an odd last dimension, shapes or devices that differ, an unknown activation.
        TypeError: dtypes that differ or are not floating.
    """
    if activation not in ACTIVATIONS or activation is None:
        raise ValueError(f"activation must be one of {[name for name in ACTIVATIONS if name]}, not {activation!r}")
    if not is_floating(gate_up):
        raise TypeError(f"gated_act needs a floating-point tensor, not {gate_up.dtype}")
    if gate_up.ndim == 0 or (up is None and gate_up.shape[-1] % 2):
        raise ValueError(f"gate and up together need an even last dimension, not shape {tuple(gate_up.shape)}")
    if up is not None:
        if up.dtype != gate_up.dtype:
            raise TypeError(f"gate is {gate_up.dtype}, up {up.dtype}")
        if up.shape != gate_up.shape or up.device != gate_up.device:
            raise ValueError(
                f"gate of shape {tuple(gate_up.shape)} on {gate_up.device}, "
                f"but up of shape {tuple(up.shape)} on {up.device}"
            )
    needs_kernel_device(gate_up, "gated_act")
    return _gated_act(gate_up, up, packed or up is not None, ACTIVATIONS[activation])


def _blocks(features: int, most: int) -> tuple[int, int]:
    block = block_of(features, most)
    return block, cdiv(features, block)


def _parts(gate: Tensor, up: Tensor | None, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Gate and up: views of the halves, or up None where `gate` is both, packed."""
    return gate.chunk(2, dim=-1) if up is None and not packed else (gate, up)


def gated_act_forward(gate: Tensor, up: Tensor | None, packed: bool, activation: int) -> Tensor:
    """`up` None: `gate` is both, in the way that `packed` says."""
    y = gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))
    if y.numel() == 0:
        return y
    gate, up = rows_of(*_parts(gate, up, packed))
    packed = up is None
    features = gate.shape[1] // (1 + packed)
    block, blocks = _blocks(features, BLOCK)
    with on_device_of(y):
        launch(
            _forward_kernel, (gate.shape[0] * blocks,),
            gate, gate if packed else up, y, features, gate.shape[1], blocks,
            gate.stride(0), 0 if packed else up.stride(0),
            ACT=activation, HALF=is_half(y), COMPUTE=compute_type(y), PACKED=packed, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return y


def _fake_forward(gate, up, packed, activation):
    return gate.new_empty(*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))


def gated_act_backward(
    gate: Tensor, up: Tensor | None, dy: Tensor, packed: bool, activation: int
) -> tuple[Tensor, Tensor]:
    """-> the gradients of `gate` and `up`; the second is empty where the first is both."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = dgate.new_empty(gate.shape if up is not None else (0,))
    if dgate.numel() == 0:
        return dgate, dup
    in_halves = up is None and not packed
    out, out_up = _parts(dgate, dup if up is not None else None, packed)
    # The halves' gradients are strided, however the halves lie.
    gate, up, dy = rows_of(*_parts(gate, up, packed), dy, one_row=not in_halves)
    packed = up is None
    features = dy.shape[1]
    block, blocks = _blocks(features, PACKED_BACKWARD_BLOCK if packed else BLOCK)
    with on_device_of(dgate):
        launch(
            _backward_kernel, (dy.shape[0] * blocks,),
            gate, gate if packed else up, dy, out, out if packed else out_up, features, gate.shape[1], blocks,
            gate.stride(0), 0 if packed else up.stride(0), dy.stride(0), (1 + (packed or in_halves)) * features,
            ACT=activation, HALF=is_half(dy), COMPUTE=compute_type(dy), PACKED=packed, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return dgate, dup


def _fake_backward(gate, up, dy, packed, activation):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape if up is not None else (0,))


_gated_act_backward = register("gated_act_backward", gated_act_backward, _fake_backward)


def _save_for_backward(ctx, inputs, output):
    gate, up, ctx.packed, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gradient(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = _gated_act_backward(gate, up, dy, ctx.packed, ctx.activation)
    return dgate, None if up is None else dup, None, None


_gated_act = register("gated_act", gated_act_forward, _fake_forward, _save_for_backward, _gradient)
