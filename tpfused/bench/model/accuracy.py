"""How far programs in 16 bits are from the model in float32: with few layers, which is cheap, and as many tokens as are
timed, of which it depends which kernels run and how rows travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.bench.model.cases import Degree, Size
from tpfused.bench.model.programs import Place, Program, Tensors, build, build_all, build_peer
from tpfused.bench.sampling import together
from tpfused.sharding import shard_range

ROWS = 1024  # that are compared at a time


@dataclass(frozen=True)
class Deviation:
    """The norm of the difference, relative to the float32 model's, of all logits and of all gradients together."""

    logits: float
    gradients: float


@dataclass(frozen=True)
class Outcome:
    """One step's logits and gradients: whole, or one rank's."""

    logits: Tensor
    gradients: Tensors


Deviations = dict[tuple[Degree, str], Deviation]


def deviations(
    size: Size, tokens: int, alone: Place, places: Sequence[Place], variants: Sequence[str], seed: int
) -> tuple[Deviation | None, Deviations]:
    """Those of the dense model in 16 bits, and of our and our peers' programs at each degree.

    `alone` is a place of one rank. The compiler is left out, and so is what fails: that is told where it is timed.
    Where the dense model fails, which in float32 takes twice the memory, there are none.
    """
    layers = size.compared
    generator = torch.Generator(alone.device).manual_seed(seed)
    ids, labels = (
        torch.randint(size.vocabulary, (1, tokens), device=alone.device, generator=generator) for _ in range(2)
    )

    def outcome(program: Program) -> Outcome:
        with torch.no_grad(), program.inside():
            logits = program.logits(ids)
        program.step(ids, labels)
        return Outcome(logits, program.gradients())

    def dense(place: Place) -> Outcome:
        return outcome(build_peer("dtensor", size, layers, tokens, place, weights))

    _, weights = build(size, layers, tokens, alone, seed)
    exact, _ = together(lambda: _in_float32(dense, alone))
    of_dense = None if exact is None else _deviation(lambda: dense(alone), exact, alone)
    if of_dense is None:
        return None, {}
    found: Deviations = {}
    for place in places:
        names = [name for name in variants if name != "dtensor_compiled"]
        for name, program, _ in build_all(names, size, layers, tokens, place, seed):
            if program is not None:
                deviation = _deviation(lambda: outcome(program), exact, place)  # noqa: B023 (it is called at once)
                if deviation is not None:
                    found[place.degree, name] = deviation
                program.forget_gradients()
    return of_dense, found


def _in_float32(call: Callable[[Place], Outcome], place: Place) -> Outcome:
    """Without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return call(replace(place, dtype=torch.float32))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _deviation(step: Callable[[], Outcome], exact: Outcome, place: Place) -> Deviation | None:
    """Of what `step` gives; None where it fails on some rank. The ranks of the place's tensor-parallel group have a
    part each."""

    def squares() -> Tensor:
        found = step()
        gradients = [_squares(grad, exact.gradients[name], place) for name, grad in found.gradients.items()]
        return torch.stack((_squares(found.logits, exact.logits, place), torch.stack(gradients).sum(0)))

    sums, _ = together(squares)
    if sums is None:
        return None
    dist.all_reduce(sums, group=place.tp.get_group())
    return Deviation(*(sums[:, 0] / sums[:, 1]).sqrt().tolist())


def _squares(part: Tensor, whole: Tensor, place: Place) -> Tensor:
    """The sums of squares of the difference and of what is right, of this rank's part, a few rows at a time: the
    logits' difference alone would be 4 GiB."""
    size, rank = place.degree.tp, place.rank
    share = 1.0
    if part.shape == whole.shape:
        share = 1 / size  # which every rank has
    else:
        (dim,) = (dim for dim, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b)
        start, stop = shard_range(whole.shape[dim], size, rank)
        whole = whole.narrow(dim, start, stop - start)
    sums = torch.zeros(2, dtype=torch.float64, device=part.device)
    for mine, right in zip(*(x.flatten(0, max(0, x.ndim - 2)).split(ROWS) for x in (part, whole)), strict=True):
        sums += torch.stack([x.float().norm().double() ** 2 for x in (mine.float() - right, right)])
    return share * sums
