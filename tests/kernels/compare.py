"""A kernel against its twin in float64, within the project's tolerance."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_matches(kernel: Callable, reference: Callable, inputs: list[Tensor | None], what: str = "") -> None:
    """Output and the gradient of each floating input, against float64 and eager torch in the inputs' dtype."""
    dtype = next(x.dtype for x in inputs if x is not None and x.is_floating_point())
    actual = _results(kernel, inputs, None)
    grad = torch.randn_like(actual[0])
    actual = _results(kernel, inputs, grad)
    expected = _results(reference, [_cast(x, torch.float64) for x in inputs], grad.double())
    eager = _results(reference, inputs, grad)
    for index, (a, e, t) in enumerate(zip(actual, expected, eager, strict=True)):
        assert a.dtype == dtype and a.shape == e.shape, f"{what} {index}: {a.dtype} {a.shape}"
        if a.numel() == 0:
            continue
        # In float64 the twin is no more exact than the kernel: a few operations' roundings. In float32 how lucky eager
        # is with one small sum says little.
        roundings = {torch.float64: 16, torch.float32: 8}.get(dtype, 2)
        rounding = roundings * torch.finfo(dtype).eps * e.abs().max()
        error, allowed = (a.double() - e).abs().max(), 2 * (t.double() - e).abs().max() + rounding
        assert error <= allowed, f"{what} {index} in {dtype}: error {error:.2e}, allowed {allowed:.2e}"


def _cast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x.to(dtype) if x is not None and x.is_floating_point() else x


def _results(function: Callable, inputs: list[Tensor | None], grad: Tensor | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) if x is not None else None for x in inputs]
    out = function(*leaves)
    if grad is None:
        return [out.detach()]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]
