"""How fast a machine does each kind of work. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tpfused.planning.communication import Fit, nearest
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Collective, Matmul, Pair, Pass, Work

# Of `Rates.latency_us`, and of `Rates.host_us`.
MATMUL, ATTENTION, ATTENTION_BACKWARD, MEMORY = LATENCIES = ("matmul", "attention", "attention_backward", "memory")
PARALLEL_MATMUL, OTHER = "parallel_matmul", "other"
CALLS = (MATMUL, PARALLEL_MATMUL, OTHER)


@dataclass(frozen=True)
class Rates:
    """What was measured, each kind of work alone.

    A kernel takes a latency and then its size over a rate, ``t = t0 + size / r``: Hockney's model of a vector pipeline
    (Hockney and Jesshope, 1981, "Parallel Computers": r_infinity and n_1/2), and of messages (`Fit`). The size of a
    matmul and of attention are FLOPs, that of a pass bytes. So a tensor-parallel rank's narrower matmuls run at a lower
    rate than whole ones.

    Attributes:
        matmul_tflops, attention_tflops, attention_backward_tflops: of large ones, 1e12 FLOPs a second.
        memory_gbps: of contiguous passes, bytes read and written together, 1e9 a second.
        pass_rates: of the other kinds of passes, 1e9 elements a second.
        fits: of collectives.
        measured: microseconds of matmuls and attentions whose own shapes were measured; others go by the rates.
        latency_us: of each of `LATENCIES`, microseconds; 0 for what is not there.
        host_us: microseconds that the host needs for a call, forward and backward on average, by `CALLS`: a layer's
            matmul on one rank; on several, its collective included; anything else. 0 for what is not there.
        hidden: of the shorter one of a matmul and the collective that runs beside it, the share that the longer one
            hides. Less than 1 where they slow each other down; not known, it is taken to be 1.
    """

    matmul_tflops: float
    attention_tflops: float
    attention_backward_tflops: float
    memory_gbps: float
    pass_rates: Mapping[str, float]
    fits: tuple[Fit, ...] = ()
    measured: Mapping[Matmul | Attention, float] = field(default_factory=dict)
    latency_us: Mapping[str, float] = field(default_factory=dict)
    host_us: Mapping[str, float] = field(default_factory=dict)
    hidden: float | None = None

    def us(self, work: Matmul | Attention | Pass | Collective, ranks: int = 1, group: str = "tp") -> float:
        """Microseconds of `work`; a collective's on groups of `ranks` of this kind, 0 on one."""
        if isinstance(work, Collective):
            if ranks == 1:
                return 0.0
            return nearest(self.fits, work.op, ranks, group).us(work.bytes, ranks)
        if isinstance(work, Pass):
            moving = self.latency_us.get(MEMORY, 0.0) + work.bytes / self.memory_gbps / 1e3
            return moving if work.kind == CONTIGUOUS else max(moving, work.elements / self.pass_rates[work.kind] / 1e3)
        if work in self.measured:
            return self.measured[work]
        kind, rate = MATMUL, self.matmul_tflops
        if isinstance(work, Attention) and work.backward:
            kind, rate = ATTENTION_BACKWARD, self.attention_backward_tflops
        elif isinstance(work, Attention):
            kind, rate = ATTENTION, self.attention_tflops
        return self.latency_us.get(kind, 0.0) + work.flops / rate / 1e6

    def host(self, work: Work, ranks: int) -> float:
        """Microseconds that the host needs to launch `work` on one of so many ranks."""
        if not isinstance(work, Matmul | Pair):
            return self.host_us.get(OTHER, 0.0)
        return self.host_us.get(PARALLEL_MATMUL if ranks > 1 else MATMUL, 0.0)

    def unknown(self) -> list[str]:
        """What was not measured, and counts as nothing: of files of an earlier version, or where only numbers were
        given."""
        told = {
            "the latency of kernels": [kind for kind in LATENCIES if kind not in self.latency_us],
            "the host's time a call": [kind for kind in CALLS if kind not in self.host_us],
        }
        whole = (list(LATENCIES), list(CALLS))
        missing = [what if kinds in whole else f"{what} ({', '.join(kinds)})" for what, kinds in told.items() if kinds]
        return missing + ["how much of a collective a matmul hides"] * (self.hidden is None and bool(self.fits))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without `measured`."""
        known = {name: getattr(self, name) for name in NAMES} | {"pass_rates": dict(self.pass_rates)}
        known |= {"latency_us": dict(self.latency_us), "host_us": dict(self.host_us), "hidden": self.hidden}
        return known | {"fits": [asdict(each) for each in self.fits]}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Rates:
        """What `as_dict` gave, or gave before there were `latency_us`, `host_us` and `hidden`.

        Raises:
            ValueError: it is something else; names all that is missing, or the first thing that is no such number.
        """
        missing = missing_of(known)
        if missing:
            raise ValueError(f"no rates of a machine: there is no {', '.join(missing)}")
        rates = {name: _number(name, known[name], above=True) for name in NAMES}
        passes = {kind: _number(kind, known["pass_rates"][kind], above=True) for kind in (STRIDED, JOINED)}
        latencies = _times("latency_us", known.get("latency_us", {}), LATENCIES)
        calls = _times("host_us", known.get("host_us", {}), CALLS)
        hidden = None if known.get("hidden") is None else _number("hidden", known["hidden"], most=1)
        fits = tuple(_fit(f"fits[{index}]", each) for index, each in enumerate(known["fits"]))
        return cls(**rates, pass_rates=passes, fits=fits, latency_us=latencies, host_us=calls, hidden=hidden)


NAMES = ("matmul_tflops", "attention_tflops", "attention_backward_tflops", "memory_gbps")
FIT = ("op", "group", "ranks", "alpha_us", "us_per_byte")  # without which a fit says nothing


def missing_of(rates: object) -> list[str]:
    """What of `Rates.as_dict` is not there, and cannot be done without, by its place."""
    missing = lacking("rates", rates, (*NAMES, "pass_rates", "fits"))
    if isinstance(rates, Mapping) and rates.get("pass_rates") is not None:
        missing += lacking("rates.pass_rates", rates["pass_rates"], (STRIDED, JOINED))
    if isinstance(rates, Mapping) and rates.get("fits") is not None:
        each = rates["fits"] if isinstance(rates["fits"], list | tuple) else [rates["fits"]]
        missing += [name for index, fit in enumerate(each) for name in lacking(f"rates.fits[{index}]", fit, FIT)]
    return missing


def lacking(place: str, table: object, names: Iterable[str]) -> list[str]:
    """Which of `names` are not in `table`, or null, with its place; the place alone where it is no table."""
    if not isinstance(table, Mapping):
        return [place]
    return [f"{place}.{name}" for name in names if table.get(name) is None]


def _fit(place: str, known: Mapping[str, Any]) -> Fit:
    for name, is_right in (
        ("op", isinstance(known["op"], str)),
        ("group", isinstance(known["group"], str)),
        ("ranks", isinstance(known["ranks"], int) and known["ranks"] > 1),
    ):
        if not is_right:
            raise ValueError(f"no rates of a machine: {place}.{name} is {known[name]!r}")
    for name in ("alpha_us", "us_per_byte"):
        _number(f"{place}.{name}", known[name])
    return Fit(**{each.name: known[each.name] for each in fields(Fit) if each.name in known})


def _times(name: str, table: object, kinds: Iterable[str]) -> dict[str, float]:
    """Those of these kinds that the table has."""
    if not isinstance(table, Mapping):
        raise ValueError(f"no rates of a machine: {name} is {table!r}, no table of times")
    return {kind: _number(f"{name}.{kind}", table[kind]) for kind in kinds if kind in table}


def _number(name: str, value: object, above: bool = False, most: float = math.inf) -> float:
    """From 0, or above it, up to `most`; finite."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_one or not 0 <= value <= most or value == math.inf or (above and not value):
        must = "above 0" if above else "0 or more" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"no rates of a machine: {name} must be a number {must}, not {value!r}")
    return float(value)
