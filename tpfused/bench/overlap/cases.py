"""The shapes, and for each the ways to do the work: floors, baselines and ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.collectives import all_gather_single, reduce_scatter_single
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "mlp")

# Tokens, hidden size, and output features over all ranks.
SHAPES = {
    "8B fc1": (8192, 4096, 14336),
    "8B qkv": (8192, 4096, 6144),
    "70B fc1": (8192, 8192, 28672),
    "70B qkv": (8192, 8192, 10240),
    "8B fc1 M2048": (2048, 4096, 14336),
}
FC2_SHAPES = [name for name in SHAPES if "qkv" not in name]
MLP_SHAPES = {
    "8B": (8192, 4096, 14336),
    "70B": (8192, 8192, 28672),
    "GPT-3": (8192, 12288, 49152),
    "8B M2048": (2048, 4096, 14336),
}
SWEEP = [2**power for power in range(15)]  # tokens, of the 8B shape
QUICK = ("8B fc1", "8B")


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    direction: str
    m: int
    k: int
    n: int

    @property
    def label(self) -> str:
        return f"{self.op} {self.name} {self.direction}"


@dataclass(frozen=True)
class Work:
    """A case built on one rank.

    Attributes:
        variants: name -> a call that does it once.
        floor: the variants of which the slower one is what nothing can beat.
        right: the variant whose outputs are taken for right.
        checked: the variants compared with it.
        flops: of this rank's matmuls.
        notes: what a reader must know of a variant, which then is not "the best other".
    """

    variants: dict[str, Callable[[], object]]
    floor: tuple[str, ...]
    right: str
    checked: tuple[str, ...]
    flops: float
    notes: dict[str, str] = field(default_factory=dict)


def all_cases(sweep: bool) -> list[Case]:
    cases = [Case("all_gather_matmul", name, "fwd", *shape) for name, shape in SHAPES.items()]
    cases += [Case("matmul_reduce_scatter", name, "fwd", *SHAPES[name]) for name in FC2_SHAPES]
    cases += [Case("mlp", name, "fwd+bwd", *shape) for name, shape in MLP_SHAPES.items()]
    if sweep:
        for op in OPERATIONS[:2]:
            cases += [Case(op, f"sweep M{m}", "fwd", m, *SHAPES["8B fc1"][1:]) for m in SWEEP]
    return cases


def build(case: Case, device: torch.device, dtype: torch.dtype) -> Work:
    """The case for this rank of the default group; token counts that do not divide are rounded up."""
    world = dist.get_world_size()
    m = math.ceil(case.m / world) * world
    return _BUILDERS[case.op](case, m, case.n // world, world, partial(_random, device, dtype))


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _forced(name: str, call: Callable[[], object]) -> Callable[[], object]:
    def forced():
        with tier(name):
            return call()

    return forced


def _ours(call: Callable[[], object], random: Callable) -> dict[str, Callable[[], object]]:
    names = ("nccl", "p2p") if random(1).is_cuda else ()
    return {f"ours_{name}": _forced(name, call) for name in names} | {"ours": call}


def _without_grad(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)


def _build_all_gather_matmul(case: Case, m: int, n: int, world: int, random: Callable) -> Work:
    k = case.k
    x_shard, weight, bias = random(m // world, k), random(n, k) * k**-0.5, random(n)
    x = torch.empty(m, k, device=x_shard.device, dtype=x_shard.dtype)

    def gather():
        all_gather_single(x, x_shard)
        return x

    def multiply():
        if x.is_cuda:
            return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def both():
        gather()
        return multiply()

    gather()
    variants = {"matmul": multiply, "collective": gather, "nccl_then_cublas": both}
    notes = {}
    if x.is_cuda and hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
        group = dist.group.WORLD.group_name
        variants["torch_symm_mem"] = lambda: torch.ops.symm_mem.fused_all_gather_matmul(x_shard, [weight.t()], 0, group)
        notes["torch_symm_mem"] = "no bias, no GELU"
    ours = _ours(lambda: all_gather_matmul(x_shard, weight, bias, "gelu_tanh"), random)
    variants = {name: _without_grad(call) for name, call in (variants | ours).items()}
    return Work(variants, ("matmul", "collective"), "nccl_then_cublas", tuple(ours), 2 * m * n * k, notes)


def _build_matmul_reduce_scatter(case: Case, m: int, n: int, world: int, random: Callable) -> Work:
    """The shape is the first linear's; this is the one that follows: ``[m, n] @ [k, n].T``."""
    k = case.k
    x, weight = random(m, n), random(k, n) * case.n**-0.5
    part = F.linear(x, weight)
    out = part.new_empty(m // world, k)

    def scatter():
        reduce_scatter_single(out, part)
        return out

    def both():
        reduce_scatter_single(out, F.linear(x, weight))
        return out

    variants = {"matmul": lambda: F.linear(x, weight), "collective": scatter, "nccl_then_cublas": both}
    notes = {}
    if x.is_cuda and hasattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter"):
        group = dist.group.WORLD.group_name
        variants["torch_symm_mem"] = lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, weight.t(), "sum", 0, group
        )
    ours = _ours(lambda: matmul_reduce_scatter(x, weight), random)
    variants = {name: _without_grad(call) for name, call in (variants | ours).items()}
    return Work(variants, ("matmul", "collective"), "nccl_then_cublas", tuple(ours), 2 * m * n * k, notes)


def _build_mlp(case: Case, m: int, n: int, world: int, random: Callable) -> Work:
    """Column + bias + GELU, then row, sequence parallel."""
    k = case.k
    x_shard, w1, w2, b1 = random(m // world, k), random(n, k) * k**-0.5, random(k, n) * case.n**-0.5, random(n)
    leaves = [leaf.requires_grad_() for leaf in (x_shard, w1, b1, w2)]
    dy_shard, x, h, dy = random(m // world, k), random(m, k), random(m, n), random(m, k)

    @torch.no_grad()
    def matmuls():
        return F.linear(x, w1), F.linear(h, w2), dy @ w2, dy.t() @ h, h @ w1, h.t() @ x

    def ours():
        y_shard = matmul_reduce_scatter(all_gather_matmul(x_shard, w1, b1, "gelu_tanh"), w2)
        return y_shard.detach(), *torch.autograd.grad(y_shard, leaves, dy_shard)

    baseline = partial(_megatron_style, x_shard.detach(), w1.detach(), b1.detach(), w2.detach(), dy_shard)
    named = _ours(ours, random)
    variants = {"matmul": matmuls, "megatron_style": torch.no_grad()(baseline)} | named
    return Work(variants, ("matmul",), "megatron_style", tuple(named), 12 * m * n * k)


def _megatron_style(x_shard: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, dy_shard: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward with NCCL as Megatron-LM orders it: the collectives of backward run beside the matmul that
    comes next, those of forward before and after theirs."""

    def gather(shard, asynchronous=False):
        whole = shard.new_empty(shard.shape[0] * dist.get_world_size(), shard.shape[1])
        return whole, all_gather_single(whole, shard, async_op=asynchronous)

    x, _ = gather(x_shard)
    pre = F.linear(x, w1, b1)
    h = F.gelu(pre, approximate="tanh")
    y_shard = torch.empty_like(x_shard)
    reduce_scatter_single(y_shard, F.linear(h, w2))

    dy, _ = gather(dy_shard)
    dh = dy @ w2
    dw2 = dy.t() @ h
    dpre = torch.ops.aten.gelu_backward(dh, pre, approximate="tanh")
    x, arrived = gather(x_shard, asynchronous=True)
    dx = dpre @ w1
    arrived.wait()
    dx_shard = torch.empty_like(x_shard)
    scattered = reduce_scatter_single(dx_shard, dx, async_op=True)
    dw1, db1 = dpre.t() @ x, dpre.sum(0)
    scattered.wait()
    return y_shard, dx_shard, dw1, db1, dw2


_BUILDERS = {
    "all_gather_matmul": _build_all_gather_matmul,
    "matmul_reduce_scatter": _build_matmul_reduce_scatter,
    "mlp": _build_mlp,
}
