"""How long a block, a pipeline stage and a training step take. No torch.

Kinds of work that a GPU does one after the other add up. Of a matmul and a collective that `tpfused.overlap` runs
beside each other (`Pair`) the longer counts, and that part of the shorter that the longer does not hide: ``matmul +
collective - hidden * min(matmul, collective)``. The `hidden` of `Rates` is 1 where they do not slow each other down,
which makes this ``max(matmul, collective)``; on the plain path it is 0.

The host launches a step's kernels ahead of the GPU (PyTorch's notes, "CUDA semantics", "Asynchronous execution"), which
waits where launching all of them takes longer than running them: ``max(GPU, calls * time a call)``, the slower stage of
a pipeline. Each piece of `Work` is a call of an eager program; CUDA graphs do away with the host's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tpfused.planning.block import Both
from tpfused.planning.rates import Rates
from tpfused.planning.work import CONTIGUOUS, Attention, Collective, Pair, Pass, Work


@dataclass(frozen=True)
class Time:
    """Microseconds of each kind of work; `hidden` is what the longer ones of matmuls and their collectives hide of the
    shorter ones, `host` what the host needs to launch all of it, beside the GPU's work.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    communication: float = 0.0
    hidden: float = 0.0
    host: float = 0.0

    @property
    def exposed(self) -> float:
        return self.communication - self.hidden

    @property
    def device(self) -> float:
        """Of the GPU, if it never waits for its host."""
        return self.matmul + self.attention + self.elementwise + self.exposed

    @property
    def total(self) -> float:
        return max(self.device, self.host)

    def __add__(self, other: Time) -> Time:
        return Time(*(getattr(self, name) + getattr(other, name) for name in FIELDS))

    def __mul__(self, times: float) -> Time:
        return Time(*(getattr(self, name) * times for name in FIELDS))


FIELDS = tuple(Time.__dataclass_fields__)


def time_of(works: Iterable[Work], rates: Rates, tp: int, overlap: bool) -> Time:
    """Of one rank of `tp`."""
    spent = dict.fromkeys(FIELDS, 0.0)
    share = (1.0 if rates.hidden is None else rates.hidden) if overlap else 0.0
    for work in works:
        spent["host"] += rates.host(work, tp)
        if isinstance(work, Pair):
            matmul, collective = rates.us(work.matmul), rates.us(work.collective, tp)
            spent["matmul"] += matmul
            spent["communication"] += collective
            spent["hidden"] += share * min(matmul, collective)
        elif isinstance(work, Collective):
            spent["communication"] += rates.us(work, tp)
        else:
            name = {Attention: "attention", Pass: "elementwise"}.get(type(work), "matmul")
            spent[name] += rates.us(work)
    return Time(**spent)


def forward_and_backward(both: Both, rates: Rates, tp: int, overlap: bool) -> tuple[Time, Time]:
    return time_of(both.forward, rates, tp, overlap), time_of(both.backward, rates, tp, overlap)


def bubble(pp: int, micro_batches: int) -> float:
    """The time in which a pipeline's stages idle, as a share of that in which they work: ``(pp - 1) / micro_batches``
    (Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section
    2.2.1)."""
    return (pp - 1) / micro_batches


def optimizer_us(parameters: int, size: int, rates: Rates) -> float:
    """AdamW's: gradient, fp32 parameter and two moments read, the last three written, and a 16-bit parameter."""
    moved = size + 3 * 4 + 3 * 4 + (size if size < 4 else 0)
    return rates.us(Pass("optimizer", CONTIGUOUS, moved * parameters))
