"""Column- and row-parallel layers for weights that a model stores otherwise than as one `nn.Linear`."""

from __future__ import annotations

from functools import cache, wraps

from torch import Tensor, nn

from tpfused.collectives import copy_to_group, copy_to_replicas
from tpfused.group import TPGroup, resolve_group, with_replicas
from tpfused.layers.linear import ColumnParallelLinear, RowParallelLinear, column_forward
from tpfused.packing import StackedPacking
from tpfused.parameter import LinearParameters
from tpfused.placement import is_dtensor, local
from tpfused.sharding import divide, shard_size


class StoredLinear(LinearParameters):
    """What the layers below share: a weight computed with as ``[out, in]``, but stored in another layout.

    `transposed`: ``[in, out]``, as in transformers' Conv1D. `parts`: the outputs are that many equal projections one
    after the other (query, key and value, say), each split over the ranks: stored as ``[parts, out / parts, in]`` (or
    ``[in, parts, out / parts]``) and ``[parts, out / parts]``, the same entries in the same order, of which a slice of
    one dimension is right at every degree. `local` and `fill_parameter` speak of ``[out, in]`` and ``[out]``.
    """

    def __init__(self, *args, transposed: bool = False, parts: int = 1, **kwargs):
        self._transposed, self._parts = transposed, parts  # first: `new_parameter` needs them
        super().__init__(*args, **kwargs)
        # What checkpoints call the parameter and how it looks there: see `tpfused.checkpoint`.
        self.stored_as = StackedPacking(parts, dim=-1 if transposed else 0) if parts > 1 else None

    def new_parameter(self, name: str, shape: tuple[int, ...], shard_dim: int | None = None, **placing) -> None:
        if self._parts > 1:
            shape, shard_dim = (self._parts, divide(shape[0], self._parts, "outputs over parts"), *shape[1:]), 1
        if self._transposed and name == "weight":
            shape, shard_dim = (shape[-1], *shape[:-1]), (shard_dim + 1) % len(shape)
        super().new_parameter(name, shape, shard_dim, **placing)

    def fill_parameter(self, name: str, whole: Tensor) -> None:
        if self._parts > 1:
            whole = whole.unflatten(0, (self._parts, -1))
        super().fill_parameter(name, whole.movedim(-1, 0) if self._transposed and name == "weight" else whole)

    def local(self, name: str) -> Tensor | None:
        part = super().local(name)
        if part is not None and self._transposed and name == "weight":
            part = part.movedim(0, -1)
        return part.flatten(0, 1) if part is not None and self._parts > 1 else part


class StoredColumnParallelLinear(StoredLinear, ColumnParallelLinear):
    """`ColumnParallelLinear` of a transposed weight, or of several projections in one; see `StoredLinear`."""


class StoredRowParallelLinear(StoredLinear, RowParallelLinear):
    """`RowParallelLinear` of a transposed weight; see `StoredLinear`."""


class KeyValueLinear(LinearParameters):
    """The projection to keys, or to values, for fewer heads than ranks: each head is whole on the ranks that share it.

    Output ``[..., head_dim]``: the one head that this rank's queries attend to. The gradients of weight and bias are
    summed over the ranks that hold them; the input's is all-reduced over the group.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, num_heads: int, mesh, **placing):
        group = resolve_group(mesh=mesh)
        shared = with_replicas(group, divide(group.size, num_heads, "ranks over key-value heads"))
        super().__init__(in_features, out_features, bias, 0, mesh=mesh, shard_group=shared, **placing)
        self._shared = shared

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.local("weight"), self.local("bias")
        weight = copy_to_replicas(weight, self._shared)
        bias = None if bias is None else copy_to_replicas(bias, self._shared)
        features = weight.shape[0] * self.group.size  # those that all ranks compute, each head as often as it is shared
        return column_forward(x, weight, bias, self.group, out_features=features, sequence_dim=None, total_len=None)


class WholeParameters:
    """Mixed into a module's own class: its forward sees the local tensors of parameters that are whole on each rank.

    With `_sum_gradients` each rank computes with a part of the activations, and the gradients are summed over the
    group.
    """

    def forward(self, *args, **kwargs):
        if args and type(self).__bases__[1].forward is nn.Linear.forward:
            _check_whole(self, args[0])
        whole = {name: param for name, param in self._parameters.items() if is_dtensor(param)}
        parts = {name: local(param) for name, param in whole.items()}
        if self._sum_gradients:
            parts = {name: copy_to_group(part, self._tp_group) for name, part in parts.items()}
        self._parameters.update(parts)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(whole)

    def __reduce_ex__(self, protocol: int):
        # Pickle finds a class by its name, under which the module's own is.
        _, (_, *args), *state = super().__reduce_ex__(max(protocol, 2))
        return _new, (type(self).__bases__[1], *args), *state


def _check_whole(linear: nn.Linear, x: Tensor) -> None:
    """Refuse this rank's part of the features, which torch's own error would not call so."""
    group, own = linear._tp_group, x.shape[-1]
    if own != linear.in_features and own == shard_size(linear.in_features, group.size, group.rank):
        raise ValueError(
            f"a Linear of {linear.in_features} inputs, whole on each rank, got this rank's {own} of them: in the plan, "
            f"give it 'rowwise', or 'colwise_gather' to the 'colwise' layer before it"
        )


def compute_with_local(module: nn.Module, group: TPGroup, sum_gradients: bool) -> None:
    """Give the module, whose parameters are Replicate DTensors, a class that computes with their local tensors."""
    module.__class__ = _with_whole_parameters(type(module))
    module._tp_group, module._sum_gradients = group, sum_gradients


@cache
def _with_whole_parameters(cls: type) -> type:
    # The name and the signature stay: libraries look at both.
    forward = wraps(cls.forward)(lambda self, *args, **kwargs: WholeParameters.forward(self, *args, **kwargs))
    return type(cls.__name__, (WholeParameters, cls), {"__module__": cls.__module__, "forward": forward})


def _new(cls: type, *args) -> nn.Module:
    made = _with_whole_parameters(cls)
    return made.__new__(made, *args)
