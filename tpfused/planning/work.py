"""The kinds of work that a step is made of. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# How a pass goes over memory. An eager kernel over contiguous tensors is as fast as a copy of as many bytes. One over
# halves of rows, pairs or permuted heads, and one that joins tensors, work element by element: it is their elements
# that take the time, unless their bytes take more.
CONTIGUOUS, STRIDED, JOINED = ("contiguous", "strided", "joined")


@dataclass(frozen=True)
class Matmul:
    """One of the three of a linear layer ``y[m, n] = x[m, k] @ w[n, k].T``: "forward" (y), "dgrad" (dx = dy @ w) or
    "wgrad" (dw = dy.T @ x).
    """

    kind: str
    m: int
    k: int
    n: int

    @property
    def label(self) -> str:
        return f"matmul {self.kind} M{self.m} K{self.k} N{self.n}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of ``[batch, heads, tokens, head_dim]``, causal, forward or backward; of fewer
    `kv_heads` where several heads share a key and a value.
    """

    batch: int
    heads: int
    tokens: int
    head_dim: int
    backward: bool = False
    kv_heads: int | None = None

    @property
    def label(self) -> str:
        shape = f"[{self.batch}, {self.heads}, {self.tokens}, {self.head_dim}]"
        shared = f", {self.kv_heads} kv heads" if self.kv_heads not in (None, self.heads) else ""
        return f"attention {'backward' if self.backward else 'forward'} {shape}{shared}"

    @property
    def flops(self) -> int:
        """Two matmuls over half the scores; five in backward, the scores being computed again (Dao, 2023,
        "FlashAttention-2", section 4.1).
        """
        matmuls = 5 if self.backward else 2
        return matmuls * self.batch * self.heads * self.tokens**2 * self.head_dim


@dataclass(frozen=True)
class Pass:
    """Elementwise kernels: the bytes they read and write and, of those that are not contiguous, the elements they go
    over. `name` says what for.
    """

    name: str
    kind: str
    bytes: float
    elements: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.kind}, {self.bytes:,.0f} bytes"


@dataclass(frozen=True)
class Collective:
    """`bytes` as `bus_factor` has them."""

    op: str
    bytes: float

    @property
    def label(self) -> str:
        return f"{self.op} {self.bytes:,.0f} bytes"


@dataclass(frozen=True)
class Pair:
    """A matmul and a collective that do not wait for each other where the operation overlaps them."""

    matmul: Matmul
    collective: Collective


Work = Matmul | Attention | Pass | Collective | Pair
