"""How tests compare a parallel result with the dense one, and count collectives."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.distributed import Context
from tpfused.checking.rule import LEAST_VALUES
from tpfused.collectives import observe
from tpfused.group import TPGroup
from tpfused.placement import local, shard_info
from tpfused.sharding import shard_range

Results = dict[str, Tensor]


class Block:
    """The tensor-parallel block of `tp` ranks that a worker computes in.

    `mode` "group" makes layers with plain parameters and "mesh" with DTensors, on consecutive ranks. "strided" is as
    "group", on ranks that stand apart, as where the data-parallel ranks are the inner ones. `seed` becomes one that the
    block's ranks share and other blocks do not, so that a collective over the wrong ranks gives wrong numbers.
    """

    def __init__(self, ctx: Context, tp: int, mode: str, seed: int):
        self.device, self.tp, self.mode = ctx.device, tp, mode
        if mode == "strided":
            blocks = ctx.world // tp
            self.group = ctx.grid(blocks).get_group("dp")
            self.rank, block = divmod(ctx.rank, blocks)
        else:
            self.group = ctx.group(tp)
            block, self.rank = divmod(ctx.rank, tp)
        self.place = {"mesh": ctx.mesh(tp)} if mode == "mesh" else {"group": self.group}
        self.seed = seed + block

    def some(self, cases: Iterable) -> list:
        """All cases in mode "group"; a third in the others, which compute with the same code."""
        return list(cases)[:: 1 if self.mode == "group" else 3]

    def own(self, whole: Tensor, dim: int | None) -> Tensor:
        """What this rank holds of `whole` when it is split along `dim`; all of it for None."""
        if dim is None:
            return whole
        start, stop = shard_range(whole.shape[dim], self.tp, self.rank)
        return whole.narrow(dim, start, stop - start)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=self.device).to(dtype)

    def check_parameter(self, param: nn.Parameter, whole: Tensor, dim: int | None) -> None:
        """`param` has the bits of its part of `whole`, and says how it is split."""
        assert isinstance(param, nn.Parameter) and param.dtype == whole.dtype
        if self.mode == "mesh":
            assert isinstance(param, DTensor) and param.shape == whole.shape
            assert param.placements == (Replicate() if dim is None else Shard(dim),)
            assert torch.equal(param.full_tensor(), whole)
            assert torch.equal(param.to_local(), self.own(whole, dim))
            assert shard_info(param) is None
            return
        assert not isinstance(param, DTensor)
        assert torch.equal(param, self.own(whole, dim))
        info = shard_info(param)
        if dim is None or self.tp == 1:
            assert info is None
        else:
            assert (info.dim, info.size) == (dim, whole.shape[dim])
            assert (info.group.process_group, info.group.rank, info.group.size) == (self.group, self.rank, self.tp)


def part(whole: Tensor, param: nn.Parameter) -> Tensor:
    """What this rank holds of `whole`, by what `param` says of itself."""
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        splits = [(p.dim, mesh.get_local_rank(i), mesh.size(i)) for i, p in enumerate(param.placements) if p.is_shard()]
    else:
        info = shard_info(param)
        splits = [] if info is None else [(info.dim, info.group.rank, info.group.size)]
    for dim, rank, size in splits:
        start, stop = shard_range(whole.shape[dim], size, rank)
        whole = whole.narrow(dim, start, stop - start)
    return whole


def unpacked(module: nn.Module, tensors: Results) -> Results:
    """Tensors named as the module's parameters, with those of packed projections named and shaped one by one."""
    tensors = dict(tensors)
    for prefix, child, packing, kind in _packed_parameters(module):
        if (name := f"{prefix}{child}.{kind}") in tensors:
            parts = packing.unpack(tensors.pop(name))
            tensors |= {f"{prefix}{part}.{kind}": value for part, value in zip(packing.names, parts, strict=True)}
    return tensors


def packed(module: nn.Module, tensors: Results) -> Results:
    """The inverse of `unpacked`."""
    tensors = dict(tensors)
    for prefix, child, packing, kind in _packed_parameters(module):
        names = [f"{prefix}{part}.{kind}" for part in packing.names]
        if names[0] in tensors:
            tensors[f"{prefix}{child}.{kind}"] = packing.pack([tensors.pop(name) for name in names])
    return tensors


def _packed_parameters(module: nn.Module):
    for path, inner in module.named_modules():
        for child, packing in getattr(inner, "packed_children", {}).items():
            for kind in ("weight", "bias"):
                yield f"{path}." if path else "", child, packing, kind


def twins(
    block: Block, build: Callable[..., nn.Module], dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Results]:
    """A parallel module and the unpacked dense weights that it holds parts of.

    Built from one seed in the block and on one rank alone, which must give the same bits. Then all weights get new
    random values, since those that start at 0 or 1 hide mistakes.
    """
    torch.manual_seed(block.seed)
    alone = build(group=TPGroup(None, 0, 1), device=block.device, dtype=dtype)
    torch.manual_seed(block.seed)
    module = build(**block.place, device=block.device, dtype=dtype)
    whole = unpacked(alone, {name: param.detach() for name, param in alone.named_parameters()})
    parameters = dict(module.named_parameters())
    assert packed(module, whole).keys() == parameters.keys()
    for name, value in packed(module, whole).items():
        assert torch.equal(local(parameters[name]), part(value, parameters[name])), f"{name} differs from TP 1"

    whole = {name: value + 0.2 * torch.randn_like(value) for name, value in whole.items()}
    with torch.no_grad():
        for name, value in packed(module, whole).items():
            local(parameters[name]).copy_(part(value, parameters[name]))
    return module, whole


def check_module(
    module: nn.Module,
    forward: Callable[..., Tensor],
    inputs: Results,
    grad: Tensor,
    dense: Callable[..., Tensor],
    whole: Results,
    own: Callable[[str, Tensor], Tensor],
    what: str,
) -> None:
    """A module's output and all gradients against the dense function's.

    `forward` takes this rank's own parts of `inputs`, which are whole, and gives its part of
    ``dense(**inputs, **whole)``; `own` takes those parts, by the inputs' names and "out".
    """
    parameters = dict(module.named_parameters())
    module.zero_grad()
    mine = {name: strided(own(name, value)).detach().requires_grad_() for name, value in inputs.items()}
    out = forward(**mine)
    out.backward(strided(own("out", grad)))
    actual = {"out": out.detach()} | {name: value.grad for name, value in mine.items()}
    for name, param in parameters.items():
        actual[name] = local(param.grad)
        assert getattr(param.grad, "placements", None) == getattr(param, "placements", None), name

    def flat(**tensors):
        return dense(**{name: tensors.pop(name) for name in inputs}, **unpacked(module, tensors))

    compare(
        actual,
        flat,
        {**inputs, **packed(module, whole)},
        grad,
        lambda name, value: part(value, parameters[name]) if name in parameters else own(name, value),
        what,
        chain=True,
    )


def strided(x: Tensor) -> Tensor:
    """The same values in a layout with no contiguous dimension."""
    if x.ndim == 0:
        return x
    return x.repeat_interleave(2, -1)[..., ::2].transpose(0, -1).contiguous().transpose(0, -1)


def results(function: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor) -> Results:
    """`function(**inputs)` as "out", and the gradient of each differentiable input by its name."""
    inputs = {
        name: None if x is None else x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()
    }
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    out = function(**inputs)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(
    actual: Results,
    function: Callable[..., Tensor],
    inputs: Results,
    grad: Tensor,
    part: Callable[[str, Tensor], Tensor],
    what: str,
    chain: bool = False,
) -> None:
    """Each actual result against `part(name, whole)` of the dense function's.

    Float64 results must be equal up to the order of sums; others obey the project's tolerance, where the dense function
    runs both in float64 and in their dtype. The tolerance is one operation's; `chain` says that there are several.
    """
    dtype = grad.dtype

    def dense(dtype: torch.dtype, layout: Callable[[Tensor], Tensor] = lambda x: x) -> Results:
        def cast(x):
            x = x if isinstance(x, nn.Parameter) else layout(x)
            return x.to(dtype) if x.is_floating_point() else x

        return results(function, {name: cast(x) for name, x in inputs.items()}, layout(grad).to(dtype))

    expected, eager = dense(torch.float64), None
    if dtype != torch.float64:
        # In the layout that the parallel layer is given, and contiguous: matmul kernels sum in different orders, and
        # eager torch may be lucky in one of them.
        one, other = dense(dtype), dense(dtype, strided)
        eager = {name: further_from(expected[name], one[name], other[name]) for name in expected}
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, value in actual.items():
        where = f"{name} of {what}"
        if eager is None:
            assert_close(value, part(name, expected[name]), where)
        else:
            own_part = partial(part, name)
            assert_within_rule(value, expected[name], eager[name], own_part, where, chain)


def further_from(exact: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Entry by entry, the one that is further off."""
    return torch.where((one - exact).abs() >= (other - exact).abs(), one, other)


def assert_close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Float64 results of the same sums in another order: shapes equal, values within 1e-11 of the largest."""
    assert actual.dtype == expected.dtype == torch.float64, f"{what}: {actual.dtype}, {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if expected.numel():
        error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
        assert error <= 1e-11 * max(scale, 1.0), f"{what}: error {error} on values up to {scale}"


def assert_within_rule(
    actual: Tensor,
    expected: Tensor,
    eager: Tensor,
    part: Callable[[Tensor], Tensor],
    what: str = "",
    chain: bool = False,
    terms: Tensor | None = None,
) -> None:
    """The project's tolerance: at most twice the error of eager torch in the same dtype, and two roundings.

    For the tensor and for each of its rows. `expected` is the whole float64 result, `eager` the whole dense one in the
    dtype of `actual`, which is its `part`. Where roundings pass through a `chain` of operations, luck decides who is
    nearer, most of all in rows whose values cancel: tenfold then, and for the tensor only; in 16 bits, where tenfold
    may be all that there is, also once for its root mean square, which luck does little to. `terms`, broadcast to the
    whole, are the sizes of what is added up last where that can cancel: theirs are the roundings that remain.
    """
    assert actual.dtype == eager.dtype, f"{what}: {actual.dtype}, not {eager.dtype}"
    assert actual.shape == part(expected).shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.numel():
        return
    error, allowed = (actual.double() - part(expected)).abs(), 2 * (eager.double() - expected).abs()
    sizes = expected.abs() if terms is None else terms.abs().double().expand_as(expected)
    rounding = 2 * torch.finfo(actual.dtype).eps * sizes
    excess = error.max() - (allowed.max() + rounding.max()) * (10 if chain else 1)
    assert excess <= 0, f"{what}: the error exceeds the rule by {excess}"
    if chain and actual.dtype.itemsize == 2 and actual.numel() >= LEAST_VALUES:
        excess = _rms(error) - _rms(allowed) - _rms(rounding)
        assert excess <= 0, f"{what}: the error's norm exceeds the rule by {excess} of {_rms(expected)}"
    if actual.ndim > 1 and not chain:
        limit = allowed.amax(-1, keepdim=True) + rounding.amax(-1, keepdim=True)
        excess = (error - part(limit.expand_as(expected))).max()
        assert excess <= 0, f"{what}: a row's error exceeds the rule by {excess}"


def _rms(x: Tensor) -> Tensor:
    return x.double().square().mean().sqrt()


@contextmanager
def collectives_made() -> Iterator[list[str]]:
    """The names of all collectives that this process makes inside, in order."""
    names: list[str] = []

    def note(name, tensor):
        names.append(name)
        return lambda: None

    with observe(note):
        yield names


@contextmanager
def refuses(error: type[Exception], *told: object) -> Iterator[None]:
    """The block raises `error`, naming each of `told`, before it has made any collective."""
    with collectives_made() as names:
        try:
            yield
        except (ValueError, TypeError) as raised:
            message = f"{type(raised).__name__}: {raised}"
            assert type(raised) is error, f"expected {error.__name__}, got {message}"
            missing = [item for item in told if str(item) not in str(raised)]
            assert not missing, f"{missing} not named by {message}"
        else:
            raise AssertionError(f"no {error.__name__} (should name {told})")
    assert not names, f"made {names} before it refused"
