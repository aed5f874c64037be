"""What a prediction needs beside collectives: a large matmul, attention, and passes over memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tpfused.bench.measure import Timed
from tpfused.bench.sampling import interleave
from tpfused.layers.attention import scaled_dot_product_attention
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Matmul, Pass

# On a GPU and, much smaller, on a CPU.
MATMUL = {"cuda": (8192, 8192, 8192), "cpu": (256, 512, 512)}
ATTENTION = {"cuda": (1, 16, 8192, 128), "cpu": (1, 4, 256, 32)}
ROWS = {"cuda": (8192, 4096), "cpu": (256, 512)}


def measure_rates(device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """All of `Rates` but the fits, of the slowest rank; and its memory."""
    matmul = Matmul("forward", *MATMUL[device.type])
    attention = [Attention(*ATTENTION[device.type], backward) for backward in (False, True)]
    rows = ROWS[device.type]
    us = time_calls(calls_of([matmul, *attention], device, dtype) | pass_calls(rows, device, dtype), rounds, device)
    forward, backward = (each.flops / us[each] / 1e6 for each in attention)
    return {
        "matmul_tflops": matmul.flops / us[matmul] / 1e6,
        "attention_tflops": forward,
        "attention_backward_tflops": backward,
        "memory_bytes": memory_bytes(device),
    } | pass_rates(us)


def memory_bytes(device: torch.device) -> int:
    """Of the GPU, or a rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()


def time_calls(calls: dict[Any, Callable], rounds: int, device: torch.device) -> dict[Any, float]:
    """Microseconds of each, the slowest rank's, all in each round."""
    samples = interleave({key: Timed(call, 1, False) for key, call in calls.items()}, rounds, device)
    return {key: median(sampled.us) for key, sampled in samples.items()}


def calls_of(
    works: list[Matmul | Attention], device: torch.device, dtype: torch.dtype
) -> dict[Matmul | Attention, Callable]:
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
