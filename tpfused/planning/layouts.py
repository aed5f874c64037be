"""Every way to split a model over some GPUs: what it holds, what it moves, what a step takes. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpfused.planning.block import Both, Setting, block, embedding, head
from tpfused.planning.communication import bus_factor
from tpfused.planning.memory import Memory, stage_memory
from tpfused.planning.rates import Rates
from tpfused.planning.shape import Shape
from tpfused.planning.time import Time, bubble, forward_and_backward, optimizer_us
from tpfused.planning.work import Collective, Pair

DEGREES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        batch: sequences of `tokens`, over all GPUs.
        micro_batch: sequences of one forward.
        bytes: of a number.
        checkpointed: blocks are computed again in backward.
        sequence_parallel, overlap, kernels: as in `Setting`.
    """

    batch: int
    micro_batch: int
    tokens: int
    bytes: int
    sequence_parallel: bool
    checkpointed: bool
    overlap: bool
    kernels: bool = True

    def setting(self, tp: int) -> Setting:
        together = self.sequence_parallel and tp > 1
        return Setting(tp, self.tokens, self.micro_batch, self.bytes, together, self.overlap, self.kernels)


@dataclass(frozen=True)
class Layout:
    """Tensor, data and pipeline parallelism: ``tp * dp * pp`` GPUs."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Plan:
    """What is predicted for a layout: memory and traffic in bytes of the rank that has the most, times in us.

    Attributes:
        sent: bytes on the wire a step and rank (`bus_factor`), of "tp", "dp" and "pp".
        work: a step of the slowest stage's rank, without bubble, data parallelism and optimizer.
        bubble: share of `work` that the pipeline idles.
        exposed_us: communication that nothing hides, of all kinds.
    """

    layout: Layout
    memory: Memory
    sent: dict[str, float]
    work: Time
    bubble: float
    exposed_us: float
    step_us: float

    def as_dict(self) -> dict[str, Any]:
        known = asdict(self)
        return known.pop("layout") | {"memory_bytes": known.pop("memory") | {"total": self.memory.total}} | known


def layouts(shape: Shape, step: Step, gpus: int) -> Iterator[Layout]:
    """Those of exactly `gpus` that can be built: heads that split, a stage a block at least, whole micro-batches."""
    for tp in _divisors(gpus, shape.heads):
        for pp in _divisors(gpus // tp, shape.layers):
            dp = gpus // tp // pp
            if shape.splits(tp) and step.batch % (dp * step.micro_batch) == 0:
                yield Layout(tp, dp, pp)


def why_none(shape: Shape, step: Step, gpus: int, asked: Mapping[str, int], unit: str = "GPUs") -> list[str]:
    """The conditions that leave none of `layouts`, of those with the degrees `asked` for ("tp", "dp", "pp").
    `unit`: what `gpus` counts."""
    wrong = [f"{name} {degree} does not divide {gpus} {unit}" for name, degree in asked.items() if gpus % degree]
    product = math.prod(asked.values())
    together = " x ".join(f"{name} {degree}" for name, degree in asked.items())
    if not wrong and gpus % product:
        wrong.append(f"{together} = {product} does not divide {gpus} {unit}")
    elif not wrong and len(asked) == len(DEGREES) and product != gpus:
        wrong.append(f"{together} = {product} is not {gpus} {unit}")
    unsplit = shape.why_unsplit(asked.get("tp", 1))
    if unsplit:
        wrong.append(unsplit)
    if asked.get("pp", 1) > shape.layers:
        wrong.append(f"pp {asked['pp']} is more than {shape.layers} layers")
    dp = asked.get("dp", 1)
    if step.batch % (dp * step.micro_batch):
        ranks = f" on each of dp {dp} ranks" if dp > 1 else ""
        wrong.append(f"a batch of {step.batch} is not whole micro-batches of {step.micro_batch}{ranks}")
    if wrong:
        return wrong
    # Each degree that was asked for can be: what is left for the others cannot.
    replicas = _replicas(shape, gpus, asked)
    if not replicas:
        models = f"{gpus // dp} {unit}" + (f" of each of dp {dp} ranks" if dp > 1 else "")
        return [f"no tp that splits the model and pp of at most {shape.layers} layers make up the {models}"]
    told = ", ".join(map(str, replicas[:5])) + ", ..." * (len(replicas) > 5)
    return [f"a batch of {step.batch} is not whole micro-batches of {step.micro_batch} on each rank of dp {told}"]


def _replicas(shape: Shape, gpus: int, asked: Mapping[str, int]) -> list[int]:
    """Each dp that some tp and pp leave, whatever the batch."""
    found = set()
    for tp in _divisors(gpus, shape.heads):
        for pp in _divisors(gpus // tp, shape.layers):
            degrees = {"tp": tp, "dp": gpus // tp // pp, "pp": pp}
            if shape.splits(tp) and degrees.items() >= asked.items():
                found.add(degrees["dp"])
    return sorted(found)


def predict(shape: Shape, step: Step, layout: Layout, rates: Rates) -> Plan:
    """A step of `layout`.

    A rank does its stage's blocks for each of its micro-batches, and waits for the bubble (`bubble`, of the
    one-forward-one-backward schedule). Blocks are dealt out evenly, the first stages having one more; the slowest stage
    sets the time. An activation and its gradient go from stage to stage, a micro-batch, with nothing to hide them.
    Gradients are all-reduced over the data-parallel ranks beside the last micro-batch's backward (as DDP does), and
    what is longer than that is exposed. Then comes AdamW.
    """
    setting = step.setting(layout.tp)
    micro_batches = step.batch // (layout.dp * step.micro_batch)
    stages = [_Stage(shape, step, layout, setting, at, rates) for at in sorted({0, layout.pp - 1})]
    slowest = max(stages, key=lambda stage: stage.micro_batch.total)
    work = slowest.micro_batch * micro_batches

    hop = Collective("broadcast", setting.own_rows * shape.hidden * step.bytes)  # two ranks' is a send and a receive
    hops = 2 * micro_batches * (layout.pp > 1)
    pp_us = hops * rates.us(hop, 2 if hops else 1, "pp")
    busy = work.total + pp_us
    share = bubble(layout.pp, micro_batches)

    # The stage with the most parameters: the first or the last.
    parameters = max(stage.parameters for stage in stages)
    gradients = Collective("all_reduce", parameters * step.bytes)
    dp_us = rates.us(gradients, layout.dp, "dp")
    exposed_dp = max(0.0, dp_us - slowest.backward.total)
    step_us = busy * (1 + share) + exposed_dp + optimizer_us(parameters, step.bytes, rates)
    sent = {
        "tp": max(stage.tp_bytes for stage in stages) * micro_batches,
        "dp": gradients.bytes * bus_factor("all_reduce", layout.dp),
        "pp": hops * hop.bytes,
    }
    memory = max((stage.memory for stage in stages), key=lambda memory: memory.total)
    return Plan(layout, memory, sent, work, share, work.exposed + pp_us + exposed_dp, step_us)


class _Stage:
    """A pipeline stage of a rank: `at` 0 is the first, which keeps the most micro-batches."""

    def __init__(self, shape: Shape, step: Step, layout: Layout, setting: Setting, at: int, rates: Rates):
        pp, tp = layout.pp, layout.tp
        first, last = at == 0, at == pp - 1
        micro_batches = step.batch // (layout.dp * step.micro_batch)
        layers = shape.layers // pp + (at < shape.layers % pp)
        inside = block(shape, setting)
        ends = [embedding(shape, setting)] * first + [head(shape, setting)] * last
        if step.checkpointed:  # forward runs again before backward
            inside = Both(inside.forward, inside.forward + inside.backward)
        self.forward, self.backward = Time(), Time()
        self.tp_bytes = 0.0
        for both, times in [(inside, layers), *((end, 1) for end in ends)]:
            forward, backward = forward_and_backward(both, rates, tp, step.overlap)
            self.forward += forward * times
            self.backward += backward * times
            self.tp_bytes += times * _sent(both, tp)
        self.micro_batch = self.forward + self.backward
        kept = min(micro_batches, pp - at)
        self.memory = stage_memory(shape, setting, layers, kept, first=first, last=last, checkpointed=step.checkpointed)
        self.parameters = round(self.memory.parameters / step.bytes)


def _sent(both: Both, tp: int) -> float:
    """Bytes on the wire."""
    found = (work.collective if isinstance(work, Pair) else work for work in both.forward + both.backward)
    return sum(work.bytes * bus_factor(work.op, tp) for work in found if isinstance(work, Collective))


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
