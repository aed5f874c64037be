"""Column-parallel layers whose input is whole on each rank: ``act(x @ w.T + bias)``, the outputs gathered or not.

The gather is hidden behind the matmul, and backward the all-reduce of dx behind the wgrad.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from tpfused import checks, reference
from tpfused.collectives import all_gather, all_reduce
from tpfused.group import TPGroup
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.choice import choose
from tpfused.overlap.operators import Needs, Operation
from tpfused.overlap.plain import act_gradient, activate, linear_act
from tpfused.overlap.plans import Call, Plan, all_features, look_up, plan_of, to_rows
from tpfused.sharding import padded_shard_size, shard_range


def column_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    out_features: int | None = None,
    main_grad: Tensor | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """This rank's output features of a column-parallel layer. Differentiable: dx is all-reduced beside the wgrad.

    Args:
        x: ``[..., k]``, the same on each rank.
        weight: ``[n, k]``, this rank's output features; bias ``[n]``.
        activation: None, "gelu" (erf), "gelu_tanh", "relu", "silu".
        out_features: all ranks', split like `torch.chunk`. Where the choice of a tier is measured, it is measured for
            these: weights that come without share one.
        main_grad: float32 ``[n, k]`` to which backward adds the weight's gradient in float32, instead of returning one.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``.

    Raises:
        ValueError, TypeError: as `ColumnParallelLinear`; before any collective.
    """
    return _call(_COLUMN_MATMUL, x, weight, bias, activation, out_features, main_grad, group, mesh)


def matmul_all_gather(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    out_features: int | None = None,
    main_grad: Tensor | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """All ranks' output features of a column-parallel layer, on every rank. Differentiable.

    A finished block of rows is gathered while the next is multiplied; few rows by one kernel after the whole matmul.
    (erf GELU and silu, which no epilogue of cuBLASLt has, are applied to all features afterwards.) Arguments and errors
    as `column_matmul`.

    Args:
        out_features: of all ranks, where they do not divide evenly: they are split like `torch.chunk`.

    Returns:
        ``[..., out_features]``.
    """
    return _call(_MATMUL_ALL_GATHER, x, weight, bias, activation, out_features, main_grad, group, mesh)


def _call(operation: Operation, x, weight, bias, activation, out_features, main_grad, group, mesh) -> Tensor:
    weights, biases = (weight,), (bias,)
    call = look_up(_prepare, group, mesh, x, weights, biases, operation, activation, out_features)
    return operation(call, x, weights, biases, None if main_grad is None else (main_grad,))[0]


def _prepare(tp: TPGroup, x, weights, biases, operation, activation, out_features) -> Call:
    (weight,), (bias,) = weights, biases
    checks.check_activation(activation)
    checks.check_operands(x, weight, bias, operation.name)
    n, k = weight.shape
    if operation is _MATMUL_ALL_GATHER and out_features is None:
        out_features = n * tp.size
    outputs = all_features(out_features, n, weight, tp, f"{operation.name}: out_features")
    leading = x.shape[:-1]
    return Call(plan_of(tp, activation, prod(leading), 1, 1, k, outputs, None if x.ndim == 2 else leading))


class _ColumnMatmul(Operation):
    """x [m, k], w_shard_n [n, k] -> y_shard_n [m, n].

    forward: none. dgrad: all-reduce of dx, beside wgrad. wgrad, dbias: none. Saved: x, the weight, and the
    pre-activation (relu: the result).
    """

    name = "column_matmul"

    def forward(self, chosen, plan, training, x, weights, biases):
        keeps_pre = training and plan.keeps_pre
        y, pre = linear_act(to_rows(x), weights[0], biases[0], plan.activation, keeps_pre)
        return [y], [pre] if keeps_pre else []

    def backward(self, chosen, plan, needs, grads, x, weights, kept):
        (dy,), (weight,), pre = grads, weights, kept[0] if kept else None
        dpre, dbias = act_gradient(dy, pre, plan.activation, needs.biases)
        dx = dweight = None
        if needs.x and chosen is not None:
            dx, dweight = calls.whole_input_backward(chosen, plan, needs, dpre, x, weight)
        else:
            dx = all_reduce(product(dpre, weight), plan.tp) if needs.x else None
            dweight = needs.wgrad(dpre, x) if needs.weights else None
        return dx, [dweight], [dbias]

    def plain(self, plan, dim, x, weights, biases):
        return [reference.column_parallel_linear(x, weights[0], biases[0], plan.tp, activation=plan.activation)]

    def choose(self, plan, dim, training, x, weights, biases):
        if training:
            return super().choose(plan, dim, training, x, weights, biases)
        return choose(f"{self.name} without gradients", plan.tp, x, plan.shape, None)

    def attempt(self, chosen, plan, dim, training, x, weights, biases):
        # The tiers differ in the backward pass only, whose time does not depend on what it is given.
        x = to_rows(x)
        results, pres = self.forward(chosen, plan, True, x, weights, biases)
        kept = results if plan.activation == "relu" else pres
        self.backward(chosen, plan, Needs(True, True, False), results, x, weights, kept)


class _MatmulAllGather(_ColumnMatmul):
    """x [m, k], w_shard_n [n, k] -> y [m, all n].

    forward: all-gather of y beside the matmul. dgrad: all-reduce of dx, beside wgrad. wgrad, dbias: none, dy is whole
    on each rank. Saved: x, the weight, and of this rank's outputs the pre-activation (relu: y).
    """

    name = "matmul_all_gather"
    choose, attempt = Operation.choose, Operation.attempt

    def forward(self, chosen, plan, training, x, weights, biases):
        if chosen is None:
            (y,), pres = super().forward(chosen, plan, training, x, weights, biases)
            return [all_gather(y, 1, plan.outputs, plan.tp)], pres
        (weight,), (bias,), keeps_pre = weights, biases, training and plan.keeps_pre
        epilogue = _epilogue(plan, x)
        y, pre = calls.matmul_all_gather(chosen, plan, x, weight, bias, epilogue, keeps_pre)
        if plan.activation and not epilogue:
            pre = to_rows(y)[:, _own(plan)].contiguous() if keeps_pre else None
            y = activate(y, plan.activation)
        return [y], [pre] if keeps_pre else []

    def backward(self, chosen, plan, needs, grads, x, weights, kept):
        if plan.activation == "relu":
            kept = [kept[0][:, _own(plan)].contiguous()]
        return super().backward(chosen, plan, needs, [grads[0][:, _own(plan)]], x, weights, kept)

    def plain(self, plan, dim, x, weights, biases):
        return [
            reference.column_parallel_linear(
                x, weights[0], biases[0], plan.tp, activation=plan.activation, gather_features=plan.outputs
            )
        ]

    def shape(self, plan, weight):
        return plan.total, plan.outputs


def _own(plan: Plan) -> slice:
    """This rank's of all features."""
    return slice(*shard_range(plan.outputs, plan.tp.size, plan.tp.rank))


def _epilogue(plan: Plan, x: Tensor) -> int:
    """What the matmul itself can apply on every rank: cuBLASLt writes a pre-activation in 16 bits and whole 16 bytes
    only."""
    if plan.activation != "gelu_tanh":
        return calls.RELU if plan.activation == "relu" else 0
    features = plan.outputs, padded_shard_size(plan.outputs, plan.tp.size)
    return calls.GELU_TANH if x.element_size() == 2 and all(n % 8 == 0 for n in features) else 0


_COLUMN_MATMUL, _MATMUL_ALL_GATHER = _ColumnMatmul(), _MatmulAllGather()
