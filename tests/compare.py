"""How tests compare a parallel result with the dense one, and count collectives."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tpfused.collectives import observe
from tpfused.sharding import shard_range


def own(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """What rank `rank` of `size` holds of `whole` along `dim`."""
    start, stop = shard_range(whole.shape[dim], size, rank)
    return whole.narrow(dim, start, stop - start)


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
