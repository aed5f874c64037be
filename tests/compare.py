"""How tests compare a parallel result with the dense one, and count collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed import Context
from tpfused.collectives import observe
from tpfused.placement import shard_info
from tpfused.sharding import shard_range

Results = dict[str, Tensor]


class Block:
    """The tensor-parallel block of `tp` consecutive ranks that a worker computes in.

    `mode` "group" makes layers with plain parameters, "mesh" with DTensors. `seed` becomes one that the block's ranks
    share and other blocks do not, so that a collective over the wrong ranks gives wrong numbers.
    """

    def __init__(self, ctx: Context, tp: int, mode: str, seed: int):
        self.device, self.tp, self.rank, self.mode = ctx.device, tp, ctx.rank % tp, mode
        self.group = ctx.group(tp)
        self.place = {"mesh": ctx.mesh(tp)} if mode == "mesh" else {"group": self.group}
        self.seed = seed + ctx.rank // tp

    def own(self, whole: Tensor, dim: int | None) -> Tensor:
        """What this rank holds of `whole` when it is split along `dim`; all of it for None."""
        if dim is None:
            return whole
        start, stop = shard_range(whole.shape[dim], self.tp, self.rank)
        return whole.narrow(dim, start, stop - start)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=self.device).to(dtype)

    def check_parameter(self, param: nn.Parameter, whole: Tensor, dim: int | None) -> None:
        """`param` has the bits of its part of `whole`, and says how it is split."""
        assert isinstance(param, nn.Parameter) and param.dtype == whole.dtype
        if self.mode == "mesh":
            assert isinstance(param, DTensor) and param.shape == whole.shape
            assert param.placements == (Replicate() if dim is None else Shard(dim),)
            assert torch.equal(param.full_tensor(), whole)
            assert torch.equal(param.to_local(), self.own(whole, dim))
            assert shard_info(param) is None
            return
        assert not isinstance(param, DTensor)
        assert torch.equal(param, self.own(whole, dim))
        info = shard_info(param)
        if dim is None or self.tp == 1:
            assert info is None
        else:
            assert (info.dim, info.size) == (dim, whole.shape[dim])
            assert (info.group.process_group, info.group.rank, info.group.size) == (self.group, self.rank, self.tp)


def strided(x: Tensor) -> Tensor:
    """The same values in a layout with no contiguous dimension."""
    return x.repeat_interleave(2, -1)[..., ::2].transpose(0, -1).contiguous().transpose(0, -1)


def results(function: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor) -> Results:
    """`function(**inputs)` as "out", and the gradient of each differentiable input by its name."""
    inputs = {
        name: None if x is None else x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()
    }
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    out = function(**inputs)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(actual: Results, function: Callable[..., Tensor], inputs: dict, grad: Tensor, part: Callable, what) -> None:
    """Each actual result against `part(name, whole)` of the dense function's.

    Float64 results must be equal up to the order of sums; others obey the project's tolerance, where the dense function
    runs both in float64 and in their dtype.
    """
    dtype = grad.dtype

    def dense(dtype: torch.dtype) -> Results:
        def cast(x):
            return x.to(dtype) if x.is_floating_point() else x

        return results(function, {name: cast(x) for name, x in inputs.items()}, grad.to(dtype))

    expected, eager = dense(torch.float64), None if dtype == torch.float64 else dense(dtype)
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, value in actual.items():
        reference = part(name, expected[name])
        if eager is None:
            assert_close(value, reference, f"{name} of {what}")
        else:
            assert_within_rule(value, reference, part(name, eager[name]), f"{name} of {what}")


def assert_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Float64 results of the same sums in another order: shapes equal, values within 1e-11 of the largest."""
    assert actual.dtype == expected.dtype == torch.float64, f"{what}: {actual.dtype}, {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if expected.numel():
        error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
        assert error <= 1e-11 * max(scale, 1.0), f"{what}: error {error} on values up to {scale}"


def assert_within_rule(actual: Tensor, expected: Tensor, eager: Tensor, what: str = "") -> None:
    """The project's tolerance: at most twice the error of eager torch in the same dtype, and two roundings.

    For the whole tensor and for each of its rows. `expected` is the float64 result, `eager` the dense one in the
    dtype of `actual`.
    """
    assert actual.dtype == eager.dtype, f"{what}: {actual.dtype}, not {eager.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    error, allowed = (actual.double() - expected).abs(), 2 * (eager.double() - expected).abs()
    scale, rounding = expected.abs(), 2 * torch.finfo(actual.dtype).eps
    parts = {"tensor": lambda x: x.max()}
    if expected.ndim > 1:
        parts["row"] = lambda x: x.amax(-1)
    for part, largest in parts.items():
        excess = largest(error) - largest(allowed) - rounding * largest(scale)
        assert excess.max() <= 0, f"{what}: a {part}'s error exceeds the rule by {excess.max().item()}"


@contextmanager
def collectives_made() -> Iterator[list[str]]:
    """The names of all collectives that this process makes inside, in order."""
    names: list[str] = []

    def note(name, tensor):
        names.append(name)
        return lambda: None

    with observe(note):
        yield names


@contextmanager
def refuses(error: type[Exception], *told: object) -> Iterator[None]:
    """The block raises `error`, naming each of `told`, before it has made any collective."""
    with collectives_made() as names:
        try:
            yield
        except (ValueError, TypeError) as raised:
            message = f"{type(raised).__name__}: {raised}"
            assert type(raised) is error, f"expected {error.__name__}, got {message}"
            missing = [item for item in told if str(item) not in str(raised)]
            assert not missing, f"{missing} not named by {message}"
        else:
            raise AssertionError(f"no {error.__name__} (should name {told})")
    assert not names, f"made {names} before it refused"
