"""A kernel against its twin in float64, within the project's tolerance."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_matches(kernel: Callable, reference: Callable, inputs: list[Tensor | None], what: str = "") -> None:
    """Output and the gradient of each floating input, against float64 and eager torch in the inputs' dtype."""
    dtype = next(x.dtype for x in inputs if x is not None and x.is_floating_point())
    grad = torch.randn_like(reference(*inputs))
    actual = _results(kernel, inputs, grad)
    expected = _results(reference, [_cast(x, torch.float64) for x in inputs], grad.double())
    eager = _results(reference, inputs, grad)
    for index, (a, e, t) in enumerate(zip(actual, expected, eager, strict=True)):
        assert a.dtype == dtype and a.shape == e.shape, f"{what} {index}: {a.dtype} {a.shape}"
        if a.numel() == 0:
            continue
        assert_within(a, e, t, f"{what} {index}")
        if dtype.itemsize == 2 and index == 0:  # a gradient's row may be one small difference, and eager lucky with it
            assert_within(a, e, t, f"{what} {index}, a row", dim=-1)


def assert_within(
    actual: Tensor, exact: Tensor, eager: Tensor, what: str, dim: int | None = None, roundings: int | None = None
) -> None:
    """``max|actual - exact| <= 2 max|eager - exact| + 2 eps max|exact|``, over everything or along `dim`.

    In float64 "exact" is no more so than the kernel, and in float32 how lucky eager is with one small sum says little:
    there a few operations' roundings are allowed, or so many as `roundings` says.
    """
    dtype = actual.dtype
    info = torch.finfo(dtype)
    roundings = roundings or {2: 2, 4: 8, 8: 32}[dtype.itemsize]
    dims = tuple(range(exact.ndim)) if dim is None else dim
    error = (actual.double() - exact).abs().amax(dims)
    # What is below the normal numbers is rounded to their spacing.
    rounding = roundings * info.eps * exact.abs().amax(dims).clamp(min=info.smallest_normal)
    allowed = 2 * (eager.double() - exact).abs().amax(dims) + rounding
    worst = (error - allowed).argmax()
    told = f"error {error.flatten()[worst]:.2e}, allowed {allowed.flatten()[worst]:.2e}"
    assert (error <= allowed).all(), f"{what} in {dtype}: {told}"  # NaN too


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x.to(dtype) if x is not None and x.is_floating_point() else x


def _results(function: Callable, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) if x is not None else None for x in inputs]
    out = function(*leaves)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]
