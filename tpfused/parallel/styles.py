"""This package's styles in others' entry points: torch's `parallelize_module`, and transformers' `tp_plan`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import WeakTensorKeyDictionary

from tpfused.group import TPGroup, resolve_group
from tpfused.parallel import convert
from tpfused.parallel.plan import match, pattern_of, resolve_plan
from tpfused.parallel.same import check_same
from tpfused.parameter import ParallelModule
from tpfused.placement import is_dtensor


class Style(ParallelStyle):
    """A style of `tpfused.parallelize` for `torch.distributed.tensor.parallel.parallelize_module`.

    ``parallelize_module(model, mesh, {"layers.*.up": Style("colwise"), "layers.*.down": Style("rowwise")})``.
    Every rank gives the same weights, as to `parallelize`: unlike torch's own styles, which broadcast rank 0's, these
    only check that they are (with ``src_data_rank=None`` not even that). Inputs may be DTensors, as other styles leave
    them; outputs are local tensors. Parameters of modules without a style stay plain tensors. Tied ones stay tied where
    all their modules have a style. All ranks draw the same dropout, between "colwise" and "rowwise" layers too.

    Args:
        name: any style but "vocab_head", which is a whole model's: "colwise_gather" instead.
        num_heads, num_key_value_heads: of the whole model, where "colwise_kv", "fused_qkv" or "attention" find no
            config on the module.

    Raises:
        ValueError: an unknown style, and head counts that are no positive integers, or only the keys'; when it is
            applied, parameters of the module that differ between ranks, a module that it cannot be given to, and head
            counts that do not divide; on every rank, where it concerns one.
    """

    def __init__(self, name: str, *, num_heads: int | None = None, num_key_value_heads: int | None = None):
        super().__init__()
        known = [style for style in convert.STYLES if style != "vocab_head"]
        if name not in known:
            raise ValueError(f"unknown style {name!r}; there are {', '.join(known)}")
        counts = {"num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
        for what, count in counts.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise ValueError(f"{what} must be a positive integer, not {count!r}")
        if num_heads is None and num_key_value_heads is not None:
            raise ValueError(f"num_key_value_heads={num_key_value_heads} is given without num_heads")
        self.name = name
        self.heads = None if num_heads is None else SimpleNamespace(**counts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        to = _conversion(module, device_mesh, self.heads)
        own = {name: param for name, param in module.named_parameters(recurse=False) if not is_dtensor(param)}
        # `parallelize_module` says by None that nothing is to be communicated.
        alone = TPGroup(None, 0, 1) if self.src_data_rank is None else to.group
        check_same(own, alone, lambda: _check(self.name, module, to))
        if self.name in _INPUTS:
            module.register_forward_pre_hook(partial(_local_inputs, _INPUTS[self.name]), with_kwargs=True)
        return _convert(self.name, module, to)


def tp_plan(model: nn.Module, plan: str | dict[str, str] = "auto") -> dict[str, str]:
    """A ``tp_plan`` of this package's styles for transformers' `from_pretrained`, which then loads the shards itself.

    `model` is one of the same class and config, on the meta device, for its names and head counts. This registers the
    styles with transformers, as ``tpfused_colwise`` and so on, for that config: call it before each `from_pretrained`::

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        distributed = DistributedConfig(tp_size=4, tp_plan=tp_plan(skeleton))
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed)

    The head's logits are gathered. Parameters without a style stay plain tensors, and all ranks draw the same dropout.

    Raises:
        ValueError: a plan with a fused style, as GPT-2's: transformers gives a parameter the shape that it has in the
            file, which the fused ones do not keep. A parameter that a split module shares with one that has no style,
            as BERT's head does its bias: transformers would tie the split one to the whole one. `parallelize` and
            `load_sharded` do both. And as `parallelize`.
        ImportError: this transformers has no `transformers.distributed.tensor_parallel` (5.24 has).
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    class Registered(TensorParallelLayer):
        """Transformers' calls: the module is converted on the meta device, and its DTensors are then loaded."""

        def __init__(self, style: str):
            self.style = style

        def shard_param(self, module, param, mesh):
            pass

        def install_forward(self, module, mesh):
            to = _conversion(module, mesh, model)
            _check(self.style, module, to)
            return _convert(self.style, module, to)

    styles = match(model, resolve_plan(model, plan))
    styles = {name: "colwise_gather" if style == "vocab_head" else style for name, style in styles.items()}
    fused = [name for name, style in styles.items() if style in convert.PARTS]
    if fused:
        raise ValueError(
            f"{fused[0]} is fused ({styles[fused[0]]!r}), and transformers cannot load such a parameter in parts that "
            f"have another shape: tpfused.parallelize a model on the meta device, and load_sharded"
        )
    modules = dict(model.named_modules())
    split = {id(param): name for name in styles for param in modules[name]._parameters.values() if param is not None}
    for name, module in modules.items():
        tied = [split[id(p)] for p in module._parameters.values() if id(p) in split and name not in styles]
        if tied:
            raise ValueError(
                f"{tied[0]} shares a parameter with {name}, which has no style, and transformers would tie the split "
                f"one to the whole one: tpfused.parallelize a model on the meta device, and load_sharded"
            )
    for style in set(styles.values()):
        ALL_PARALLEL_STYLES.register(f"tpfused_{style}", Registered(style))
    return {pattern_of(name): f"tpfused_{style}" for name, style in styles.items()}


# How a style's layer takes its input; the others are given what they are given.
_INPUTS = {style: Replicate() for style in (*convert.LEAVE_SHARDED, "colwise_gather", "vocab_embedding", "replicate")}
_INPUTS["rowwise"] = Shard(-1)


def _local_inputs(placement: Placement, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """DTensors, which torch's own styles may leave (`PrepareModuleInput`, `SequenceParallel`), as this rank's part."""

    def own(value: object) -> object:
        if not is_dtensor(value):
            return value
        laid_out = value.redistribute(placements=[placement])
        return laid_out.to_local(grad_placements=laid_out.placements)

    args, kwargs = tuple(own(arg) for arg in args), {name: own(value) for name, value in kwargs.items()}
    if isinstance(module, ParallelModule) and "input" in kwargs:  # as nn.Linear and nn.Embedding call it, and we do not
        args = (kwargs.pop("input"), *args)
    return args, kwargs


# Of all that was given a style: torch and transformers convert a model's modules one by one.
_BECAME = WeakTensorKeyDictionary()


def _conversion(module: nn.Module, mesh: DeviceMesh, heads: object) -> convert.Conversion:
    return convert.Conversion(resolve_group(mesh=mesh), convert.knows_heads(module, heads), _BECAME)


def _check(style: str, module: nn.Module, to: convert.Conversion) -> dict[str, str]:
    name = type(module).__name__
    convert.check_convertible(name, module, style, to)
    return {name: style}


@torch.no_grad()
def _convert(style: str, module: nn.Module, to: convert.Conversion) -> nn.Module:
    convert.STYLES[style](module, to)
    return module
