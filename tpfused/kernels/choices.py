"""Which of several ways to compute `linear_act` is the fastest here: a table of measurements, `choices.json`.

A fixed table rather than timing at first use: the same choice, hence the same bits, at every run and on every rank, and
nothing to wait for, least of all during CUDA-graph capture. ``benchmarks/choices.py`` measures it.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tpfused.kernels.launch import capability, is_half, multiprocessors

TABLE = Path(__file__).with_name("choices.json")


def choose(possible: tuple[str, ...], x: Tensor, n: int, activation: int, gated: bool, keeps_pre: bool) -> str:
    """One of `possible`: the fastest at the measured shape nearest to x's ``[M, K]`` and `n` columns."""
    if not x.is_cuda:
        return "triton" if "triton" in possible else possible[0]
    m = math.prod(x.shape[:-1])
    return _choose(possible, x.device, is_half(x), m, x.shape[-1], n, activation, gated, keeps_pre)


@lru_cache(maxsize=4096)
def _choose(possible, device, half, m, k, n, activation, gated, keeps_pre) -> str:
    rows = _table().get(torch.cuda.get_device_name(device), [])
    if not rows and capability(device) == (9, 0):
        rows = [row for card in _table().values() for row in card]  # another Hopper
    rows = [row for row in rows if (row["gated"], row["keeps_pre"]) == (gated, keeps_pre)]
    same = [row for row in rows if row["activation"] == activation] or rows
    if not half or min(m, k, n) == 0:
        return "cublas"
    if not same:
        # Without measurements: what was the fastest on an H100, and the safe way elsewhere.
        large = capability(device) == (9, 0) and m * n >= multiprocessors(device) * 128 * 256
        return next(way for way in ("cublaslt", "triton" if large else "cublas", "cublas") if way in possible)

    def distance(row):
        return sum(abs(math.log2(row[name] / value)) for name, value in (("m", m), ("k", k), ("n", n)))

    times = min(same, key=distance)["us"]
    return min((way for way in possible if way in times), key=times.get)


@lru_cache
def _table() -> dict[str, list[dict]]:
    """Card name -> ``[{m, k, n, activation, gated, keeps_pre, us: {backend: time}}]``."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}
