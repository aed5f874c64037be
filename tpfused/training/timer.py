"""Where a step's time goes: clocks on the CPU, events on the GPU, which cost it no synchronisation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

PHASES = ("forward", "backward", "optimizer")
# Tensor-parallel collectives run inside forward and backward: their time is a part of those two.
COMMUNICATION = "communication"
# The first steps allocate memory and pick kernels; they are left out where others exist.
WARMUP_STEPS = 3


class StepTimer:
    """Collects each step's phases; `milliseconds()` gives the median step."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple] = []  # (phase, start, stop) of the step under way
        self._steps: list[dict[str, float]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        totals = dict.fromkeys((*PHASES, COMMUNICATION), 0.0)
        for phase, begin, end in self._spans:
            totals[phase] += begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3
        self._spans.clear()
        self._steps.append({"step": (time.perf_counter() - start) * 1e3, **totals})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        done = self._start(name)
        yield
        done()

    def observe_collective(self, name: str, tensor: torch.Tensor):
        """For `tpfused.collectives.observe`."""
        return self._start(COMMUNICATION)

    def last(self) -> float:
        """The latest step's milliseconds."""
        return self._steps[-1]["step"]

    def milliseconds(self) -> dict[str, float]:
        """The median over the steps of "step" and of each phase."""
        steps = self._steps[WARMUP_STEPS:] or self._steps
        return {name: median(step[name] for step in steps) for name in self._steps[0]}

    def _start(self, name: str):
        begin = self._now()
        return lambda: self._spans.append((name, begin, self._now()))

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
