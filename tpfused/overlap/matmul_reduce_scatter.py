"""``reduce_scatter(x @ w.T) + bias``: the row-parallel layer of sequence parallelism, its reduce-scatter hidden."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from tpfused import checks, reference
from tpfused.group import TPGroup
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.operators import Operation
from tpfused.overlap.plain import act_gradient, gather_rows, scatter_rows
from tpfused.overlap.plans import Call, all_features, look_up, plan_of, split_at
from tpfused.sharding import shard_size

NAME = "matmul_reduce_scatter"


def matmul_reduce_scatter(
    x_shard_k: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_dim: int = 0,
    in_features: int | None = None,
    main_grad: Tensor | None = None,
    residual: Tensor | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """This rank's tokens of the sum over the ranks of ``x @ weight.T``, plus bias and residual. Differentiable.

    A finished part of the output travels to its owner while the next is multiplied; few rows by one kernel after the
    whole matmul. Each rank's part is rounded to the dtype; they are added in float32 in the ranks' order, and so is
    what comes to them. (Of two ranks and many tokens, some own parts are added to the peer's before they are rounded,
    outside deterministic mode.) Backward: dy is gathered beside the dgrad.

    Args:
        x_shard_k: ``[..., k]``, all tokens, this rank's input features.
        weight: ``[n, k]``.
        bias: ``[n]``, the same on each rank; its gradient is of this rank's tokens alone.
        in_features: all ranks', split like `torch.chunk`. Where the choice of a tier is measured, it is measured for
            these: weights that come without share one.
        main_grad: float32 ``[n, k]`` to which backward adds the weight's gradient in float32, instead of returning one.
        residual: of the result's shape. Overlapped and eager, of x's dtype, it is added before the sum is rounded, in
            the same pass; else afterwards.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``, with this rank's tokens along `sequence_dim`.

    Raises:
        ValueError, TypeError: as `RowParallelLinear`; before any collective.
    """
    weights, biases = (weight,), (bias,)
    call = look_up(_prepare, group, mesh, x_shard_k, weights, biases, sequence_dim, in_features)
    joined = None
    if residual is not None:
        shape = (*(call.plan.leading or (call.plan.own,)), weight.shape[0])
        checks.check_residual(residual, shape, x_shard_k, NAME)
        joined = residual if _joins(residual, call, x_shard_k) else None
    y = _OPERATION(call, x_shard_k, weights, biases, None if main_grad is None else (main_grad,), joined)[0]
    return y if residual is joined else residual + y


def _joins(residual: Tensor, call: Call, x: Tensor) -> bool:
    """Whether the operation itself may add it. What the ranks exchange is the same then."""
    plain = type(residual) in (Tensor, Parameter) and residual.dtype == x.dtype
    return plain and call.direct and not call.autocasts


def _prepare(tp: TPGroup, x, weights, biases, sequence_dim, in_features) -> Call:
    (weight,), (bias,) = weights, biases
    checks.check_operands(x, weight, bias, NAME)
    dim = checks.token_dim(x, sequence_dim, NAME)
    inputs = all_features(in_features, weight.shape[1], weight, tp, f"{NAME}: in_features")
    tokens = x.shape[dim]
    own = shard_size(tokens, tp.size, tp.rank)
    leading = None if x.ndim == 2 else (*x.shape[:dim], own, *x.shape[dim + 1 : -1])
    return Call(plan_of(tp, None, tokens, *split_at(x, dim), inputs, weight.shape[0], leading), dim)


class _MatmulReduceScatter(Operation):
    """x_shard_k [total, k], w_shard_k [n, k] -> y_shard_m [own, n].

    forward: reduce-scatter of the parts beside the matmul. dgrad: all-gather of dy beside it. wgrad: uses the same.
    dbias: none, the sum of this rank's tokens. Saved: x_shard_k and the weight.
    """

    name = NAME

    def forward(self, chosen, plan, training, x, weights, biases, residual=None):
        (weight,), (bias,) = weights, biases
        if chosen is None:
            y = scatter_rows(product(x, weight.T), plan)
            return [y if bias is None else y + bias], []
        return [calls.matmul_reduce_scatter(chosen, plan, x, weight, bias, residual)], []

    def backward(self, chosen, plan, needs, grads, x, weights, kept):
        (dy,), (weight,) = grads, weights
        dy, dbias = act_gradient(dy, None, None, needs.biases)
        dx = dweight = None
        if chosen is not None and (needs.x or needs.weights):
            dx, dweight = calls.row_backward(chosen, plan, needs, dy, x, weight)
        elif needs.x or needs.weights:
            dy = gather_rows(dy, plan)
            dx = product(dy, weight) if needs.x else None
            dweight = needs.wgrad(dy, x) if needs.weights else None
        return dx, [dweight], [dbias]

    def plain(self, plan, dim, x, weights, biases):
        y = reference.row_parallel_linear(x, weights[0], biases[0], plan.tp, input_is_parallel=True, sequence_dim=dim)
        return [y]

    def shape(self, plan, weight):
        return plan.own, weight.shape[0]


_OPERATION = _MatmulReduceScatter()
