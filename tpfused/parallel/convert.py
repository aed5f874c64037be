"""A dense module becomes one of this package's layers, in place: it stays the same object under the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tpfused.group import TPGroup, check_reshapable
from tpfused.layers.attention import check_heads_split
from tpfused.layers.embedding import VocabParallelEmbedding
from tpfused.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpfused.parallel.layers import (
    KeyValueLinear,
    StoredColumnParallelLinear,
    StoredRowParallelLinear,
    WholeParameters,
    compute_with_local,
)
from tpfused.parameter import LinearParameters, ParallelModule, empty_on
from tpfused.placement import is_dtensor
from tpfused.sharding import divide

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Conversion:
    """Where a module goes: over which ranks, and onto which device.

    Attributes:
        heads: what `knows_heads` found for the module.
        became: of each dense parameter that was converted, over which group's mesh, and into what: for the other
            modules that it is tied to, whose conversions share this.
    """

    group: TPGroup
    heads: object
    became: MutableMapping[Tensor, tuple[DeviceMesh, nn.Parameter]]

    @property
    def device(self) -> torch.device:
        return device_of(self.group)


def device_of(group: TPGroup) -> torch.device:
    """That of this rank, of the kind of the group's mesh."""
    kind = group.mesh.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def colwise(module: nn.Module, to: Conversion, *, gather_output: bool = False, parts: int = 1) -> None:
    """The outputs are split, and left so or gathered; with `parts`, those of each of so many projections."""
    stored = {"transposed": _is_conv1d(module), "parts": parts}
    plain = stored == {"transposed": False, "parts": 1}
    layer = ColumnParallelLinear if plain else StoredColumnParallelLinear
    _to_linear(module, to, layer, gather_output=gather_output, **({} if plain else stored))


def colwise_kv(module: nn.Module, to: Conversion) -> None:
    """`colwise` for keys or values; of fewer heads than ranks, each whole on the ranks that share it."""
    _, heads = head_counts(module, to.heads)
    if heads >= to.group.size:
        colwise(module, to)
    else:
        _to_linear(module, to, KeyValueLinear, num_heads=heads)


def rowwise(module: nn.Module, to: Conversion) -> None:
    """The inputs are split over the ranks already, as colwise leaves them; the output is summed, whole on each."""
    if _is_conv1d(module):
        _to_linear(module, to, StoredRowParallelLinear, transposed=True)
    else:
        _to_linear(module, to, RowParallelLinear)


def vocab_embedding(module: nn.Module, to: Conversion) -> None:
    """The vocabulary split over the ranks; ids and output are whole on each."""
    layer = VocabParallelEmbedding(
        module.num_embeddings,
        module.embedding_dim,
        module.padding_idx,
        mesh=to.group.mesh,
        device="meta",
        dtype=module.weight.dtype,
    )
    _become(module, layer, to)


def attention(module: nn.Module, to: Conversion) -> None:
    """A module whose projections are split by heads: the counts it keeps become those of this rank."""
    ranks = to.group.size
    heads, kv_heads = head_counts(module, to.heads)
    own = heads // ranks, max(1, kv_heads // ranks)
    local = dict.fromkeys(_HEADS, own[0]) | dict.fromkeys(_KV_HEADS, own[1])
    for name in ("split_size", "all_head_size"):  # GPT-2's and BERT's: features of all query heads
        if hasattr(module, name):
            local[name] = getattr(module, name) // ranks
    local |= dict.fromkeys(("num_key_value_groups", "n_rep"), own[0] // own[1])  # query heads to a head of keys
    for name, value in local.items():
        if name in vars(module):
            setattr(module, name, value)


def replicate(module: nn.Module, to: Conversion, *, sum_gradients: bool = False) -> None:
    """The parameters whole on each rank; computed with as they are."""
    from torch.distributed.tensor import DTensor, Replicate

    for name, param in module._parameters.items():
        if param is None or isinstance(param, DTensor):
            continue
        new = _became(param, to)
        if new is None:
            data = param.detach()
            data = data if data.is_meta else data.to(to.device).contiguous()
            data = DTensor.from_local(data, to.group.mesh, [Replicate()], run_check=False)
            new = nn.Parameter(data, requires_grad=param.requires_grad)
            to.became[param] = to.group.mesh, new
        module._parameters[name] = new
    own = [param for param in module._parameters.values() if param is not None]
    done = isinstance(module, ParallelModule | WholeParameters)
    if own and not done and all(param.placements[0].is_replicate() for param in own):
        compute_with_local(module, to.group, sum_gradients)


PARTS = {"fused_gate_up": 2, "fused_qkv": 3}  # projections of one size in one weight, one after the other
STYLES: dict[str, Callable[[nn.Module, Conversion], None]] = {
    "attention": attention,
    "colwise": colwise,
    "colwise_gather": lambda module, to: colwise(module, to, gather_output=True),
    "colwise_kv": colwise_kv,
    "fused_gate_up": lambda module, to: colwise(module, to, parts=PARTS["fused_gate_up"]),
    "fused_qkv": lambda module, to: colwise(module, to, parts=PARTS["fused_qkv"]),
    "replicate": replicate,
    "replicate_sum": lambda module, to: replicate(module, to, sum_gradients=True),
    "rowwise": rowwise,
    "vocab_embedding": vocab_embedding,
    "vocab_head": lambda module, to: colwise(module, to, gather_output=True),
}
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
LEAVE_SHARDED = ("colwise", "colwise_kv", "fused_gate_up", "fused_qkv")  # the output is this rank's part
SPLIT_ROWS = ("colwise", "colwise_gather", "vocab_embedding", "vocab_head")  # the same rows of a weight [rows, ...]


def check_convertible(name: str, module: nn.Module, style: str, to: Conversion) -> None:
    """Refuse, before anything is changed, what the style cannot be given to.

    Raises:
        ValueError: names the module and the numbers.
    """
    if style in ("attention", "colwise_kv", "fused_qkv"):
        heads, kv_heads = head_counts(module, to.heads)
        check_heads_split(name, heads, kv_heads, to.group.size)
        if style == "colwise_kv" and kv_heads < to.group.size:
            check_reshapable(to.group.mesh, kv_heads)
        if style == "fused_qkv" and heads != kv_heads:
            raise ValueError(
                f"{name}: 'fused_qkv' is for three projections of one size, but there are {heads} attention heads and "
                f"{kv_heads} key-value heads"
            )
    why = why_not(name, module, style)
    if why is not None:
        raise ValueError(why)
    if style in PARTS:
        pieces = PARTS[style] * to.group.size
        divide(_as_matrix(module).shape[0], pieces, f"{name}: outputs over {PARTS[style]} projections on each rank")


def why_not(name: str, module: nn.Module, style: str) -> str | None:
    """Why no layer of this style can take the module's place; None where it can, or the style makes none."""
    if not (style in PARTS or style in SPLIT_ROWS or style in ("colwise_kv", "rowwise")):
        return None
    kind = type(module)
    if style == "vocab_embedding":
        if kind.forward is not nn.Embedding.forward:
            return f"{name} is a {kind.__name__}; only an nn.Embedding can be a 'vocab_embedding'"
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return f"{name}: an nn.Embedding with max_norm, scale_grad_by_freq or sparse cannot be split"
    elif kind.forward is not nn.Linear.forward and not _is_conv1d(module):
        return (
            f"{name} is a {kind.__name__}, which computes otherwise than nn.Linear or transformers' Conv1D do: it "
            f"cannot be {style!r}" + (", but 'vocab_embedding'" if kind.forward is nn.Embedding.forward else "")
        )
    if kind.__call__ is not nn.Module.__call__:
        return f"{name} is a {kind.__name__}, which has a __call__ of its own: it cannot be {style!r}"
    if "forward" in vars(module):
        return (
            f"{name} has a forward other than that of its class, as accelerate's hooks give it: it cannot be {style!r}"
        )
    if "weight" not in module._parameters:
        return f"{name}: its weight is no parameter of its own; if parametrized, make that permanent"
    odd = [name for name in module._parameters if name not in ("weight", "bias")]
    if odd:
        return f"{name} has parameters beside weight and bias, {', '.join(odd)}: it cannot be {style!r}"
    dtype = module.weight.dtype
    if not (dtype.is_floating_point and dtype.itemsize >= 2):
        return f"{name}: its weight is {dtype}, and must be floating-point of at least 16 bits to be {style!r}"
    if is_dtensor(module.weight):
        return f"{name}: its weight is a DTensor already, {module.weight.placements}"
    return None


def torn(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> list[str]:
    """The first modules that share a parameter, and would split it in different ways; empty where there are none."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for param in module._parameters.values():
            # A bare parameter of a module that is none of these is another name of it, and not computed with there.
            if param is not None and (name in styles or isinstance(module, nn.Linear | nn.Embedding)):
                users.setdefault(id(param), []).append(name)
    for names in users.values():
        if len({"rows" if styles.get(n) in SPLIT_ROWS else styles.get(n, "replicate") for n in names}) > 1:
            return names
    return []


def knows_heads(*places: object) -> object:
    """The first of these modules that says how many heads there are, or whose config does; None if none does."""
    sources = (source for place in places for source in (getattr(place, "config", None), place))
    return next((source for source in sources if any(hasattr(source, name) for name in _HEADS)), None)


def head_counts(module: nn.Module, source: object) -> tuple[int, int]:
    """Heads of queries, and of keys and values; `source` is what `knows_heads` found.

    Raises:
        ValueError: it found nothing.
    """
    if source is None:
        raise ValueError(
            f"how many heads has {type(module).__name__}? Neither it, a module that it is a part of, nor a config of "
            f"theirs has {', '.join(_HEADS)}"
        )
    heads = next(getattr(source, name) for name in _HEADS if hasattr(source, name))
    return heads, next((getattr(source, name) for name in _KV_HEADS if getattr(source, name, None)), heads)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _to_linear(module: nn.Module, to: Conversion, layer: type[LinearParameters], **options) -> None:
    out_features, in_features = _as_matrix(module).shape
    made = layer(
        in_features,
        out_features,
        module.bias is not None,
        mesh=to.group.mesh,
        device="meta",
        dtype=module.weight.dtype,
        **options,
    )
    _become(module, made, to)


def _as_matrix(module: nn.Module) -> Tensor:
    """The weight as ``[out, in]``."""
    return module.weight.detach().t() if _is_conv1d(module) else module.weight.detach()


def _become(module: nn.Module, layer: ParallelModule, to: Conversion) -> None:
    """`module` turns into `layer`, which is on the meta device, with its own weights, hooks and other attributes."""
    old = dict(module._parameters)
    for name, param in old.items():
        if param is None:
            continue
        new, made = _became(param, to), layer._parameters[name]
        if new is not None:
            if (new.shape, new.placements) != (made.shape, made.placements):
                raise ValueError(
                    f"a tied parameter would be split in two ways: {new.placements} and {made.placements} of "
                    f"{tuple(made.shape)}"
                )
            layer.register_parameter(name, new)
            continue
        if not param.is_meta:
            layer.register_parameter(name, empty_on(made, to.device))
            layer.fill_parameter(name, _as_matrix(module) if name == "weight" else param.detach())
        to.became[param] = to.group.mesh, layer._parameters[name].requires_grad_(param.requires_grad)
    module.__class__ = type(layer)
    # Hooks stay the module's, and whatever else a library has noted on it.
    vars(module).update({key: value for key, value in vars(layer).items() if "hook" not in key and key != "training"})


def _became(param: nn.Parameter, to: Conversion) -> nn.Parameter | None:
    """What a dense parameter was turned into before, for another module that it is tied to."""
    # The group's mesh, not the parameter's own: keys and values of few heads lie on one of another shape.
    mesh, new = to.became.get(param, (None, None))
    return new if mesh == to.group.mesh else None
