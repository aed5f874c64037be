"""Column- and row-parallel linear layers (Shoeybi et al., 2019, "Megatron-LM", section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpfused import checks, reference
from tpfused.collectives import gather_from_group, scatter_to_group
from tpfused.explanation import PLAIN, tell
from tpfused.group import TPGroup
from tpfused.layers.backend import why_plain
from tpfused.layers.norm import Norm
from tpfused.main_grad import into_main_grad
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul, matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce, matmul_all_reduce_norm
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.packing import Packing
from tpfused.parameter import LinearParameters, init_weight, new_whole_bias
from tpfused.sharding import shard_size


class ColumnParallelLinear(LinearParameters):
    """``act(x @ weight.T + bias)`` with the output features split over the ranks.

    Args:
        in_features, out_features: of the whole layer. `out_features` need not divide by the number of ranks.
        bias: split like the outputs.
        gather_output: return all output features on every rank instead of this rank's.
        sequence_parallel: the input is this rank's tokens; all ranks' are all-gathered first, and the input's gradient
            is reduce-scattered. Otherwise the input is whole on each rank and its gradient is all-reduced.
        activation: None, "gelu" (erf), "gelu_tanh", "relu" or "silu", applied to the output.
        skip_bias_add: return ``(x @ weight.T, bias)`` for a kernel that adds the bias later.
        init_method: fills the whole ``[out, in]`` weight in place, and returns that or None, as torch.nn.init's
            functions do; the bias is then zero. None: `nn.Linear`'s initialisation. Either way the ranks' shards are
            slices of one tensor, the same at every degree.
        sequence_dim: the token dimension that sequence parallelism splits.
        backend: None: as is measured to be best. "reference" forces the plain path, torch's matmuls and collectives, as
            ``with tpfused.tier("reference"):`` does for all layers called inside.
        accumulate_main_grad: where the weight has an attribute `main_grad`, a contiguous float32 tensor of its (local)
            shape, backward adds the weight's gradient to that, in float32, and ``weight.grad`` stays None. This is
            Megatron-LM's convention: where it has set `grad_added_to_main_grad`, that becomes True, and `grad` zeros.
            `clip_grad_norm_` counts and scales it; `copy.deepcopy` leaves it behind, as all attributes of parameters.
            Not for weights that FSDP2 shards, which are others in forward than those that a program sees, nor for
            parametrized ones: the layer refuses them.
        save_gathered: under sequence parallelism, keep all ranks' tokens for the weight's gradient instead of gathering
            them again: more memory, one all-gather less.
        group, mesh: a ProcessGroup (plain parameters; None: the default group, or one process) or a one-dimensional
            DeviceMesh (DTensor parameters).

    Shapes: input ``[..., in]``; output ``[..., out shard]``, or ``[..., out]`` with `gather_output`. Under sequence
    parallelism the input's `sequence_dim` is this rank's part and the output's is whole; without `total_len` all ranks
    must hold equally many tokens, which none can see alone.

    Raises:
        ValueError: a wrong number of features, another device, tokens that do not fit `total_len`, an activation
            together with `skip_bias_add`, an init_method that returns a new tensor.
        TypeError: an input of another dtype than the weight's (outside autocast); a dtype that is no torch.dtype, an
            init_method that is no function of one tensor, a switch that is neither True nor False.
    """

    called = "ColumnParallelLinear"  # in errors of forward: a layer built of this one gives it its own name

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        activation: str | None = None,
        skip_bias_add: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dim: int = 0,
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        save_gathered: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        checks.check_booleans(ColumnParallelLinear.__init__, locals())
        checks.check_activation(activation)
        checks.check_backend(backend)
        checks.check_sequence_dim(sequence_dim)
        if skip_bias_add and activation is not None:
            raise ValueError(f"skip_bias_add leaves the bias out, so activation {activation!r} cannot follow it")
        super().__init__(
            in_features,
            out_features,
            bias,
            weight_shard_dim=0,
            init_method=init_method,
            group=group,
            mesh=mesh,
            device=device,
            dtype=dtype,
        )
        self.backend = backend
        self.accumulate_main_grad = accumulate_main_grad
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.activation = activation
        self.skip_bias_add = skip_bias_add
        self.sequence_dim = sequence_dim
        self.save_gathered = save_gathered

    def forward(self, x: Tensor, *, total_len: int | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """`total_len`: all ranks' tokens, where they do not divide evenly under sequence parallelism."""
        weight, main_grad = self.weight_and_main_grad()
        bias = self.local("bias")
        out = column_forward(
            x,
            weight,
            None if self.skip_bias_add else bias,
            self.group,
            sequence_dim=self.sequence_dim if self.sequence_parallel else None,
            total_len=total_len,
            activation=self.activation,
            out_features=self.split_features(),
            gather_output=self.gather_output,
            backend=self.backend,
            main_grad=main_grad,
            save_gathered=self.save_gathered,
            layer=self.called,
        )
        if not self.skip_bias_add:
            return out
        if self.gather_output and bias is not None:
            bias = gather_from_group(bias, 0, self.split_features(), self.group)
        return out, bias

    def split_features(self) -> int:
        """All ranks' features of the dimension that is split, as `forward` has them."""
        return self.out_features


def column_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: TPGroup,
    *,
    out_features: int,
    sequence_dim: int | None,
    total_len: int | None,
    activation: str | None = None,
    gather_output: bool = False,
    backend: str | None = None,
    main_grad: Tensor | None = None,
    save_gathered: bool = False,
    layer: str = ColumnParallelLinear.called,
) -> Tensor:
    """A column-parallel layer's checks and computation with these local weights; `sequence_dim` None: x is whole.

    `layer`: whose errors these are.
    """
    checks.check_input(x, weight.shape[1], weight, layer)
    checks.check_bias(bias, weight, layer)
    if sequence_dim is not None:
        sequence_dim = checks.token_dim(x, sequence_dim, layer)
        total_len = checks.total_tokens(x, sequence_dim, total_len, group, layer)
    elif total_len is not None:
        raise ValueError(f"{layer}: total_len {total_len} is only for sequence_parallel=True")
    if backend == "reference" or group.alone:
        tell("column-parallel linear", x, PLAIN, why_plain(x, backend) or "one rank")
        return reference.column_parallel_linear(
            x,
            into_main_grad(weight, main_grad),
            bias,
            group,
            activation=activation,
            gather_features=out_features if gather_output else None,
            sequence_dim=sequence_dim,
            total_len=total_len,
        )
    overlapped = {"out_features": out_features, "main_grad": main_grad, "group": group}
    if sequence_dim is None:
        operation = matmul_all_gather if gather_output else column_matmul
        return operation(x, weight, bias, activation, **overlapped)
    overlapped |= {"sequence_dim": sequence_dim, "total_len": total_len, "save_gathered": save_gathered}
    out = all_gather_matmul(x, weight, bias, activation, **overlapped)
    return gather_from_group(out, -1, out_features, group) if gather_output else out


class PackedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel projections of one input as one matmul: QKV, or gate and up.

    Args:
        in_features: of the whole layer.
        part_features: the output features of each projection, in the order of ``packing.names``.
        packing: where each projection's rows go, such that a rank's contiguous shard holds its part of all of them.

    Other arguments as in `ColumnParallelLinear`. Each projection is initialised as a linear layer of its own.
    """

    def __init__(self, in_features: int, part_features: Sequence[int], packing: Packing, bias: bool = True, **kwargs):
        self.part_features = tuple(part_features)
        self.packing = packing
        super().__init__(in_features, sum(part_features), bias, **kwargs)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        weights, biases = [], []
        for features in self.part_features:
            weights.append(self.new_whole_weight(features))
            init_weight(weights[-1], self.init_method)
            if self.bias is not None:
                biases.append(new_whole_bias(weights[-1], self.init_method))
        self.fill_parameter("weight", self.packing.pack(weights))
        if biases:
            self.fill_parameter("bias", self.packing.pack(biases))


Then = tuple[Tensor, Norm]


def joined(x: Tensor, features: int, residual: Tensor | None, then: Then | None, layer: str) -> dict[str, object]:
    """For a `RowParallelLinear`, or what has taken its place and need not know of what is not given. The layer's output
    is as its input x, of `features`: what does not fit that is refused, before the layer's first collective."""
    given = {name: value for name, value in (("residual", residual), ("then", then)) if value is not None}
    if given and isinstance(x, Tensor):
        check_joined(residual, then, (*x.shape[:-1], features), x, layer)
    return given


def check_joined(residual: Tensor | None, then: Then | None, shape: tuple[int, ...], x: Tensor, layer: str) -> None:
    """Refuse what cannot be added to a layer's output of this shape."""
    if then is None:
        return checks.check_residual(residual, shape, x, layer)
    if residual is not None:
        raise ValueError(f"{layer}: a residual goes with neither `then` nor skip_bias_add")
    # By what is asked of a Norm: torch.compile wraps modules.
    if not isinstance(then, tuple | list) or len(then) != 2 or not hasattr(then[1], "operands"):
        got = [type(each).__name__ for each in then] if isinstance(then, tuple | list) else then
        raise TypeError(f"{layer}: `then` must be a residual and a tpfused Norm, as (tensor, norm), not {got!r}")
    checks.check_residual(then[0], shape, x, layer)


class RowParallelLinear(LinearParameters):
    """``x @ weight.T + bias`` with the input features split over the ranks.

    Args:
        in_features, out_features: of the whole layer. `in_features` need not divide by the number of ranks.
        bias: whole on each rank, added once, after the reduction.
        input_is_parallel: the input is this rank's features, as a column-parallel layer leaves them; False: it is whole
            on each rank, and this rank's slice is taken first.
        sequence_parallel: reduce-scatter the output, so that each rank gets its tokens; otherwise it is all-reduced.
        skip_bias_add: return ``(sum of x @ weight.T, bias)`` for a kernel that adds the bias later.
        init_method, sequence_dim, backend, accumulate_main_grad, group, mesh: as in `ColumnParallelLinear`.

    Shapes: input ``[..., in shard]`` (``[..., in]`` without `input_is_parallel`); output ``[..., out]``, its
    `sequence_dim` this rank's part under sequence parallelism. Raises as `ColumnParallelLinear` does, and a
    ValueError for `then` or `residual` where it can't be, or of another shape than the output's.
    """

    called = "RowParallelLinear"  # as in `ColumnParallelLinear`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dim: int = 0,
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        checks.check_booleans(RowParallelLinear.__init__, locals())
        checks.check_backend(backend)
        checks.check_sequence_dim(sequence_dim)
        super().__init__(
            in_features,
            out_features,
            bias,
            weight_shard_dim=1,
            init_method=init_method,
            group=group,
            mesh=mesh,
            device=device,
            dtype=dtype,
        )
        self.backend = backend
        self.accumulate_main_grad = accumulate_main_grad
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.skip_bias_add = skip_bias_add
        self.sequence_dim = sequence_dim

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, then: Then | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor]:
        """`residual`: of the output's shape: -> their sum; without `skip_bias_add`. `then`: a residual ``[..., out]``
        and what normalises it: -> its sum with the output, and that normalised, as `matmul_all_reduce_norm`; without
        sequence parallelism or `skip_bias_add`."""
        if residual is not None and self.skip_bias_add:
            raise ValueError(f"{self.called}: a residual goes with neither `then` nor skip_bias_add")
        if then is not None and (self.sequence_parallel or self.skip_bias_add):
            raise ValueError(f"{self.called}: `then` is for sequence_parallel=False and skip_bias_add=False")
        weight, main_grad = self.weight_and_main_grad()
        features = in_features = self.split_features()
        if self.input_is_parallel:
            features = shard_size(in_features, self.group.size, self.group.rank)
        checks.check_input(x, features, weight, self.called, part_of=in_features)
        dim = checks.token_dim(x, self.sequence_dim, self.called) if self.sequence_parallel else None
        if residual is not None or then is not None:
            shape = [*x.shape[:-1], self.out_features]
            if dim is not None:
                shape[dim] = shard_size(shape[dim], self.group.size, self.group.rank)
            check_joined(residual, then, tuple(shape), x, self.called)
        if then is not None:
            return self._forward_norm(x, weight, *then)
        bias = self.replicated("bias", sharded_tokens=self.sequence_parallel)
        added = None if self.skip_bias_add else bias
        checks.check_bias(added, weight, self.called)
        if self.backend == "reference" or self.group.alone:
            tell("row-parallel linear", x, PLAIN, why_plain(x, self.backend) or "one rank")
            out = reference.row_parallel_linear(
                x,
                into_main_grad(weight, main_grad),
                added,
                self.group,
                input_is_parallel=self.input_is_parallel,
                sequence_dim=dim,
            )
            out = out if residual is None else residual + out
        else:
            if not self.input_is_parallel:
                x = scatter_to_group(x, -1, self.group)
            overlapped = {"in_features": in_features, "main_grad": main_grad, "group": self.group}
            if dim is None:
                out = matmul_all_reduce(x, weight, added, **overlapped)
                out = out if residual is None else residual + out
            else:
                out = matmul_reduce_scatter(x, weight, added, sequence_dim=dim, residual=residual, **overlapped)
        return (out, bias) if self.skip_bias_add else out

    def split_features(self) -> int:
        """As in `ColumnParallelLinear`."""
        return self.in_features

    def _forward_norm(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if self.backend == "reference" or not self.input_is_parallel or torch.is_grad_enabled():
            total = residual + self.forward(x)
            return total, norm(total)
        bias, operands = self.replicated("bias", sharded_tokens=False), norm.operands()
        checks.check_bias(bias, weight, self.called)
        return matmul_all_reduce_norm(
            x, weight, bias, residual, operands, in_features=self.split_features(), group=self.group
        )
