"""``act(all_gather(x) @ w.T + bias)``: the column-parallel layer of sequence parallelism, its all-gather hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tpfused import checks, reference
from tpfused.collectives import all_gather_tokens
from tpfused.group import TPGroup
from tpfused.kernels.matmul import product
from tpfused.overlap import calls
from tpfused.overlap.operators import Operation
from tpfused.overlap.plain import act_gradient, activate, gather_rows, linear_act, scatter_rows
from tpfused.overlap.plans import Call, Operands, all_features, look_up, plan_of, split_at

NAME = "all_gather_matmul"


def all_gather_matmul(
    x_shard_m: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    activation: str | None = None,
    *,
    sequence_dim: int = 0,
    total_len: int | None = None,
    out_features: int | Sequence[int] | None = None,
    main_grad: Tensor | Sequence[Tensor | None] | None = None,
    save_gathered: bool = False,
    group=None,
    mesh=None,
) -> Tensor | tuple[Tensor, ...]:
    """All ranks' rows, joined, through this rank's part of a column-parallel layer. Differentiable.

    The own rows are multiplied at once and a peer's when they have arrived. Backward: x is gathered again beside the
    dgrad, whose reduce-scatter the wgrad hides.

    Args:
        x_shard_m: ``[..., k]``, this rank's part of the tokens along `sequence_dim`.
        weight: ``[n, k]``, this rank's output features; or several such weights, to which x is gathered once.
        bias: ``[n]``; for several weights, one for each.
        activation: None, "gelu" (erf), "gelu_tanh", "relu", "silu".
        total_len: all ranks' tokens, where they do not divide evenly: they are split like `torch.chunk`.
        out_features: all ranks', split likewise; for several weights one for each. Where the choice of a tier is
            measured, it is measured for these: weights that come without share one.
        main_grad: float32 ``[n, k]`` to which backward adds the weight's gradient in float32, instead of returning one;
            for several weights one for each.
        save_gathered: keep all ranks' rows for the weights' gradients, instead of gathering them again: as many times
            the memory of x as there are ranks, for one all-gather less. The plain path always does.
        group, mesh: as for the layers.

    Returns:
        ``[..., n]``, with all tokens; for several weights a tuple of these.

    Raises:
        ValueError, TypeError: as `ColumnParallelLinear`; before any collective.
    """
    if isinstance(weight, Tensor):
        weights, biases, features = (weight,), (bias,), (out_features,)
        main_grads = None if main_grad is None else (main_grad,)
    else:
        weights, biases, features, main_grads = _lists(weight, bias, out_features, main_grad)
    options = activation, sequence_dim, total_len, save_gathered, *features
    call = look_up(_prepare, group, mesh, x_shard_m, weights, biases, *options)
    results = _OPERATION(call, x_shard_m, weights, biases, main_grads)
    return results[0] if isinstance(weight, Tensor) else tuple(results)


def _lists(weights, biases, out_features, main_grads) -> tuple[Sequence, Sequence, Sequence, Sequence | None]:
    """One of each for every weight."""
    if not isinstance(weights, list | tuple):
        raise TypeError(f"{NAME}: the weight must be a tensor or a list of tensors, not {type(weights).__name__}")
    if not weights:
        raise ValueError(f"{NAME}: there is no weight")
    given = []
    for what, values in (("biases", biases), ("out_features", out_features)):
        if values is None:
            values = [None] * len(weights)
        elif not isinstance(values, list | tuple):
            raise TypeError(f"{NAME}: several weights take a list of {what}, not {values!r}")
        elif len(values) != len(weights):
            raise ValueError(f"{NAME}: {len(weights)} weights take as many {what}, or none, not {len(values)}")
        elif any(value is None for value in values):
            raise ValueError(f"{NAME}: the {what} of several weights are given for all or, by None alone, for none")
        given.append(tuple(values))
    if main_grads is not None and (not isinstance(main_grads, list | tuple) or len(main_grads) != len(weights)):
        raise TypeError(f"{NAME}: {len(weights)} weights take a list of as many main_grads")
    return tuple(weights), *given, main_grads


def _prepare(
    tp: TPGroup, x, weights, biases, activation, sequence_dim, total_len, save_gathered, *out_features
) -> Call:
    checks.check_activation(activation)
    checks.check_boolean(save_gathered, f"{NAME}: save_gathered")
    for weight, bias in zip(weights, biases, strict=True):
        checks.check_operands(x, weight, bias, NAME)
    dim = checks.token_dim(x, sequence_dim, NAME)
    tokens = checks.total_tokens(x, dim, total_len, tp, NAME)
    outputs = [
        all_features(features, weight.shape[0], weight, tp, f"{NAME}: out_features")
        for features, weight in zip(out_features, weights, strict=True)
    ]
    leading = None if x.ndim == 2 else (*x.shape[:dim], tokens, *x.shape[dim + 1 : -1])
    outputs = None if None in outputs else sum(outputs)
    plan = plan_of(tp, activation, tokens, *split_at(x, dim), x.shape[-1], outputs, leading)
    return Call(plan._replace(saves_gathered=save_gathered), dim)


class _AllGatherMatmul(Operation):
    """x_shard_m [own, k], w_shard_n [n, k] -> y_shard_n [total, n], of each weight.

    forward: all-gather of x beside the first matmul. dgrad: reduce-scatter, beside wgrad. wgrad: all-gather of x,
    beside dgrad, or none if the gathered x is saved. dbias: none. Saved: x_shard_m or the gathered x, the weights, and
    the pre-activations (relu: the results).
    """

    name = NAME

    def forward(self, chosen, plan, training, x, weights, biases):
        activation, keeps_pre = plan.activation, training and plan.keeps_pre
        keeps_gathered = training and plan.saves_gathered
        if chosen is None:
            gathered = gather_rows(x, plan)
            pairs = [linear_act(gathered, w, b, activation, keeps_pre) for w, b in zip(weights, biases, strict=True)]
            ys, pres = (list(each) for each in zip(*pairs, strict=True))
        else:
            epilogue = _epilogue(activation, weights)
            ys, pres, gathered = calls.all_gather_matmul(
                chosen, plan, x, weights, biases, epilogue, keeps_pre, keeps_gathered
            )
            if activation and not epilogue:
                ys, pres = [activate(y, activation) for y in ys], ys
        return ys, (pres if keeps_pre else []) + ([gathered] if keeps_gathered else [])

    def backward(self, chosen, plan, needs, grads, x, weights, kept):
        kept = kept or [None] * len(grads)
        pairs = [act_gradient(dy, pre, plan.activation, needs.biases) for dy, pre in zip(grads, kept, strict=True)]
        dpres, dbiases = zip(*pairs, strict=True)
        if chosen is not None and (needs.x or needs.weights):
            return *calls.column_backward(chosen, plan, needs, dpres, x, weights), dbiases
        dx, dweights = None, [None] * len(weights)
        if needs.x:
            parts = [product(dpre, weight) for dpre, weight in zip(dpres, weights, strict=True)]
            dx = scatter_rows(sum(parts[1:], parts[0]), plan)
        if needs.weights:
            x = x if plan.saves_gathered else gather_rows(x, plan)
            dweights = [needs.wgrad(dpre, x, index) for index, dpre in enumerate(dpres)]
        return dx, dweights, dbiases

    def plain(self, plan, dim, x, weights, biases):
        activation, tp = plan.activation, plan.tp
        if len(weights) == 1:
            return [
                reference.column_parallel_linear(
                    x, weights[0], biases[0], tp, activation=activation, sequence_dim=dim, total_len=plan.tokens
                )
            ]
        x = all_gather_tokens(x, dim, plan.tokens, tp)
        return [reference.activate(F.linear(x, w, b), activation) for w, b in zip(weights, biases, strict=True)]


def _epilogue(activation: str | None, weights: Operands) -> int:
    """What the matmul itself can apply: cuBLASLt writes a pre-activation in 16 bits and rows of whole 16 bytes only."""
    if activation != "gelu_tanh":
        return calls.RELU if activation == "relu" else 0
    fits = weights[0].element_size() == 2 and not [w for w in weights if w.shape[0] % 8]
    return calls.GELU_TANH if fits else 0


_OPERATION = _AllGatherMatmul()
