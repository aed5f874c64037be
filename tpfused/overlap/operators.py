"""How a call comes to an overlapped operation's functions.

An eager call on plain tensors goes straight to them: torch's dispatcher takes as much host time as a small matmul does.
Compiled code and tensor subclasses go through operators of torch's, which choose a tier when they run: tracing makes no
communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.autograd import (
    eager_apply,
    needs_function,
    once_differentiable,
    records_gradient,
    refuse_export_with_gradients,
)
from tpfused.group import exists, resolve_group
from tpfused.kernels.launch import autocast_to
from tpfused.kernels.linear_act import accumulate_wgrad
from tpfused.kernels.matmul import product
from tpfused.main_grad import check_main_grad, into_main_grad
from tpfused.overlap.choice import Chosen, bucket, choose
from tpfused.overlap.plans import Call, Operands, Plan, plan_of, to_rows
from tpfused.overlap.tiers import deterministic, exact


class Needs(NamedTuple):
    """Which gradients are wanted: of x, of any weight, of any bias; and where the weights' are added to, if not
    returned."""

    x: bool
    weights: bool
    biases: bool
    main_grads: Sequence[Tensor] | None = None

    def wgrad(self, dpre: Tensor, x: Tensor, index: int = 0) -> Tensor | None:
        """``dpre.T @ x`` for the weight of this index; None where it was added to a main_grad."""
        if self.main_grads is None:
            return product(dpre.T, x)
        return accumulate_wgrad(self.main_grads[index], dpre, x)


class Operation:
    """An overlapped operation, with one or several weights.

    Subclasses say in their docstrings what they exchange and save, and define the functions below, on matrices of any
    strides. `chosen` is what `choose` gave.
    """

    name: str

    def forward(
        self,
        chosen: Chosen,
        plan: Plan,
        training: bool,
        x: Tensor,
        weights: Operands,
        biases: Operands,
        residual: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """-> new results, and in training, if the plan `keeps_pre`, new ``[total, this rank's n]`` pre-activations;
        after those, if it `saves_gathered`, all ranks' rows of x, which `backward` then gets in place of x.

        With a tier, x may have more dimensions, and so may the results, as the plan's `leading` says. A residual, of
        the result's dtype and number of entries, comes with a tier and to an operation that adds it only.
        """
        raise NotImplementedError

    def backward(
        self, chosen: Chosen, plan: Plan, needs: Needs, grads: Operands, x: Tensor, weights: Operands, kept: Operands
    ) -> tuple[Tensor | None, Operands, Operands]:
        """-> new gradients of x, weights and biases, None for those not needed, and for weights with a main_grad.
        `kept`: the pre-activations, or the results of relu."""
        raise NotImplementedError

    def plain(self, plan: Plan, dim: int, x: Tensor, weights: Operands, biases: Operands) -> Sequence[Tensor]:
        """Nothing overlapped, differentiable, with x as the user gave it, its tokens at `dim`."""
        raise NotImplementedError

    def shape(self, plan: Plan, weight: Tensor) -> tuple[int, int]:
        """Of a weight's result."""
        return plan.total, weight.shape[0]

    def attempt(
        self,
        chosen: Chosen,
        plan: Plan,
        dim: int | None,
        training: bool,
        x: Tensor,
        weights: Operands,
        biases: Operands,
    ) -> None:
        """What `choose` measures: what a call does forward if this is chosen. `dim` is None in an operator."""
        if chosen is None and dim is not None:
            self.plain(plan, dim, x, weights, biases)
        else:
            self.forward(chosen, plan, training, to_rows(x), weights, biases)

    def __init__(self):
        self._operator = _operator_of(self)
        # A class of its own, for the name that profiles and `grad_fn` show.
        self._apply = eager_apply(type(type(self).__name__.removeprefix("_"), (_Function,), {}))

    def __call__(
        self,
        call: Call,
        x: Tensor,
        weights: Operands,
        biases: Operands,
        main_grads: Operands | None = None,
        residual: Tensor | None = None,
    ) -> Sequence[Tensor]:
        plan, dim, direct, autocasts = call
        if autocasts:  # as torch's own matmuls do; the gradients come back in the operands' dtypes
            x, *operands = autocast_to(x, *weights, *biases)
            weights, biases = operands[: len(weights)], operands[len(weights) :]
        if main_grads is not None:  # refused before a choice, for which the ranks meet
            for weight, main_grad in zip(weights, main_grads, strict=True):
                check_main_grad(main_grad, weight, self.name)
        training = needs_function(x, residual, *weights, *biases)
        if plan.saves_gathered and not records_gradient(*weights):
            plan = plan._replace(saves_gathered=False)
        chosen = self.choose(plan, dim, training, x, weights, biases) if direct else None
        if main_grads is not None and (
            chosen is None
            or not all(w.requires_grad and m is not None for w, m in zip(weights, main_grads, strict=True))
        ):
            weights = [into_main_grad(w, m) for w, m in zip(weights, main_grads, strict=True)]
            main_grads = None
        if chosen is None and (direct or _is_plain(plan)):
            results = self.plain(plan, dim, x, weights, biases)
            return results if residual is None else [residual + results[0]]
        if not direct:
            refuse_export_with_gradients()
            results = self._operator(
                to_rows(x), list(weights), [bias for bias in biases if bias is not None], plan.activation,
                sizes_of(plan), training, plan.tp.process_group.group_name,
            )[: len(weights)]  # fmt: skip
        elif training:
            results = self._apply(self, chosen, plan, main_grads, residual, x, *weights, *biases)
        else:
            results, _ = self.forward(chosen, plan, False, x, weights, biases, *_given(residual))
        if plan.leading is None:
            return results
        return [y if y.ndim > 2 else y.view(*plan.leading, y.shape[-1]) for y in results]

    def choose(
        self, plan: Plan, dim: int | None, training: bool, x: Tensor, weights: Operands, biases: Operands
    ) -> Chosen:
        def attempt(chosen: Chosen) -> None:
            self.attempt(chosen, plan, dim, training, x, weights, biases)

        # Ranks that save other rows make other exchanges backward: they must not take each other's for their own.
        name = f"{self.name} saving all rows" if plan.saves_gathered else self.name
        if plan.activation:  # which the matmul itself applies, or a kernel after it, and by the ways not alike
            name += f" {plan.activation}"
        if plan.batch > 1:  # of few tokens each, many of them take tiers very different times
            name += f" in {bucket(plan.batch)} batches"
        return choose(name, plan.tp, x, plan.shape, attempt, (plan.tokens, plan.each, plan.batch))


def _is_plain(plan: Plan) -> bool:
    """Whether nothing can be overlapped, for reasons that every rank knows: the plain path can be traced."""
    # Not by `in`: in compiled code that sees no symbolic size that is 0.
    return plan.tp.size == 1 or plan.tp.replicas > 1 or any(size == 0 for size in plan.shape)


class _Function(torch.autograd.Function):
    """An operation in eager mode, with gradients."""

    @staticmethod
    def forward(ctx, operation, chosen, plan, main_grads, residual, x, *operands):
        count = len(operands) // 2
        weights = operands[:count]
        results, pres = operation.forward(chosen, plan, True, x, weights, operands[count:], *_given(residual))
        ctx.operation, ctx.chosen, ctx.plan, ctx.main_grads, ctx.exact = operation, chosen, plan, main_grads, exact[-1]
        ctx.x_shape = x.shape
        if plan.saves_gathered:
            *pres, x = pres
        # The biases for `once_differentiable` alone: an activation's derivative depends on them.
        ctx.save_for_backward(x, *operands, *(results if plan.activation == "relu" else pres))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        count = len(grads)
        x, *saved = ctx.saved_tensors
        needs_residual, needs_x, *needs = ctx.needs_input_grad[4:]
        needs = Needs(needs_x, any(needs[:count]), any(needs[count:]), ctx.main_grads)
        if ctx.chosen is not None and not exists(ctx.chosen[0].process_group):
            raise RuntimeError(f"{ctx.operation.name}: a backward pass in a process group that has been destroyed")
        dys, kept = ([to_rows(tensor) for tensor in tensors] for tensors in (grads, saved[2 * count :]))
        with deterministic() if ctx.exact else nullcontext():
            dx, dweights, dbiases = ctx.operation.backward(
                ctx.chosen, ctx.plan, needs, dys, to_rows(x), saved[:count], kept
            )
        dresidual = grads[0] if needs_residual else None
        return None, None, None, None, dresidual, None if dx is None else dx.view(ctx.x_shape), *dweights, *dbiases


def _given(residual: Tensor | None) -> tuple[Tensor, ...]:
    return () if residual is None else (residual,)


def _operator_of(operation: Operation) -> Callable:
    """`operation` as ``torch.ops.tpfused.<name>``, and its derivative as ``<name>_backward``.

    Their `sizes` are a plan's (`sizes_of`); `group` is a process group's name.
    """

    def forward(
        x: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        activation: str | None,
        sizes: list[int],
        training: bool,
        group: str,
    ) -> list[Tensor]:
        plan, biases = _plan_of(group, activation, sizes), biases or [None] * len(weights)
        with deterministic() if sizes[-1] else nullcontext():
            chosen = operation.choose(plan, None, training, x, weights, biases)
            results, pres = operation.forward(chosen, plan, training, x, weights, biases)
        return [*results, *pres]

    def fake_forward(x, weights, biases, activation, sizes, training, group):
        plan = _plan_of(group, activation, sizes)
        results = [x.new_empty(operation.shape(plan, weight)) for weight in weights]
        pres = weights if training and plan.keeps_pre else []
        kept = [x.new_empty(plan.total, weight.shape[0]) for weight in pres]
        return results + kept + ([x.new_empty(plan.total, x.shape[1])] if training and plan.saves_gathered else [])

    def backward(
        grads: list[Tensor],
        x: Tensor,
        weights: list[Tensor],
        kept: list[Tensor],
        activation: str | None,
        sizes: list[int],
        needs: list[bool],
        group: str,
    ) -> list[Tensor]:
        plan = _plan_of(group, activation, sizes)
        own = x[: plan.own] if plan.saves_gathered else x  # as forward had it
        with deterministic() if sizes[-1] else nullcontext():
            chosen = operation.choose(plan, None, True, own, weights, [None] * len(weights))  # known, as a rule
            dx, dweights, dbiases = operation.backward(chosen, plan, Needs(*needs), grads, x, weights, kept)
        return [grad for grad in (dx, *dweights, *dbiases) if grad is not None]

    def fake_backward(grads, x, weights, kept, activation, sizes, needs, group):
        needs, plan = Needs(*needs), _plan_of(group, activation, sizes)
        dx = [x.new_empty(plan.own if plan.saves_gathered else x.shape[0], x.shape[1])] if needs.x else []
        dweights = [weight.new_empty(weight.shape) for weight in weights] if needs.weights else []
        dbiases = [weight.new_empty(weight.shape[0]) for weight in weights] if needs.biases else []
        return dx + dweights + dbiases

    def save(ctx, inputs, output):
        x, weights, biases, ctx.activation, ctx.sizes, ctx.training, ctx.group = inputs
        ctx.count, ctx.bias_count = len(weights), len(biases)
        ctx.set_materialize_grads(False)  # the pre-activations have none
        if _plan_of(ctx.group, ctx.activation, ctx.sizes).saves_gathered:
            *output, x = output
        ctx.save_for_backward(x, *weights, *(output if ctx.activation == "relu" else output[ctx.count :]))

    def gradients(ctx, grads):
        if not ctx.training:
            raise RuntimeError(f"{operation.name}: a program that was exported for inference has no backward pass")
        x, *saved = ctx.saved_tensors
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        plan = _plan_of(ctx.group, ctx.activation, ctx.sizes)
        grads = [
            x.new_zeros(operation.shape(plan, weight)) if grad is None else grad
            for grad, weight in zip(grads, weights, strict=False)
        ]
        needs = Needs(ctx.needs_input_grad[0], *map(any, ctx.needs_input_grad[1:3]))
        given = iter(derivative(grads, x, weights, kept, ctx.activation, ctx.sizes, list(needs[:3]), ctx.group))
        dx = next(given) if needs.x else None
        dweights = [next(given) if needs.weights else None for _ in weights]
        dbiases = [next(given) if needs.biases else None for _ in range(ctx.bias_count)]
        return dx, dweights, dbiases, None, None, None, None

    derivative = torch.library.custom_op(f"tpfused::{operation.name}_backward", backward, mutates_args=())
    derivative.register_fake(fake_backward)
    operator = torch.library.custom_op(f"tpfused::{operation.name}", forward, mutates_args=())
    operator.register_fake(fake_forward)
    operator.register_autograd(gradients, setup_context=save)
    return operator


def sizes_of(plan: Plan) -> list[int]:
    """A plan as operators take it: the group's size and this rank, sizes, 0 if not known, whether it `saves_gathered`,
    and whether all is `deterministic`.

    The rows of results are among them because a compiled backward pass would ask a result for what it can't find
    elsewhere, and recompute it for that: on those ranks alone whose share is such an expression, whom the others would
    not follow.
    """
    return [
        plan.tp.size, plan.tp.rank, plan.tokens, plan.each, plan.batch, plan.inputs or 0, plan.outputs or 0, plan.own,
        plan.total, int(plan.saves_gathered), int(exact[-1]),
    ]  # fmt: skip


def _plan_of(group: str, activation: str | None, sizes: Sequence[int]) -> Plan:
    size, rank, tokens, each, batch, inputs, outputs, own, total, saves_gathered, _ = sizes
    tp = resolve_group(dist.distributed_c10d._resolve_process_group(group))
    if (tp.size, tp.rank) != (size, rank):
        raise RuntimeError(f"a program made by rank {rank} of {size} runs on rank {tp.rank} of {tp.size}")
    plan = plan_of(tp, activation, tokens, each, batch, inputs or None, outputs or None)
    return plan._replace(own=own, total=total, saves_gathered=bool(saves_gathered), compiled=True)
