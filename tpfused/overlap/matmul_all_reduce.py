"""``all_reduce(x @ w.T) + bias``: the row-parallel layer, its all-reduce hidden."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn import Parameter

from tpfused import checks, reference
from tpfused.autograd import needs_function
from tpfused.collectives import all_reduce
from tpfused.explanation import KERNEL, PLAIN, tell
from tpfused.group import TPGroup
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.operators import Operation
from tpfused.overlap.plain import act_gradient
from tpfused.overlap.plans import NORM_KINDS, Call, NormOperands, all_features, look_up, plan_of
from tpfused.overlap.tiers import exact

NAME = "matmul_all_reduce"
NORM_OF_SUM = "norm after a sum"  # for `explain`
MOST_TOKENS = 64  # that are normalised in the kernel of the sum; not tuned


def matmul_all_reduce(
    x_shard_k: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    in_features: int | None = None,
    main_grad: Tensor | None = None,
    group=None,
    mesh=None,
) -> Tensor:
    """The sum over the ranks of ``x @ weight.T``, plus bias, on every rank. Differentiable, without a collective.

    A block of rows is reduced while the next is multiplied; few rows by one kernel after the whole matmul. The NCCL
    tier adds as NCCL does, and rounds as it goes; the other adds the ranks' parts in float32, in their order.

    Args:
        x_shard_k: ``[..., k]``, this rank's input features.
        weight: ``[n, k]``.
        bias: ``[n]``, the same on each rank.
        in_features: all ranks', split like `torch.chunk`. Where the choice of a tier is measured, it is measured for
            these: weights that come without share one.
        main_grad: float32 ``[n, k]`` to which backward adds the weight's gradient in float32, instead of returning one.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``.

    Raises:
        ValueError, TypeError: as `RowParallelLinear`; before any collective.
    """
    weights, biases = (weight,), (bias,)
    call = look_up(_prepare, group, mesh, x_shard_k, weights, biases, in_features)
    return _OPERATION(call, x_shard_k, weights, biases, None if main_grad is None else (main_grad,))[0]


def matmul_all_reduce_norm(
    x_shard_k: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: NormOperands,
    *,
    in_features: int | None = None,
    group=None,
    mesh=None,
) -> tuple[Tensor, Tensor]:
    """``residual + matmul_all_reduce(...)``, and that sum normalised: what a pre-norm block does between two matmuls.

    For a few tokens, as in decoding, the "p2p" tier does all of it in the kernel of the all-reduce, rounding the sum
    once; with gradients, or where that does not run, it is the three operations.

    Args:
        residual: ``[..., n]``, whole on each rank.
        norm: of `n` features.
        x_shard_k, weight, bias, in_features, group, mesh: as in `matmul_all_reduce`.

    Returns:
        The sum and the normalised sum, ``[..., n]`` both.

    Raises:
        ValueError: a residual or a norm of another shape or device, a norm that is none; and as `matmul_all_reduce`.
        TypeError: a norm of another dtype than the weight; and as `matmul_all_reduce`.
    """
    call = look_up(_prepare, group, mesh, x_shard_k, (weight,), (bias,), in_features)
    features = weight.shape[0]
    checks.check_residual(residual, (*x_shard_k.shape[:-1], features), x_shard_k, f"{NAME}_norm")
    _check_norm(norm, weight)
    operands = [x for x in (x_shard_k, weight, bias, residual, norm.weight, norm.bias) if x is not None]
    why = _why_apart(call, features * x_shard_k.element_size(), operands)
    if not why:
        chosen = _OPERATION.choose(call.plan, call.dim, False, x_shard_k, (weight,), (bias,))
        if chosen is not None and chosen[1] == "p2p":
            tell(NORM_OF_SUM, x_shard_k, KERNEL, "")
            return calls.matmul_all_reduce_norm(chosen, call.plan, x_shard_k, weight, bias, residual, norm)
        why = f"{NAME} does not run by p2p"
    tell(NORM_OF_SUM, x_shard_k, PLAIN, why)
    total = residual + _OPERATION(call, x_shard_k, (weight,), (bias,))[0]
    return total, reference.normalize(total, norm.kind, norm.weight, norm.bias, norm.eps)


def _check_norm(norm: NormOperands, weight: Tensor) -> None:
    if not isinstance(norm, NormOperands):
        raise TypeError(f"{NAME}_norm: the norm must be NormOperands, not {type(norm).__name__}")
    if norm.kind not in NORM_KINDS:
        raise ValueError(f"{NAME}_norm: the norm must be one of {', '.join(NORM_KINDS)}, not {norm.kind!r}")
    checks.check_eps(norm.eps, f"{NAME}_norm: the norm's eps")
    checks.check_vector(norm.weight, weight, f"{NAME}_norm", "the norm's weight")
    if norm.bias is not None:
        if norm.kind == "rmsnorm":
            raise ValueError(f"{NAME}_norm: an RMSNorm has no bias")
        checks.check_vector(norm.bias, weight, f"{NAME}_norm", "the norm's bias")


def _why_apart(call: Call, row: int, operands: Sequence[Tensor]) -> str:
    """Why the tier that does it all may not be asked, the same on every rank; empty: it may. `row`: the bytes of one of
    the sum's."""
    if not call.direct or any(type(each) not in (Tensor, Parameter) for each in operands):
        return "a subclass of torch.Tensor"
    if call.autocasts or any(each.dtype != operands[0].dtype for each in operands):
        return "operands of several dtypes"
    if exact[-1]:
        return "deterministic: other tiers round more often"
    if call.plan.total > MOST_TOKENS:
        return f"more than {MOST_TOKENS} tokens"
    if row % 16 or row > calls.MOST_NORMALIZED:
        return f"rows of {row:,} bytes: no multiple of 16, or more than {calls.MOST_NORMALIZED:,}"
    return "with gradients" if needs_function(*operands) else ""


def _prepare(tp: TPGroup, x, weights, biases, in_features) -> Call:
    (weight,), (bias,) = weights, biases
    checks.check_operands(x, weight, bias, NAME)
    inputs = all_features(in_features, weight.shape[1], weight, tp, f"{NAME}: in_features")
    leading = x.shape[:-1]
    return Call(plan_of(tp, None, prod(leading), 1, 1, inputs, weight.shape[0], None if x.ndim == 2 else leading))


class _MatmulAllReduce(Operation):
    """x_shard_k [m, k], w_shard_k [n, k] -> y [m, n].

    forward: all-reduce of the parts beside the matmul. dgrad, wgrad, dbias: none, dy is whole on each rank. Saved:
    x_shard_k and the weight.
    """

    name = NAME

    def forward(self, chosen, plan, training, x, weights, biases):
        (weight,), (bias,) = weights, biases
        if chosen is None:
            y = all_reduce(product(x, weight.T), plan.tp)
            return [y if bias is None else y + bias], []
        return [calls.matmul_all_reduce(chosen, plan, x, weight, bias)], []

    def backward(self, chosen, plan, needs, grads, x, weights, kept):
        (dy,), (weight,) = grads, weights
        dx = product(dy, weight) if needs.x else None
        dweight = needs.wgrad(dy, x) if needs.weights else None
        return dx, [dweight], [act_gradient(dy, None, None, True)[1] if needs.biases else None]

    def plain(self, plan, dim, x, weights, biases):
        y = reference.row_parallel_linear(x, weights[0], biases[0], plan.tp, input_is_parallel=True, sequence_dim=None)
        return [y]


_OPERATION = _MatmulAllReduce()
