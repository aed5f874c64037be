"""The ways to do each case: its matmul and its collective alone, what users have today, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.bench.overlap.cases import Case
from tpfused.collectives import all_gather_single, reduce_scatter_single
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import matmul_all_gather
from tpfused.overlap.matmul_all_reduce import matmul_all_reduce
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import TIERS, tier

Call = Callable[[], object]
Variants = dict[str, Call]

MATMUL, COLLECTIVE = "matmul", "collective"
ONE_SHOT_BYTES = 256 * 2**10  # torch's one-shot all-reduce is for less, its two-shot one for more


@dataclass(frozen=True)
class Work:
    """A case built on one rank.

    Attributes:
        variants: name -> a call that does it once; `MATMUL` and `COLLECTIVE` are its two parts alone.
        floor: the variants of which the slower one is what nothing can beat.
        right: the variant whose outputs are taken for right.
        flops: of this rank's matmuls.
        notes: what a variant leaves out. It is not compared with `right`, and never "the best other".
    """

    variants: Variants
    floor: tuple[str, ...]
    right: str
    flops: float
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def checked(self) -> list[str]:
        return [name for name in self.variants if name not in (MATMUL, COLLECTIVE, self.right, *self.notes)]


@dataclass(frozen=True)
class Place:
    """Where a case is built: on one of `world` ranks."""

    world: int
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def build(case: Case, place: Place) -> Work:
    """`case`, as `Case.on` made it."""
    return _BUILDERS[case.op](case, place)


def _operation(case: Case, place: Place, variants: dict[str, Call | None], ours: Call, **notes: str) -> Work:
    """The work of a forward: its parts, NCCL then cuBLAS, torch's operator or None, and `ours`."""
    present = {name: call for name, call in variants.items() if call is not None} | _ours(ours, place)
    without_grad = {name: torch.no_grad()(call) for name, call in present.items()}
    floor = (MATMUL,) if case.decode else (MATMUL, COLLECTIVE)
    return Work(without_grad, floor, "nccl_then_cublas", 2 * case.m * case.k * case.n // place.world, notes)


def _multiply_then(collect: Callable[[Tensor], object], multiply: Callable[[], Tensor], part: Tensor) -> Variants:
    """Each alone, the collective of `part`, and one after the other."""
    alone = {MATMUL: multiply, COLLECTIVE: partial(collect, part)}
    return alone | {"nccl_then_cublas": lambda: collect(multiply())}


def _ours(call: Call, place: Place) -> Variants:
    """Each tier, and what a layer would use."""

    def forced(name: str) -> object:
        with tier(name):
            return call()

    tiers = TIERS if place.device.type == "cuda" else ()
    return {f"ours_{name}": partial(forced, name) for name in tiers} | {"ours": call}


def _torch_operator(name: str, place: Place) -> Callable | None:
    """torch's symmetric-memory operator of that name, where it has one."""
    try:
        import torch.distributed._symmetric_memory  # noqa: F401 (registers them)
    except ImportError:
        return None
    return getattr(torch.ops.symm_mem, name, None) if place.device.type == "cuda" else None


def _all_gather_matmul(case: Case, place: Place) -> Work:
    """With bias and GELU."""
    world, random = place.world, place.random
    m, k, n = case.m, case.k, case.n // world
    x_shard, weight, bias, x = random(m // world, k), random(n, k) * k**-0.5, random(n), random(m, k)

    def gather() -> Tensor:
        all_gather_single(x, x_shard)
        return x

    def multiply() -> Tensor:
        if x.is_cuda:
            return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def both() -> Tensor:
        gather()
        return multiply()

    operator = _torch_operator("fused_all_gather_matmul", place)
    fused = operator and (lambda: operator(x_shard, [weight.t()], 0, dist.group.WORLD.group_name))
    variants = {MATMUL: multiply, COLLECTIVE: gather, "nccl_then_cublas": both, "torch_symm_mem": fused}
    ours = partial(all_gather_matmul, x_shard, weight, bias, "gelu_tanh")
    return _operation(case, place, variants, ours, torch_symm_mem="no bias, no GELU")


def _row_operands(case: Case, place: Place) -> tuple[Tensor, Tensor]:
    k = case.k // place.world
    return place.random(case.m, k), place.random(case.n, k) * case.k**-0.5


def _matmul_reduce_scatter(case: Case, place: Place) -> Work:
    x, weight = _row_operands(case, place)
    out = x.new_empty(case.m // place.world, case.n)

    def scatter(part: Tensor) -> Tensor:
        reduce_scatter_single(out, part)
        return out

    variants = _multiply_then(scatter, partial(F.linear, x, weight), place.random(case.m, case.n))
    operator = _torch_operator("fused_matmul_reduce_scatter", place)
    fused = operator and (lambda: operator(x, weight.t(), "sum", 0, dist.group.WORLD.group_name))
    return _operation(case, place, variants | {"torch_symm_mem": fused}, partial(matmul_reduce_scatter, x, weight))


def _matmul_all_reduce(case: Case, place: Place) -> Work:
    x, weight = _row_operands(case, place)

    def reduce(part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    zeros = x.new_zeros(case.m, case.n)  # which stay what they are, however often they are summed
    variants = _multiply_then(reduce, partial(F.linear, x, weight), zeros)
    variants["torch_symm_mem"] = _torch_all_reduce(x, weight, place)
    return _operation(case, place, variants, partial(matmul_all_reduce, x, weight))


def _torch_all_reduce(x: Tensor, weight: Tensor, place: Place) -> Call | None:
    """A matmul into torch's symmetric memory, then its all-reduce of that: torch has no operator for both."""
    m, n = x.shape[0], weight.shape[0]
    small = m * n * x.element_size() <= ONE_SHOT_BYTES
    operator = _torch_operator("one_shot_all_reduce" if small else "two_shot_all_reduce_", place)
    if operator is None:
        return None
    from torch.distributed import _symmetric_memory

    group = dist.group.WORLD.group_name

    @functools.cache
    def buffer() -> Tensor:  # made at the first call, so that it is this variant that fails where it cannot be had
        found = _symmetric_memory.empty(m, n, dtype=x.dtype, device=x.device)
        _symmetric_memory.rendezvous(found, group)
        return found

    return lambda: operator(torch.mm(x, weight.t(), out=buffer()), "sum", group)


def _matmul_all_gather(case: Case, place: Place) -> Work:
    """With bias. NCCL gathers rank by rank, and a copy puts the features side by side, as in Megatron-LM."""
    world, random = place.world, place.random
    m, k, n = case.m, case.k, case.n // world
    x, weight, bias = random(m, k), random(n, k) * k**-0.5, random(n)
    gathered = x.new_empty(m * world, n)

    def gather(part: Tensor) -> Tensor:
        all_gather_single(gathered, part)
        return gathered

    multiply = partial(F.linear, x, weight, bias)
    variants = _multiply_then(gather, multiply, random(m, n))
    variants["nccl_then_cublas"] = lambda: torch.cat(gather(multiply()).chunk(world), dim=-1)
    return _operation(case, place, variants, partial(matmul_all_gather, x, weight, bias))


def _mlp(case: Case, place: Place) -> Work:
    """Column + bias + GELU, then row, sequence parallel, forward and backward."""
    world, random = place.world, place.random
    m, k, n = case.m, case.k, case.n // world
    x_shard, w1, w2, b1 = random(m // world, k), random(n, k) * k**-0.5, random(k, n) * case.n**-0.5, random(n)
    leaves = [leaf.requires_grad_() for leaf in (x_shard, w1, b1, w2)]
    dy_shard, x, h, dy = random(m // world, k), random(m, k), random(m, n), random(m, k)

    @torch.no_grad()
    def matmuls() -> tuple[Tensor, ...]:
        return F.linear(x, w1), F.linear(h, w2), dy @ w2, dy.t() @ h, h @ w1, h.t() @ x

    gathered, scattered = torch.empty_like(x), torch.empty_like(dy_shard)

    def collectives() -> None:
        """x for forward and for the wgrad, and dy; y and dx."""
        for _ in range(3):
            all_gather_single(gathered, dy_shard)
        for _ in range(2):
            reduce_scatter_single(scattered, x)

    def ours() -> tuple[Tensor, ...]:
        y_shard = matmul_reduce_scatter(all_gather_matmul(x_shard, w1, b1, "gelu_tanh"), w2)
        return y_shard.detach(), *torch.autograd.grad(y_shard, leaves, dy_shard)

    baseline = partial(_megatron_style, x_shard.detach(), w1.detach(), b1.detach(), w2.detach(), dy_shard)
    variants = {MATMUL: matmuls, COLLECTIVE: collectives, "megatron_style": torch.no_grad()(baseline)}
    return Work(variants | _ours(ours, place), (MATMUL,), "megatron_style", 12 * m * n * k)


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
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_all_gather": _matmul_all_gather,
    "mlp": _mlp,
}
