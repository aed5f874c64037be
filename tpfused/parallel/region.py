"""Random numbers between a column- and a row-parallel layer: each rank draws its own there (see `tpfused.random`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from torch import nn

from tpfused.group import TPGroup
from tpfused.random import rank_rng

_open: dict[object, AbstractContextManager] = {}  # by process group: there is one default generator


def draw_apart(model: nn.Module, columns: dict[str, nn.Module], rows: dict[str, nn.Module]) -> None:
    """From the output of a column-parallel layer on, this rank's own stream; the common one again from a row-parallel
    layer on, and when the module that the column-parallel layer is a part of returns or raises.
    """
    # Functions by name, not closures, so that the model can be pickled.
    for layer in columns.values():
        layer.register_forward_hook(_enter)
    for layer in rows.values():
        layer.register_forward_pre_hook(_leave_before)
    for parent in {name.rpartition(".")[0] for name in columns}:
        group = next(layer.group for name, layer in columns.items() if name.rpartition(".")[0] == parent)
        model.get_submodule(parent).register_forward_hook(partial(_leave_after, group), always_call=True)


def has_dropout(model: nn.Module) -> bool:
    """Whether some module keeps a positive dropout probability."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False


def _enter(layer: nn.Module, args: tuple, output) -> None:
    group = layer.group.process_group
    if layer.training and group not in _open:
        _open[group] = rank_rng(layer.group, output.device)
        _open[group].__enter__()


def _leave_before(row: nn.Module, args: tuple) -> None:
    _leave(row.group)


def _leave_after(group: TPGroup, module: nn.Module, args: tuple, output) -> None:
    _leave(group)


def _leave(group: TPGroup) -> None:
    if group.process_group in _open:
        _open.pop(group.process_group).__exit__(None, None, None)
