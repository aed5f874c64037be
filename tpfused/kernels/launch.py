"""What every kernel's launcher needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from tpfused.autograd import eager_apply, once_differentiable


def register(
    name: str,
    forward: Callable,
    fake: Callable,
    setup_context: Callable | None = None,
    gradient: Callable | None = None,
) -> Callable:
    """Make `forward` the operator ``torch.ops.tpfused.<name>``, and return what to call.

    `fake` gives the outputs' shapes; `setup_context(ctx, inputs, output)` and `gradient(ctx, *grads)`, if given, its
    derivative. The dispatcher costs as much host time as a small kernel takes (90 us a call, measured with torch 2.11),
    so eager calls on plain tensors go round it, through an autograd.Function made of the same functions. Compiled code
    and tensor subclasses go through it.
    """
    operator = torch.library.custom_op(f"tpfused::{name}", forward, mutates_args=())
    operator.register_fake(fake)
    eager = forward
    if gradient is not None:
        operator.register_autograd(gradient, setup_context=setup_context)

        # With a setup_context of its own, a Function binds its arguments by name at each call: another 70 us.
        def forward_and_save(ctx, *args):
            output = forward(*args)
            setup_context(ctx, args, output)
            return output

        methods = {
            "forward": staticmethod(forward_and_save),
            "backward": staticmethod(once_differentiable(gradient)),
        }
        eager = eager_apply(type(name, (torch.autograd.Function,), methods))

    def call(*args):
        plain = not torch.compiler.is_compiling() and all(
            type(arg) in (Tensor, nn.Parameter) for arg in args if isinstance(arg, Tensor)
        )
        return eager(*args) if plain else operator(*args)

    return call


def on_device_of(x: Tensor):
    """Launch on `x`'s device, which need not be the current one (and none at all under the interpreter)."""
    return _HERE if not x.is_cuda or x.get_device() == torch.cuda.current_device() else torch.cuda.device_of(x)


_HERE = nullcontext()  # to enter and leave a device that is the current one takes 10 us
INTERPRET = triton.knobs.runtime.interpret  # read once: the knob looks into the environment each time


def cdiv(a: int, b: int) -> int:
    """`triton.cdiv` without what that does for compiled code, which is slow from the host."""
    return -(-a // b)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args, num_warps: int, num_stages: int = 3, **constants):
    """``kernel[grid](*args, **constants)`` with less host time: the compiled kernel is looked up by what Triton
    specialises on, without binding arguments by name. `constants` are the kernel's last parameters.
    """
    if INTERPRET:
        return kernel[grid](*args, **constants)
    values = [constants[name] for name in kernel.arg_names[len(args) :]]
    device = torch.cuda.current_device()
    key = [id(kernel), device, num_warps, num_stages, *values]
    for x in args:  # in line: a call for each would cost as much again
        kind = type(x)
        if kind is int:
            key.append((x == 1, x % 16 == 0, -(2**31) <= x < 2**31))
        elif kind is float or x is None:
            key.append(kind)
        elif isinstance(x, Tensor):
            key.append((x.dtype, x.data_ptr() % 16 == 0))
        else:  # a TMA descriptor; its layout follows from these
            key.append((x.base.dtype, *x.block_shape))
    key = tuple(key)
    compiled = _compiled.get(key)
    if compiled is None:
        with relaxed_capture() if torch.cuda.is_current_stream_capturing() else _HERE:
            _compiled[key] = kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*args, *values, stream=torch._C._cuda_getCurrentRawStream(device))


# By what Triton compiles for: dtype and 16-byte alignment of a pointer, dtype and block of a descriptor, whether an
# integer is 1 or a multiple of 16, and how wide it is.
_compiled: dict[tuple, object] = {}


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Within it, this thread may load kernels and allocate while a stream of it is captured: CUDA forbids that unless
    the thread says that it is not to be captured. Attention with dropout is one way in a graph and another in the calls
    before.
    """
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))  # leaves the former mode in its place
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) on Hopper; (0, 0) on the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def needs_kernel_device(x: Tensor, what: str) -> None:
    """Refuse a tensor no kernel can run on: Triton's kernels run on CUDA, or anywhere under ``TRITON_INTERPRET=1``."""
    if not (x.is_cuda or (INTERPRET and x.device.type == "cpu")):
        raise ValueError(f"{what}: the Triton kernel needs a CUDA tensor, not one on {x.device}")


def is_floating(x: Tensor) -> bool:
    """Of a dtype that the kernels compute in: 16, 32 or 64 bits."""
    return x.is_floating_point() and x.dtype.itemsize >= 2


def block_of(size: int, limit: int) -> int:
    """The power of two that covers `size`, from 16 to `limit`."""
    return min(limit, max(16, 1 << (size - 1).bit_length()))


def compute_type(x: Tensor) -> tl.dtype:
    """What a kernel computes in: float32, or float64 for float64 input."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def is_half(x: Tensor) -> bool:
    """Whether results are rounded to 16 bits: `activations` then has cheaper forms."""
    return x.dtype in (torch.float16, torch.bfloat16)


def autocast_to(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors as torch's own matmuls would take them: under autocast in its dtype, but for float64."""
    kind = next(x.device.type for x in tensors if x is not None)
    if not _autocasts(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x if x is None or not is_floating(x) or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def without_autocast(x: Tensor):
    """For a matmul whose operands have the dtype that they are to be multiplied in."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext()


def _autocasts(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def unit_stride(x: Tensor) -> Tensor:
    """`x` itself where the entries of its last dimension are neighbours, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_of(*tensors: Tensor | None, one_row: bool = True) -> tuple[Tensor | None, ...]:
    """Tensors of equal leading dimensions as ``[rows, features]`` with unit feature stride: views where possible.

    All contiguous, they become a single row if `one_row`: an elementwise kernel then has no ragged row ends.
    """
    given = [x for x in tensors if x is not None]
    if one_row and all(x.is_contiguous() for x in given):
        return tuple(None if x is None else x.view(1, -1) for x in tensors)
    return tuple(None if x is None else unit_stride(x.reshape(-1, x.shape[-1])) for x in tensors)
