"""What a layer refuses before it computes or communicates: the same check on every rank, errors that name the
numbers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tpfused.group import TPGroup
from tpfused.parameter import check_integer, check_size
from tpfused.placement import is_dtensor
from tpfused.reference import autocast_dtype
from tpfused.sharding import shard_size

ACTIVATIONS = (None, "gelu", "gelu_tanh", "relu", "silu")


def check_activation(activation: str | None, what: str = "activation") -> None:
    if activation not in ACTIVATIONS:
        known = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"{what} must be one of {known}, not {activation!r}")


class AssertedError(ValueError, AssertionError):
    """A `ValueError` that programs, and tests of theirs, can catch as the `AssertionError` of the library whose names
    they use, too."""


def check_boolean(value: bool, what: str) -> None:
    """Refuse what is neither True nor False: "no" would count as yes."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}")


def check_booleans(annotated: Callable, values: Mapping[str, object]) -> None:
    """`check_boolean` of all that a function (`values`: its `locals()`) or a dataclass declares as bool."""
    for name, kind in annotated.__annotations__.items():
        if kind == "bool":  # in words, where annotations are postponed
            check_boolean(values[name], name)


def check_backend(backend: str | None) -> None:
    if backend not in (None, "reference"):
        raise ValueError(f"backend must be None or 'reference', not {backend!r}")


def check_dropout(dropout: float, what: str) -> None:
    check_number(dropout, what)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{what} must be in [0, 1), not {dropout}")


def check_rope_theta(theta: float) -> None:
    check_number(theta, "rope_theta")
    if not 0 < theta < float("inf"):
        raise ValueError(f"rope_theta must be positive and finite, not {theta}")


def check_tensor(x: Tensor, what: str) -> None:
    """Refuse what is no tensor: a number, a list, an array of numpy's, nothing."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, not {type(x).__name__} {reprlib.repr(x)}")


def kind_of(x: object) -> str:
    """What errors say they got: a tensor's dtype, or the type of something else, which may have a dtype too."""
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, not {type(model).__name__} {model!r}")


def check_input(x: Tensor, features: int, weight: Tensor, layer: str, part_of: int | None = None) -> None:
    """`x` is ``[..., features]``, this rank's of `part_of` if given, on the weight's device and of its dtype (any of 16
    or 32 bits under autocast)."""
    check_dense(x, layer, "the input")
    if x.ndim < 1 or x.shape[-1] != features:
        part = ""
        if part_of not in (None, features):
            part = f", this rank's part of {part_of} as a column-parallel layer leaves it"
            part += " (input_is_parallel=False takes a whole one)"
        raise ValueError(
            f"{layer}: expected an input of {features} features in its last dimension{part}, got shape {tuple(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(f"{layer}: the input is on {x.device}, the weight on {weight.device}")
    check_floating(x, layer, "the input")
    if x.dtype != weight.dtype and not _are_cast(x, weight):
        raise TypeError(f"{layer}: the input is {x.dtype}, the weight {weight.dtype}")


def check_logits(logits: Tensor, vocab_size: int | None, operation: str) -> None:
    """`logits` is ``[..., vocabulary shard]``, floating; how wide, `tpfused.layers.vocabulary` compares."""
    check_dense(logits, operation, "the logits")
    if vocab_size is not None:
        check_size(vocab_size, f"{operation}: vocab_size")
    check_floating(logits, operation, "the logits")
    if logits.ndim < 1:
        raise ValueError(f"{operation}: logits must have a vocabulary dimension, got a single number")


def check_number(number: float, what: str) -> None:
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise TypeError(f"{what} must be a number, not {number!r}")
    try:
        float(number)
    except OverflowError:
        raise ValueError(f"{what} is an integer that no float can hold") from None


def check_eps(eps: float, what: str) -> None:
    check_number(eps, what)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"{what} must be at least 0, and finite, not {eps}")


def check_dense(x: Tensor, layer: str, what: str) -> None:
    """Refuse what this rank can't compute with as it is: what is no tensor, a sparse or nested one, or a DTensor."""
    if not isinstance(x, Tensor):
        check_tensor(x, f"{layer}: {what}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{layer}: {what} must be a dense tensor, not a {kind} one")
    if type(x) is not Tensor and is_dtensor(x):
        raise TypeError(f"{layer}: {what} must be this rank's tensor, not a DTensor: give its x.to_local()")


def check_floating(x: Tensor, layer: str, what: str) -> None:
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise TypeError(f"{layer}: {what} must be floating-point of at least 16 bits, not {x.dtype}")


def check_residual(residual: Tensor, shape: Sequence[int], x: Tensor, layer: str) -> None:
    """`residual` has the `shape` of what it is added to, or it would be broadcast; it is on x's device."""
    check_dense(residual, layer, "the residual")
    if residual.shape != shape or residual.device != x.device:
        raise ValueError(
            f"{layer}: the residual, {tuple(residual.shape)} on {residual.device}, must be {tuple(shape)} on {x.device}"
        )


def _are_cast(x: Tensor, other: Tensor) -> bool:
    """Whether autocast makes two dtypes one."""
    return autocast_dtype(x) is not None and all(dtype.itemsize in (2, 4) for dtype in (x.dtype, other.dtype))


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, operation: str) -> None:
    """`weight` is ``[n, k]``, `x` as `check_input` says of k features, and `bias` ``[n]``, like the weight."""
    check_dense(weight, operation, "the weight")
    if weight.ndim != 2:
        raise ValueError(
            f"{operation}: the weight must be a matrix [out features, in features], not shape {tuple(weight.shape)}"
        )
    check_input(x, weight.shape[1], weight, operation)
    if bias is not None:
        check_vector(bias, weight, operation, "the bias")


def check_vector(x: Tensor, weight: Tensor, operation: str, what: str) -> None:
    """`x` is ``[n]``, like the weight ``[n, k]``."""
    check_dense(x, operation, what)
    if x.shape != weight.shape[:1]:
        raise ValueError(
            f"{operation}: {what} must have {weight.shape[0]} features like the weight, not shape {tuple(x.shape)}"
        )
    if x.device != weight.device:
        raise ValueError(f"{operation}: {what} is on {x.device}, the weight on {weight.device}")
    if x.dtype != weight.dtype and not _are_cast(weight, x):
        raise TypeError(f"{operation}: {what} is {x.dtype}, the weight {weight.dtype}")


def check_bias(bias: Tensor | None, weight: Tensor, layer: str) -> None:
    """`check_vector` of a layer's own bias, if any, where it looks wrong at first sight: this is done each time."""
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        check_vector(bias, weight, layer, "the bias")


def check_sequence_dim(sequence_dim: int) -> int:
    return check_integer(sequence_dim, "sequence_dim")


def token_dim(x: Tensor, sequence_dim: int, layer: str, *, has_features: bool = True) -> int:
    """`sequence_dim` as an index from the front; it must not be the feature dimension (of an input that has one)."""
    sequence_dim = check_sequence_dim(sequence_dim)
    dim = sequence_dim + x.ndim if sequence_dim < 0 else sequence_dim
    if not 0 <= dim < x.ndim - has_features:
        raise ValueError(
            f"{layer}: sequence_dim {sequence_dim} is not a token dimension of an input of shape {tuple(x.shape)}"
            + (", whose last dimension is features" if has_features else "")
        )
    return dim


def total_tokens(x_shard: Tensor, dim: int, total_len: int | None, group: TPGroup, layer: str) -> int:
    """How many tokens all ranks hold together: `total_len`, which this rank's shard must agree with, or equal
    shards.
    """
    if total_len is None:
        return x_shard.shape[dim] * group.size
    total_len = check_integer(total_len, f"{layer}: total_len")
    if total_len < 0:
        raise ValueError(f"{layer}: total_len {total_len} is negative")
    own = shard_size(total_len, group.size, group.rank)
    if x_shard.shape[dim] != own:
        raise ValueError(
            f"{layer}: of total_len {total_len} tokens rank {group.rank} of {group.size} owns {own}, but the input of "
            f"shape {tuple(x_shard.shape)} has {x_shard.shape[dim]} along dimension {dim}"
        )
    return total_len
