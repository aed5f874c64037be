"""The shapes that are measured, of one layer of known models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather", "mlp")
OVER_TOKENS = ("all_gather_matmul", "matmul_reduce_scatter", "mlp")  # whose inputs or outputs are split by tokens

# Tokens, input features and output features, of all ranks together. Column-parallel layers split the last ...
FC1 = {
    "8B fc1": (8192, 4096, 14336),
    "8B qkv": (8192, 4096, 6144),
    "70B fc1": (8192, 8192, 28672),
    "70B qkv": (8192, 8192, 10240),
    "GPT-3 fc1": (8192, 12288, 49152),
    "8B fc1 M2048": (2048, 4096, 14336),
}
GATHERED = ("8B fc1", "8B qkv")
# ... and row-parallel ones the one before.
FC2 = {
    "8B fc2": (8192, 14336, 4096),
    "70B fc2": (8192, 28672, 8192),
    "8B fc2 M2048": (2048, 14336, 4096),
    "70B fc2 M2048": (2048, 28672, 8192),
}
# Tokens, the hidden size, and the features between the two matmuls.
MLP = {
    "8B": (8192, 4096, 14336),
    "70B": (8192, 8192, 28672),
    "GPT-3": (8192, 12288, 49152),
    "8B M2048": (2048, 4096, 14336),
}
DECODE = {f"decode M{m}": (m, 14336, 8192) for m in (1, 8, 16, 64, 256)}
SWEEP = [2**power for power in range(15)]  # tokens
QUICK = ("8B fc1", "8B fc2", "8B", "decode M8")


@dataclass(frozen=True)
class Case:
    """An operation at one shape, its sizes those of all ranks together.

    Attributes:
        decode: replayed from a CUDA graph, and held to the matmul alone; `k` is each rank's, until `on` multiplies it.
    """

    op: str
    name: str
    direction: str
    m: int
    k: int
    n: int
    decode: bool = False

    @property
    def label(self) -> str:
        return f"{self.op} {self.name} {self.direction}"

    @property
    def quick(self) -> bool:
        return self.name in QUICK

    @property
    def shape(self) -> str:
        return f"M{self.m} K{self.k} N{self.n}" + " in a CUDA graph, K a rank" * self.decode

    def on(self, world: int) -> Case:
        """The case as `world` ranks do it: tokens that are split, and do not divide evenly, are rounded up."""
        m = math.ceil(self.m / world) * world if self.op in OVER_TOKENS else self.m
        return replace(self, m=m, k=self.k * world if self.decode else self.k)


def cases(op: str, sweep: bool) -> list[Case]:
    """The operation's cases; `sweep`: with those of a curve over the tokens, of the 8B shape."""
    if op == "mlp":
        return [Case(op, name, "fwd+bwd", *shape) for name, shape in MLP.items()]
    columns = op in ("all_gather_matmul", "matmul_all_gather")
    shapes = dict(FC1 if columns else FC2)
    if op == "matmul_all_gather":
        shapes = {name: shape for name, shape in shapes.items() if name in GATHERED}
    found = [Case(op, name, "fwd", *shape) for name, shape in shapes.items()]
    if op == "matmul_all_reduce":
        found += [Case(op, name, "fwd", *shape, decode=True) for name, shape in DECODE.items()]
    if sweep:
        _, k, n = next(iter(shapes.values()))
        found += [Case(op, f"sweep M{m}", "fwd", m, k, n) for m in SWEEP]
    return found
