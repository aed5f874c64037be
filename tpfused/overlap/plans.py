"""How a call of an overlapped operation is checked and planned: once for arguments of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.checks import check_integer
from tpfused.group import GROUPS, TPGroup, exists, resolve_group
from tpfused.reference import autocast_dtype
from tpfused.sharding import padded_shard_size, shard_size

Operands = Sequence[Tensor | None]  # weights or biases
MOST_CALLS = 4096  # remembered at a time


class Plan(NamedTuple):
    """What an operation must know besides its tensors. Sizes are of all ranks together."""

    tp: TPGroup
    activation: str | None
    tokens: int  # where ranks own rows, these are split, like `torch.chunk`
    each: int  # rows a token, one after the other
    batch: int  # times all tokens, of which a rank's own lie together
    inputs: int | None  # features; None: this rank does not know
    outputs: int | None
    total: int  # rows
    own: int  # rows of this rank
    padded: int  # rows of as many ranks, if all had as many as the first
    shape: tuple[int, int | None, int | None]  # rows, inputs, outputs
    leading: tuple[int, ...] | None  # a result's dimensions before its features; None: it is a matrix
    saves_gathered: bool = False  # for the weights' gradients, in place of this rank's rows
    compiled: bool = False  # called by compiled code, which counts what is left in the memory that it lends

    @property
    def keeps_pre(self) -> bool:
        """Whether the derivative needs the pre-activation; relu's can be told from the result."""
        return self.activation not in (None, "relu")


def plan_of(
    tp: TPGroup,
    activation: str | None,
    tokens: int,
    each: int,
    batch: int,
    inputs: int | None,
    outputs: int | None,
    leading: tuple[int, ...] | None = None,
) -> Plan:
    rows = each * batch  # of a token
    total, own = tokens * rows, shard_size(tokens, tp.size, tp.rank) * rows
    padded = padded_shard_size(tokens, tp.size) * tp.size * rows
    shape = total, inputs, outputs
    return Plan(tp, activation, tokens, each, batch, inputs, outputs, total, own, padded, shape, leading)


def split_at(x: Tensor, dim: int) -> tuple[int, int]:
    """Rows a token, and times all tokens, of ``[..., features]`` whose tokens are at `dim`."""
    return prod(x.shape[dim + 1 : -1]), prod(x.shape[:dim])


NORM_KINDS = "layernorm", "rmsnorm"


class NormOperands(NamedTuple):
    """A LayerNorm or RMSNorm over the last dimension.

    Attributes:
        kind: of `NORM_KINDS`.
        weight: ``[features]``.
        bias: likewise, or None, which an RMSNorm's is.
    """

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


class Call(NamedTuple):
    """A plan, and what else an operation must know of a call.

    Attributes:
        dim: which dimension of x is the tokens'.
        direct: eager, on plain tensors.
        autocasts: the operands are to be cast to autocast's dtype first.
    """

    plan: Plan
    dim: int = 0
    direct: bool = False
    autocasts: bool = False


def look_up(make: Callable[..., Call], group, mesh, x: Tensor, weights: Operands, biases: Operands, *options) -> Call:
    """``make(tp, x, weights, biases, *options)``, which also refuses what is wrong with them. Options are told apart by
    their own types, not by those of what they hold: give a tuple's entries one by one."""
    key = None if torch.compiler.is_compiling() else _kind(make, group, mesh, x, weights, biases, options)
    try:
        call = None if key is None else _calls.get(key)
    except TypeError:  # something in it can't be a key, nor be right
        call = key = None
    if call is not None and ((process_group := call.plan.tp.process_group) is None or process_group in GROUPS):
        return call
    tp = resolve_group(group, mesh)
    call = make(tp, x, weights, biases, *options)
    if autocast_dtype(x) is not None:
        call = call._replace(autocasts=True)
    if key is None:
        return call
    _forget_destroyed_groups()
    if tp.process_group is not None:
        _groups.add(tp.process_group)
    call = _calls[key] = call._replace(direct=True)
    return call


_calls: dict[tuple, Call] = {}
_groups: set[dist.ProcessGroup] = set()  # of these calls
_PLAIN = frozenset((Tensor, nn.Parameter))  # subclasses may stand for something else


def _kind(make, group, mesh, x, weights, biases, options) -> tuple | None:
    """All that a call and its checks depend on; None where that is more than can be told here."""
    # The options' types too: 0, 0.0 and False are equal.
    kind = [make, dist.group.WORLD if group is None else group, mesh, len(weights), *options, *map(type, options)]
    for tensor in (x, *weights, *biases):
        if type(tensor) in _PLAIN:
            try:
                kind += tensor.shape, tensor.dtype, tensor.device, tensor.layout
            except RuntimeError:  # nested: it has no shape
                return None
        elif tensor is None:
            kind.append(None)
        else:
            return None
    if torch._C._is_any_autocast_enabled():
        kind.append(autocast_dtype(x))
    return tuple(kind)


def _forget_destroyed_groups() -> None:
    if len(_calls) >= MOST_CALLS or not all(map(exists, _groups)):
        _calls.clear()
        _groups.clear()


def all_features(given: int | None, own: int, weight: Tensor, tp: TPGroup, what: str) -> int | None:
    """The features `given` of all ranks, of which this rank's weight must have its `own`. `what`: how they are called.

    Raises:
        TypeError: they are not an integer.
        ValueError: they are not split like this.
    """
    if given is None:
        return None
    given = check_integer(given, what)
    if given < 0:
        raise ValueError(f"{what} {given} is negative")
    if shard_size(given, tp.size, tp.rank) != own:
        raise ValueError(
            f"{what} {given}: rank {tp.rank} of {tp.size} owns {shard_size(given, tp.size, tp.rank)} of them, but its "
            f"weight has shape {tuple(weight.shape)}"
        )
    return given


def to_rows(x: Tensor) -> Tensor:
    """``[..., features]`` -> ``[rows, features]``."""
    return x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
