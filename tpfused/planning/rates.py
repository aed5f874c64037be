"""How fast a machine does each kind of work. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpfused.planning.communication import Fit, nearest
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Collective, Matmul, Pass


@dataclass(frozen=True)
class Rates:
    """What was measured, each kind of work alone.

    Attributes:
        matmul_tflops, attention_tflops, attention_backward_tflops: of large ones.
        memory_gbps: of contiguous passes, bytes read and written together.
        pass_rates: of the other kinds of passes, 1e9 elements a second.
        fits: of collectives.
        measured: microseconds of matmuls and attentions whose own shapes were measured; others go by the rates.
    """

    matmul_tflops: float
    attention_tflops: float
    attention_backward_tflops: float
    memory_gbps: float
    pass_rates: Mapping[str, float]
    fits: tuple[Fit, ...] = ()
    measured: Mapping[Matmul | Attention, float] = field(default_factory=dict)

    def us(self, work: Matmul | Attention | Pass | Collective, ranks: int = 1, group: str = "tp") -> float:
        """Microseconds of `work`; a collective's on groups of `ranks` of this kind, 0 on one."""
        if isinstance(work, Collective):
            if ranks == 1:
                return 0.0
            return nearest(self.fits, work.op, ranks, group).us(work.bytes, ranks)
        if isinstance(work, Pass):
            moving = work.bytes / self.memory_gbps / 1e3
            return moving if work.kind == CONTIGUOUS else max(moving, work.elements / self.pass_rates[work.kind] / 1e3)
        if work in self.measured:
            return self.measured[work]
        rate = self.matmul_tflops
        if isinstance(work, Attention):
            rate = self.attention_backward_tflops if work.backward else self.attention_tflops
        return work.flops / rate / 1e6

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without `measured`."""
        known = {name: getattr(self, name) for name in NAMES} | {"pass_rates": dict(self.pass_rates)}
        return known | {"fits": [asdict(each) for each in self.fits]}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Rates:
        """What `as_dict` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            fits = tuple(Fit(**each) for each in known["fits"])
            passes = {kind: float(known["pass_rates"][kind]) for kind in (STRIDED, JOINED)}
            rates = {name: float(known[name]) for name in NAMES}
            odd = [fit for fit in fits if not (fit.ranks > 1 and fit.alpha_us >= 0 and 0 <= fit.us_per_byte < math.inf)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no rates of a machine: {type(error).__name__}: {error}") from error
        if odd or not all(0 < rate < math.inf for rate in [*rates.values(), *passes.values()]):
            raise ValueError(f"no rates of a machine: all must be positive, not {odd[0] if odd else rates | passes}")
        return cls(**rates, pass_rates=passes, fits=fits)


NAMES = ("matmul_tflops", "attention_tflops", "attention_backward_tflops", "memory_gbps")
