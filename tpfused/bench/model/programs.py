"""The ways to run one model at one degree: ours, and its peers with the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpfused.bench.model import megatron, plain
from tpfused.bench.model.cases import Degree, Size
from tpfused.bench.sampling import together
from tpfused.layers.transformer import ParallelTransformer
from tpfused.overlap.tiers import tier
from tpfused.packing import pack_qkv, unpack_gate_up, unpack_qkv
from tpfused.placement import gather_whole, local, splits
from tpfused.training.model import WithLoss, shard_blocks

Tensors = dict[str, Tensor]
Context = Callable[[], AbstractContextManager]

PEERS = ("dtensor", "dtensor_compiled", "megatron")


@dataclass(frozen=True)
class Place:
    """Where programs run: this rank's groups of a degree.

    Attributes:
        mesh: (dp, tp), the ranks that share a tensor-parallel group side by side.
    """

    degree: Degree
    mesh: DeviceMesh
    device: torch.device
    dtype: torch.dtype

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def rank(self) -> int:
        return self.tp.get_local_rank()


def place_of(degree: Degree, world: int, device: torch.device, dtype: torch.dtype) -> Place:
    """Collective: makes the degree's process groups."""
    mesh = init_device_mesh(device.type, (world // degree.tp, degree.tp), mesh_dim_names=("dp", "tp"))
    return Place(degree, mesh, device, dtype)


@dataclass(frozen=True)
class Program:
    """One way to run the model.

    Attributes:
        module: what holds the parameters, in several programs perhaps.
        logits: ids ``[batch, tokens]`` -> this rank's ``[batch, tokens, vocabulary shard]``.
        loss: ids and labels -> their mean loss.
        inside: what forward and backward are in.
        finish: what completes the gradients once backward has returned.
        unpacked: this rank's tensors by the module's names -> by those of the plain model.
        shared_by: the ranks over which FSDP2 splits each tensor once more.
    """

    module: nn.Module
    logits: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    unpacked: Callable[[Tensors], Tensors]
    inside: Context = nullcontext
    finish: Callable[[], None] | None = None
    shared_by: dist.ProcessGroup | None = None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), self.inside():
            return self.loss(ids, labels)

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward. The gradients stay."""
        with self.inside():
            loss = self.loss(ids, labels)
            loss.backward()
        if self.finish is not None:
            self.finish()
        return loss

    def gradients(self) -> Tensors:
        """This rank's of its tensor-parallel group, by the plain model's names. A collective under FSDP2."""
        found = {}
        for name, parameter in self.module.named_parameters():
            by_fsdp = [split for split in splits(parameter.grad) if split.group.process_group is self.shared_by]
            found[name] = gather_whole(local(parameter.grad), by_fsdp)
        return self.unpacked(found)

    def forget_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def resident_bytes(self) -> int:
        """Of this rank's parameters."""
        return sum(local(parameter).numel() * parameter.element_size() for parameter in self.module.parameters())


def build_all(
    names: Sequence[str], size: Size, layers: int, tokens: int, place: Place, seed: int
) -> Iterator[tuple[str, Program | None, str | None]]:
    """Those of the named programs that there are at this degree, one after the other, with the same weights.

    Yields a name, and the program or why it failed on some rank: ours does not.
    """
    ours, weights = build(size, layers, tokens, place, seed)
    made = {"ours": ours}
    degree = place.degree
    for name in names:
        if degree.tp == 1 and name == "ours_reference" or degree.dp > 1 and name in ("megatron", "dtensor_compiled"):
            continue
        program, error = together(partial(_make, name, size, layers, tokens, place, weights, made))
        if program is not None:
            made[name] = program
        yield name, program, error


def _make(
    name: str, size: Size, layers: int, tokens: int, place: Place, weights: Tensors, made: Mapping[str, Program]
) -> Program:
    if name == "ours":
        return made[name]
    if name == "ours_reference":
        # The plain path: torch's collectives before and after whole matmuls, and none of the kernels.
        return replace(made["ours"], inside=partial(tier, "reference"))
    if name == "dtensor_compiled":
        return _compiled(made["dtensor"], place)
    return build_peer(name, size, layers, tokens, place, weights)


def build(size: Size, layers: int, tokens: int, place: Place, seed: int) -> tuple[Program, Tensors]:
    """Our program, and this rank's weights by the plain model's names: the same whole model at every degree."""
    torch.manual_seed(seed)
    where = {"mesh": place.tp} if place.degree.dp > 1 else {"group": place.tp.get_group()}
    config = size.config(layers, tokens, sequence_parallel=place.degree.tp > 1)
    model = ParallelTransformer(config, **where, device=place.device, dtype=place.dtype)
    module = WithLoss(model, overwrite_logits=True)
    unpacked = partial(_unpacked, size, place.degree.tp)
    weights = unpacked({name: local(parameter).detach() for name, parameter in module.named_parameters()})
    shared_by = _shard(module, place)  # which puts another `logits` in its place
    return Program(module, module.logits, module, unpacked, shared_by=shared_by), weights


def build_peer(name: str, size: Size, layers: int, tokens: int, place: Place, weights: Tensors) -> Program:
    """ "dtensor" or "megatron", with these weights of its rank."""
    if name == "megatron":
        return _megatron(size, layers, tokens, place, weights)
    return _plain(size, layers, tokens, place, weights)


def _compiled(program: Program, place: Place) -> Program:
    """The same plain program with its blocks compiled, and with torch's asynchronous tensor parallelism."""
    torch._dynamo.config.recompile_limit = 64  # two passes of several shapes and degrees are as many programs
    if place.degree.tp > 1:
        torch._inductor.config._micro_pipeline_tp = True
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # later torch does it by itself
            enable_symm_mem_for_group(place.tp.get_group().group_name)
    module = program.module
    blocks = [torch.compile(block, dynamic=False, fullgraph=True) for block in module.blocks]

    def logits(ids: Tensor) -> Tensor:
        found = module.logits(ids, blocks)
        return found.to_local() if place.degree.tp > 1 else found

    return replace(program, logits=logits, loss=partial(module, blocks=blocks))


def _plain(size: Size, layers: int, tokens: int, place: Place, weights: Tensors) -> Program:
    from torch.distributed.tensor.parallel import loss_parallel

    several = place.degree.tp > 1
    module = plain.build(size, layers, tokens, place.device, place.dtype, place.tp if several else None)
    _fill(module, weights)
    shared_by = _shard(module, place)
    if not several:
        return Program(module, module.logits, module, dict, shared_by=shared_by)
    finish = partial(_complete, module)
    return Program(module, lambda ids: module.logits(ids).to_local(), module, dict, loss_parallel, finish, shared_by)


def _megatron(size: Size, layers: int, tokens: int, place: Place, weights: Tensors) -> Program:
    group = place.tp.get_group()
    module = megatron.Megatron(size, layers, tokens, group, place.device, place.dtype)
    _fill(module, _as_megatron(size, weights))
    return Program(
        module,
        lambda ids: module.logits(ids).transpose(0, 1),
        module,
        partial(_of_megatron, size, place.degree.tp),
        partial(megatron.current, group),
        module.finish,
    )


@torch.no_grad()
def _fill(module: nn.Module, weights: Tensors) -> None:
    parameters = dict(module.named_parameters())
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    for name, parameter in parameters.items():
        local(parameter).copy_(weights[name])


def _shard(module: nn.Module, place: Place) -> dist.ProcessGroup | None:
    """FSDP2 over the other ranks, and those."""
    if place.degree.dp == 1:
        return None
    shard_blocks(module, place.mesh["dp"])
    return place.mesh.get_group("dp")


def _unpacked(size: Size, tp: int, tensors: Tensors) -> Tensors:
    """Ours, of one rank of `tp`."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "qkv":
            parts = unpack_qkv(tensor, size.heads // tp, size.kv_heads // tp)
            found |= {f"{prefix}.{part}.weight": value for part, value in zip("qkv", parts, strict=True)}
        elif last == "gate_up":
            found[f"{prefix}.gate.weight"], found[f"{prefix}.up.weight"] = unpack_gate_up(tensor)
        else:
            found[name] = tensor
    return found


def _as_megatron(size: Size, weights: Tensors) -> Tensors:
    """Packed as `megatron.Block` has them."""
    found = dict(weights)
    for name in [name for name in weights if name.endswith(".attention.q.weight")]:
        block = name.removesuffix("attention.q.weight")
        q, k, v = (found.pop(f"{block}attention.{part}.weight") for part in "qkv")
        heads, kv_heads = (part.shape[0] // size.head_dim for part in (q, k))
        found[f"{block}qkv.weight"] = pack_qkv(q, k, v, heads, kv_heads)
        found[f"{block}out.weight"] = found.pop(f"{block}attention.out.weight")
        found[f"{block}gate_up.weight"] = torch.cat([found.pop(f"{block}mlp.{part}.weight") for part in ("gate", "up")])
        found[f"{block}down.weight"] = found.pop(f"{block}mlp.down.weight")
    return found


def _of_megatron(size: Size, tp: int, tensors: Tensors) -> Tensors:
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".qkv.weight")]:
        block = name.removesuffix("qkv.weight")
        parts = unpack_qkv(found.pop(name), size.heads // tp, size.kv_heads // tp)
        found |= {f"{block}attention.{part}.weight": value for part, value in zip("qkv", parts, strict=True)}
        found[f"{block}attention.out.weight"] = found.pop(f"{block}out.weight")
        gate_up = found.pop(f"{block}gate_up.weight")
        found[f"{block}mlp.gate.weight"], found[f"{block}mlp.up.weight"] = gate_up.chunk(2)
        found[f"{block}mlp.down.weight"] = found.pop(f"{block}down.weight")
    return found


def _complete(module: nn.Module) -> None:
    """Sum what torch leaves as a part of the sum on each rank, the embedding's gradient and the norms'; what uses them
    next, an optimizer or a norm, would do it."""
    for parameter in module.parameters():
        if parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
