"""What a benchmark's case is: one piece of work, the ways to do it, what is right, and what no way can beat."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpfused.bench.measure import copy_buffers

Outputs = Sequence[Tensor]

# Another library's kernels, timed where it is installed.
OPTIONAL = {"liger": "liger_kernel"}


@dataclass(frozen=True)
class Setting:
    """Where and in what dtype a case is built; `compile` makes the compiled variant."""

    device: torch.device
    dtype: torch.dtype
    compile: Callable[[Callable], Callable]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Floor:
    """What no variant can beat: a call whose time, multiplied by `factor`, is the floor."""

    name: str
    call: Callable[[], object]
    factor: float = 1.0


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    Attributes:
        call: does it once, and returns its outputs.
        exact: the right outputs in float64, made from this variant's own, where they are not those of the whole case:
            dropout draws its own mask.
        twin: the variant whose error, in the same dtype, sets the scale of the allowed one.
        fallback: the same without autograd, for where a CUDA graph cannot capture `call`.
        comparable: whether it does all of the work. What does less is shown, and is never "the best other".
        note: what a reader of its numbers must know.
    """

    call: Callable[[], Tensor | Outputs]
    exact: Callable[[Outputs], Outputs] | None = None
    twin: str = "eager"
    fallback: Callable[[], Tensor | Outputs] | None = None
    comparable: bool = True
    note: str = ""


@dataclass(frozen=True)
class Work:
    """A case built on a device.

    Attributes:
        exact: the outputs in float64.
        amount: bytes that must be moved, or floating-point operations.
        unit: of the rate, "GB/s" or "TFLOP/s".
    """

    variants: dict[str, Variant]
    exact: Callable[[], Outputs]
    floor: Floor
    amount: float
    unit: str = "GB/s"


@dataclass(frozen=True)
class Case:
    """One operation at one shape, in one pass ("fwd", "bwd" or "fwd+bwd"). Building it imports the kernel."""

    op: str
    name: str
    direction: str
    variants: tuple[str, ...]
    build: Callable[[Setting], Work]
    quick: bool = False

    @property
    def label(self) -> str:
        return f"{self.op} {self.name} {self.direction}"


def outputs_of(result: Tensor | Outputs) -> list[Tensor]:
    """Every variant's outputs as a list, without their graph."""
    return [x.detach() for x in ([result] if isinstance(result, Tensor) else result)]


def call_of(direction: str, function: Callable, inputs: Outputs, grad: Tensor | None = None) -> Callable[[], Outputs]:
    """A call that does `direction` of ``function(*inputs)``, which is differentiated in all `inputs`.

    "fwd" runs without a graph; "training" is the same forward with one, and saves what backward needs; "bwd"
    differentiates one forward, that of the first call, again and again.
    """
    if direction == "fwd":

        def forward():
            with torch.no_grad():
                return function(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]  # of the same storage: every variant reads the same memory
    if direction == "training":
        return lambda: function(*leaves)
    if direction == "bwd":
        once = functools.cache(lambda: function(*leaves))
        return lambda: torch.autograd.grad(once(), leaves, grad, retain_graph=True)

    def both():
        y = function(*leaves)
        return (y, *torch.autograd.grad(y, leaves, grad))

    return both


def variants_of(
    direction: str, functions: dict[str, Callable], inputs: Outputs, grad: Tensor | None = None
) -> dict[str, Variant]:
    """Functions of the same inputs, by name, as variants."""
    return {name: Variant(call_of(direction, function, inputs, grad)) for name, function in functions.items()}


def exact_of(direction: str, function: Callable, inputs: Outputs, grad: Tensor | None = None) -> Callable[[], Outputs]:
    """The outputs of `call_of` from inputs in float64."""

    def exact():
        wide = None if grad is None else grad.double()
        return call_of(direction, function, [x.double() for x in inputs], wide)()

    return exact


def copy_floor(moved: float, device: torch.device) -> Floor:
    """The time in which a copy moves `moved` bytes, read and written together: a share of that of `copy_buffers`."""
    source, target = copy_buffers(device)
    return Floor("copy", lambda: target.copy_(source), moved / (2 * source.numel()))


def optional(module: str, name: str) -> Callable | None:
    """A function of a library that may be missing, or may be of a version without it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
