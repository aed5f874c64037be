"""Random numbers between a column- and a row-parallel layer: each rank draws its own there (see `tpfused.random`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

from torch import nn

from tpfused.group import TPGroup
from tpfused.parallel.lora import is_lora
from tpfused.random import rank_rng

_open: dict[object, AbstractContextManager] = {}  # by process group: there is one default generator


def draw_apart(model: nn.Module, columns: set[str], rows: set[str], group: TPGroup) -> None:
    """From the output of a column-parallel layer on, this rank's own stream; the common one again from a row-parallel
    layer on, and when the module that the column-parallel layer is a part of returns or raises.

    A LoRA layer has dropout of its own: on its input, which is whole before columns, and split before rows.
    """
    modules = dict(model.named_modules())
    # Functions by name, not closures, so that the model can be pickled.
    enter, leave_before, leave_after = (partial(step, group) for step in (_enter, _leave_before, _leave_after))
    for name in columns:
        if is_lora(modules[name]):
            modules[name].register_forward_pre_hook(leave_before)
        modules[name].register_forward_hook(enter)
    for name in rows:
        if is_lora(modules[name]):
            modules[name].register_forward_hook(leave_after)
        else:
            modules[name].register_forward_pre_hook(leave_before)
    for parent in {name.rpartition(".")[0] for name in columns}:
        model.get_submodule(parent).register_forward_hook(leave_after, always_call=True)


def has_dropout(model: nn.Module) -> bool:
    """Whether some module keeps a positive dropout probability."""
    return any(True for _ in _dropouts(model))


def drops_whole(model: nn.Module, styles: Mapping[str, str]) -> bool:
    """Whether a module in training mode has dropout that may be on what is whole on each rank.

    All may, but what an "attention" module names for its probabilities (`attention_dropout`, `attn_dropout`): those are
    of this rank's heads.
    """
    for name, module in _dropouts(model):
        owner, _, own = name.rpartition(".")
        if module.training and not (styles.get(owner) == "attention" and "att" in own):
            return True
    return False


def _dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names of positive dropout probabilities, and whose they are: a dropout module's own name, or an attribute's
    after its module's.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield name, module
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float) and value > 0:
                yield f"{name}.{key}", module


def _enter(group: TPGroup, layer: nn.Module, args: tuple, output) -> None:
    if layer.training and group.process_group not in _open:
        region = rank_rng(group, output.device)
        region.__enter__()  # refused while a CUDA graph is captured
        _open[group.process_group] = region


def _leave_before(group: TPGroup, module: nn.Module, args: tuple) -> None:
    _leave(group)


def _leave_after(group: TPGroup, module: nn.Module, args: tuple, output) -> None:
    _leave(group)


def _leave(group: TPGroup) -> None:
    if group.process_group in _open:
        _open.pop(group.process_group).__exit__(None, None, None)
