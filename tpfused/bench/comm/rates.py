"""What a prediction needs beside collectives: the rates of matmuls, attention and passes over memory, each with its
latency; and, by `programs.py`, the host's time a call and what of a collective a matmul hides.

All by the clock that a GPU has under load (`tpfused.bench.sampling.Load`), as in a training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tpfused.bench.comm.programs import Programs
from tpfused.bench.measure import Timed, median_and_iqr
from tpfused.bench.sampling import Sampled, interleave, load_of
from tpfused.layers.attention import scaled_dot_product_attention
from tpfused.planning.communication import line
from tpfused.planning.rates import ATTENTION, ATTENTION_BACKWARD, MATMUL, MEMORY
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Matmul, Pass

# On a GPU and, much smaller, on a CPU: large ones, and as small as they are on many ranks or of few tokens. A matmul's
# (m, k, n), attention's (batch, heads, tokens, head_dim), a pass' (rows, columns).
MATMULS = {
    "cuda": [(8192, 8192, 8192), (8192, 4096, 4096), (2048, 4096, 4096), (2048, 4096, 1024), (2048, 1024, 4096)],
    "cpu": [(256, 512, 512), (64, 512, 128), (16, 128, 128)],
}
ATTENTIONS = {"cuda": [(1, 16, 8192, 128), (1, 16, 2048, 128)], "cpu": [(1, 4, 256, 32), (1, 4, 64, 32)]}
ROWS = {"cuda": [(8192, 4096), (256, 4096)], "cpu": [(256, 512), (16, 512)]}


def measure_rates(
    device: torch.device, dtype: torch.dtype, rounds: int, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """All of `Rates` but the fits, of the slowest rank; its memory, "memory_bytes"; and "measured_us", the microseconds
    of what they were found by. `group`: ranks that split layers between them; None for one alone.
    """
    kinds = {
        MATMUL: [Matmul(kind, *size) for size in MATMULS[device.type] for kind in ("forward", "dgrad", "wgrad")],
        ATTENTION: [Attention(*size) for size in ATTENTIONS[device.type]],
        ATTENTION_BACKWARD: [Attention(*size, backward=True) for size in ATTENTIONS[device.type]],
    }
    large, small = (pass_calls(rows, device, dtype) for rows in ROWS[device.type])
    sums = {work: call for work, call in (large | small).items() if work.kind == CONTIGUOUS}
    programs = Programs(device, dtype, group)
    works = dict.fromkeys([*(work for each in kinds.values() for work in each), *programs.matmuls])
    samples = time_calls(calls_of(works, device, dtype) | large | sums | programs.calls, rounds, device, dtype)
    us = {key: median_and_iqr(sampled.us)[0] for key, sampled in samples.items()}
    lines = {kind: _line(kind, [(work.flops, us[work]) for work in each]) for kind, each in kinds.items()}
    lines[MEMORY] = _line(MEMORY, [(work.bytes, us[work]) for work in sums])
    return {f"{kind}_tflops": lines[kind][1] / 1e6 for kind in kinds} | {
        "memory_gbps": lines[MEMORY][1] / 1e3,
        "pass_rates": pass_rates({work: us[work] for work in large})["pass_rates"],
        "latency_us": {kind: latency for kind, (latency, _) in lines.items()},
        "host_us": programs.host_us({key: sampled.host_us for key, sampled in samples.items()}),
        "hidden": programs.hidden(us),
        "memory_bytes": memory_bytes(device),
        "measured_us": {told(key): round(time, 3) for key, time in us.items()},
    }


def told(key: Any) -> str:
    """Of a piece of work, or a program."""
    return f"{key}, forward and backward" if isinstance(key, str) else key.label


def _line(kind: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The latency of a kind of work, and its rate: of a large one, where the size made no difference."""
    latency, us_each = line(kind, points)
    size, us = max(points)
    return (latency, 1 / us_each) if us_each else (0.0, size / us)


def memory_bytes(device: torch.device) -> int:
    """Of the GPU, or a rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()


def time_calls(
    calls: Mapping[Any, Callable], rounds: int, device: torch.device, dtype: torch.dtype, waiting: Container = ()
) -> dict[Any, Sampled]:
    """The slowest rank's times, all calls in each round; the GPU under load until it comes to one. Those in `waiting`
    have their host's time in theirs, as a program does."""
    timed = {key: Timed(call, 1, False) for key, call in calls.items()}
    return interleave(timed, rounds, device, waiting=waiting, load=load_of(device, dtype))


def calls_of(works: Iterable[Matmul | Attention], device: torch.device, dtype: torch.dtype) -> dict[Any, Callable]:
    """Each alone, on random data: a matmul on zeros is faster."""
    return {work: (_matmul if isinstance(work, Matmul) else _attention)(work, device, dtype) for work in works}


def _matmul(work: Matmul, device: torch.device, dtype: torch.dtype) -> Callable:
    random = partial(torch.randn, device=device, dtype=dtype)
    m, k, n = work.m, work.k, work.n
    if work.kind == "forward":
        return partial(F.linear, random(m, k), random(n, k) * k**-0.5)
    if work.kind == "dgrad":
        return partial(torch.mm, random(m, n), random(n, k) * k**-0.5)
    return partial(torch.mm, random(m, n).t(), random(m, k))


def _attention(work: Attention, device: torch.device, dtype: torch.dtype) -> Callable:
    """As the layers call it."""

    def tensor(heads: int) -> torch.Tensor:  # tokens first in memory, as in the packed projection
        values = torch.randn(work.batch, work.tokens, heads, work.head_dim, device=device, dtype=dtype)
        return values.transpose(1, 2)

    kv_heads = work.kv_heads or work.heads
    leaves = [tensor(heads).requires_grad_() for heads in (work.heads, kv_heads, kv_heads)]
    attend = partial(scaled_dot_product_attention, *leaves, None, True, 0.0)
    if not work.backward:
        return attend
    out, grad = attend(), tensor(work.heads)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def pass_calls(rows: tuple[int, int], device: torch.device, dtype: torch.dtype) -> dict[Pass, Callable]:
    """A pass of each kind over so many numbers: a sum; a product with every second number; a pairing of two."""
    a, b = (torch.randn(rows, device=device, dtype=dtype) for _ in range(2))
    alternating = torch.randn(*rows, 2, device=device, dtype=dtype)[..., 1]
    numbers, size = a.numel(), a.numel() * a.element_size()
    return {
        Pass("sum", CONTIGUOUS, 3 * size): partial(torch.add, a, b),
        Pass("product", STRIDED, 4 * size, numbers): partial(torch.mul, a, alternating),
        Pass("pairs", JOINED, 4 * size, 2 * numbers): partial(torch.stack, (a, b), dim=-1),
    }


def pass_rates(us: Mapping[Any, float]) -> dict[str, Any]:
    """What `Rates` has of passes, from the times of `pass_calls`."""
    passes = {work.kind: (work, time) for work, time in us.items() if isinstance(work, Pass)}
    work, time = passes.pop(CONTIGUOUS)
    rates = {kind: other.elements / taken / 1e3 for kind, (other, taken) in passes.items()}
    return {"memory_gbps": work.bytes / time / 1e3, "pass_rates": rates}
