"""One call turns a dense model into a tensor-parallel one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tpfused.agreement import by_rank
from tpfused.checks import check_module
from tpfused.group import TPGroup, resolve_group
from tpfused.layers.transformer import ParallelTransformer
from tpfused.parallel import convert, own, region
from tpfused.parallel.generate import compare_draws
from tpfused.parallel.lora import layer_of
from tpfused.parallel.plan import match, resolve_plan
from tpfused.parallel.same import check_same
from tpfused.parallel.transformers import LOSSES, shard_logits
from tpfused.parameter import ParallelModule
from tpfused.random import state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, str] = "auto") -> nn.Module:
    """Split a dense model over the ranks of `mesh`, in place: its modules become this package's layers.

    Every rank gives the same model with the same weights (one seed, or one checkpoint), on any device, or on the meta
    device, to be filled by `load_sharded`. Parameters become DTensors on `mesh`, on its devices: call this before
    `fully_shard` and before the optimizer is made, which `load_sharded` comes before too: it replaces parameters on
    the meta device. Names stay: those of transformers' checkpoints, for `load_sharded` and `save_sharded`. Tied
    parameters stay tied. Dropout between a column- and a row-parallel layer is drawn by each rank for itself, and by
    all alike elsewhere: seed the ranks alike. Of a transformers model, ``output_attentions=True`` gives the attentions
    of this rank's heads, `save_pretrained` raises, and so does `generate` where it samples and the ranks would draw
    apart.

    Modules stay the same objects, with their hooks, training or eval mode, and attributes of others. Not kept are:
    gradients, and hooks and attributes of parameters, for all of these are new; of a `ParallelTransformer`, what its
    constructor sets and was set otherwise later and, of fewer key-value heads than ranks, ``attention.qkv``, which
    becomes ``q``, ``k`` and ``v``.

    Args:
        model: from transformers (Llama, Mistral, Qwen2, Qwen3, GPT-2, BERT), or a `ParallelTransformer` of one process,
            with ``plan="auto"``; any with a plan.
        mesh: one-dimensional.
        plan: "auto", or styles by patterns of module names: ``{"layers.*.mlp.up_proj": "colwise", ...}``. ``*`` stands
            for anything, and a pattern may leave the beginning of the name out, up to a dot. Modules that no pattern
            matches are "replicate". The style of a LoRA layer of peft is one for each of its parts.

    Styles (linear layers: `nn.Linear`, and transformers' Conv1D):
        "colwise": a linear layer's outputs are split, and stay so.
        "rowwise": a linear layer whose inputs are split, as "colwise" leaves them; its output is whole.
        "colwise_gather": as "colwise", and the output gathered.
        "colwise_kv": the projection to keys, or values. Of fewer heads than ranks, each is whole on the ranks that
            share it, and its gradient summed over them.
        "fused_qkv", "fused_gate_up": "colwise" for three, or two, projections of one size in one weight, one after the
            other: this rank's part of each, of sizes that divide by the ranks. The parameter has a dimension more than
            in checkpoints.
        "attention": the attention module around "colwise" projections: the head counts it keeps become this rank's.
        "vocab_embedding": an `nn.Embedding`, its vocabulary split.
        "vocab_head": a transformers model's head: logits ``[..., vocabulary shard]`` in training with labels, where
            the loss is computed from them, and whole ones everywhere else.
        "replicate": whole on each rank.
        "replicate_sum": whole on each rank, and applied to this rank's part of the activations: gradients are summed.

    Parameters are DTensors, which FSDP2 and torch's optimizers take; DDP does not. torch's own `clip_grad_norm_` takes
    them too, unless there are fewer key-value heads than ranks, whose gradients lie on a mesh of their own:
    `tpfused.clip_grad_norm_` does then as well.

    Warns, on the first rank of `mesh`, where the ranks' generators are in different states and the model, in training
    mode, has dropout that may be on what is whole on each rank: that must be the same on all of them. Attention dropout
    is on each rank's own heads, and a `ParallelTransformer`'s under sequence parallelism on its own tokens: they need
    no common state. A model in eval mode, as transformers' `from_pretrained` leaves it, gives no warning.

    Returns:
        `model`.

    Raises:
        ValueError: a mesh that is not one-dimensional, an architecture that "auto" does not know (the error lists what
            it cannot place, and shows a plan), a pattern that matches nothing, an unknown style, head counts that do
            not divide, a model that is parallel already or otherwise built of this package's layers, a subclass of
            `ParallelTransformer`, or one that was changed or is partly on the meta device; models, weights or styles
            that differ between ranks. The model is unchanged then.
        TypeError: no mesh, no module, or a plan that is neither "auto" nor a mapping.

        All but what concerns the mesh on every rank, where it concerns one.
    """
    group = resolve_group(mesh=_checked(mesh))
    device = convert.device_of(group)
    config = getattr(model, "config", None)
    tensors = dict((*model.named_parameters(), *model.named_buffers())) if isinstance(model, nn.Module) else {}
    if isinstance(model, ParallelTransformer) and model.group.process_group is None and plan == "auto":
        check_same(tensors, group, partial(own.check, model, group.size), config)
        drops_whole = model.training and model.config.dropout > 0 and not model.config.sequence_parallel
        _compare_random_states(drops_whole, group, device)
        own.split(model, mesh, device)
        return model
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    to = _conversions(modules, group)
    styles = check_same(tensors, group, partial(_check, model, plan, modules, to), config)
    _compare_random_states(region.drops_whole(model, styles), group, device)

    # What a module counts may be its projections' to read: it comes after them.
    for name in sorted(styles, key=lambda name: styles[name] == "attention"):
        convert.STYLES[styles[name]](modules[name], to[name])
    for name, module in modules.items():
        convert.replicate(module, to[name])
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
        if hasattr(module, "save_pretrained"):
            module.save_pretrained = _no_save_pretrained
        if group.size > 1:
            compare_draws(module)
    for name, style in styles.items():
        if style == "vocab_head":
            shard_logits(model, modules[name])
    if region.has_dropout(model):  # in eval mode too: it may be trained later
        columns = {layer_of(name, modules) for name, style in styles.items() if style in convert.LEAVE_SHARDED}
        rows = {layer_of(name, modules) for name, style in styles.items() if style == "rowwise"}
        region.draw_apart(model, columns, rows, group)
    return model


def _compare_random_states(drops_whole: bool, group: TPGroup, device: torch.device) -> None:
    """Warn where whole activations are dropped. One exchange, which all ranks make, whatever dropout each has."""
    if group.size == 1:
        return
    states = by_rank(state_of(device), group.process_group)
    if drops_whole and group.rank == 0 and len(set(states.values())) > 1:
        warnings.warn(
            "the model has dropout, and its ranks' random generators are in different states: torch.manual_seed(the "
            "same on all ranks of the mesh) before training, or what is whole on each gets another dropout on each",
            stacklevel=3,
        )


def _check(
    model: nn.Module,
    plan: str | Mapping[str, str],
    modules: Mapping[str, nn.Module],
    to: Mapping[str, convert.Conversion],
) -> dict[str, str]:
    """The style of each module that has one, of what can be parallelized. This rank's own affair: no collective."""
    _check_model(model)
    styles = match(model, resolve_plan(model, plan))
    for name, style in styles.items():
        convert.check_convertible(name or "the model", modules[name], style, to[name])
    _check_heads(model, styles)
    _check_ties(modules, styles)
    _check_memory(model)
    return styles


def _conversions(modules: Mapping[str, nn.Module], group: TPGroup) -> dict[str, convert.Conversion]:
    """Where each of a model's modules goes."""
    # Ties are within the model: a parameter that another one shares must not turn into that one's.
    became = WeakTensorKeyDictionary()
    return {name: convert.Conversion(group, convert.knows_heads(*_upwards(modules, name)), became) for name in modules}


def _no_save_pretrained(*args, **kwargs) -> None:
    raise RuntimeError(
        "save_pretrained cannot save a parallelized model, which is in parts: tpfused.save_sharded(model, folder), "
        "called on every rank, writes a checkpoint of the same format"
    )


def _checked(mesh: object) -> DeviceMesh:
    if mesh is None:
        raise TypeError('parallelize needs a mesh: init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))')
    return mesh


def _upwards(modules: Mapping[str, nn.Module], name: str) -> list[nn.Module]:
    """The module, what it is a part of, and so on."""
    found = [modules[name]]
    while name:
        name = name.rpartition(".")[0]
        found.append(modules[name])
    return found


def _check_model(model: nn.Module) -> None:
    """Refuse what is parallel already, and modules that use parameters elsewhere than in the forward of their owner."""
    from torch.distributed.tensor import DTensor

    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            raise ValueError(
                f"{name or type(model).__name__} is a parallel layer of tpfused already: parallelize a model once. A "
                f"model of tpfused's own layers is made with mesh= instead; of these, parallelize splits only a whole "
                f'ParallelTransformer of one process (no group), with plan="auto"'
            )
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            raise ValueError(
                f"{name or 'the model'} is a torch.nn.{type(module).__name__}, which cannot be parallelized"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, which holds on to the whole parameters: "
                f"parallelize the model in it, and fully_shard that over a (replicas, 1) mesh"
            )
        if module._parameters and "forward" in vars(module):
            raise ValueError(
                f"{name or 'the model'} has another forward than {type(module).__name__}'s, set on the module as "
                f"accelerate's hooks are (device_map=): take it off first, or load the model without"
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(f"{name} is a DTensor already; parallelize the dense model, then call fully_shard")


def _check_heads(model: nn.Module, styles: dict[str, str]) -> None:
    heads = [name for name, style in styles.items() if style == "vocab_head"]
    if len(heads) > 1:
        raise ValueError(f"a model has one 'vocab_head', not {heads}")
    if heads and getattr(getattr(model, "loss_function", None), "__name__", None) not in LOSSES:
        raise ValueError(
            f"'vocab_head' ({heads[0]}) is for a transformers model whose loss_function is one of {', '.join(LOSSES)}, "
            f"not for this {type(model).__name__}: use 'colwise' and tpfused.vocab_parallel_cross_entropy, or "
            f"'colwise_gather'"
        )


def _check_memory(model: nn.Module) -> None:
    """Two parameters in one place would be two after the split: a tie is one parameter under two names."""
    owners: dict[int, str] = {}
    for name, param in model.named_parameters():
        if param.is_meta or not param.numel() or convert.is_dtensor(param):
            continue
        other = owners.setdefault(param.data_ptr(), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} are two parameters in the same memory, and would not be tied any more: give both "
                f"modules one parameter"
            )


def _check_ties(modules: Mapping[str, nn.Module], styles: dict[str, str]) -> None:
    """A parameter of several modules must be split in one way by all that compute with it."""
    names = convert.torn(modules, styles)
    if names:
        told = ", ".join(f"{name} is {styles.get(name, 'replicate')!r}" for name in names)
        raise ValueError(f"tied parameters must be split alike, but {told}")
