"""The whole model and optimizer from all ranks' parts, and back, in the dense model's names and shapes.

Packed weights are written under the names of what they hold (``attention.qkv.weight`` as
``attention.q.weight``, ``.k.`` and ``.v.``), so that a model saved at one tensor-parallel degree loads at any
other, and into a model that does not pack. These wrappers leave no trace in the names: DistributedDataParallel,
FSDP2, torch.compile, and torch's of activation checkpointing and offloading. Others stay in them, as in the model's own
state_dict. A parameter used in two places (tied embeddings) is written once, under the first.

Besides the result, one tensor at a time is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from tpfused.agreement import attempt, together
from tpfused.checks import check_module
from tpfused.parts import (
    Entry,
    Part,
    agree_on_parts,
    check_dense_entries,
    check_same_beginnings,
    class_of,
    copy_on_cpu,
    model_entries,
    model_parts,
    odd_kind,
    save_part,
    shape_of,
)
from tpfused.placement import groups_of, local, own_part, splits


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, whole, on the CPU.

    Collective: every rank calls it. Rank 0 of the default process group gets the result, the others an
    empty dict.

    Raises:
        ValueError: tensors on the meta device, models that differ between ranks or are split differently.
        TypeError: a model that is no nn.Module, a sparse or quantized buffer.
        RuntimeError: the process group that the model is split over was destroyed.

        On every rank, where it concerns one.
    """
    state = {}
    for part in agree_on_parts(partial(model_parts, model), "full_state_dict"):
        save_part(part, state)
    return state


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of each tensor of a `full_state_dict` into the model, in place.

    Every rank gives the whole `state`, the same one: the ranks compare the first entries of each tensor (of its first
    row, at most 256). It may be any mapping, such as one that reads a file: each tensor is asked for three times and
    not kept. Dtypes and devices are the model's: floating-point tensors are cast, no others.

    Raises:
        ValueError: names are missing, not the model's, of another shape, or of another dtype where one of the
            two is no floating-point one, or no dense tensors with entries, DTensors among them (all are listed), or the
            model is on the meta device; the ranks give different states.
        TypeError: a model that is no nn.Module or has a sparse or quantized buffer, a state that is no mapping.
        RuntimeError: the process group that the model is split over was destroyed.

        On every rank that the model is split over, where it concerns one. Nothing has changed then, on any. What the
        mapping fails with when it is read for the last time is raised on every rank, too, but parts have been loaded.
    """
    check_module(model)
    groups, call = groups_of(model), "load_full_state_dict"
    entries = together(partial(_fitting, model, state), groups, call)
    check_same_beginnings(state, groups, call, "give different states")

    def fill() -> None:
        for entry in entries:
            _load(entry, entry.tensor, [state[name] for name in entry.names])

    together(fill, groups, call)


def _fitting(model: nn.Module, state: Mapping[str, Tensor]) -> list[Entry]:
    """All that `state` has values for."""
    entries = list(model_entries(model))
    _check_mapping(state)
    if not state and entries:
        raise ValueError(
            "the state is empty: full_state_dict gives it to rank 0 only, and every rank needs the whole of it here"
        )
    check_dense_entries(entries, "load_full_state_dict")
    shapes = {name: shape for entry in entries for name, shape in entry.shapes().items()}
    check_state(state, shapes, {name: entry.tensor.dtype for entry in entries for name in entry.names})
    on_meta = [entry.names[0] for entry in entries if entry.tensor.is_meta]
    if on_meta:
        raise ValueError(f"{len(on_meta)} tensors are on the meta device ({on_meta[0]}, ...): call to_empty() first")
    return entries


@torch.no_grad()
def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | float]:
    """What the optimizer keeps for each parameter, whole, on the CPU, as ``"<parameter>.<key>"``.

    Tensors of the parameter's shape are put together as the parameter is (``weight.exp_avg``); single numbers
    are taken as they are (``weight.step``). Hyper-parameters such as the learning rate are not included.
    Collective, with the result on rank 0 only, as for `full_state_dict`.

    Raises:
        ValueError: the optimizer has parameters that are not the model's, or keeps tensors of another shape; what
            `full_state_dict` refuses, as it does.
        TypeError, RuntimeError: as `full_state_dict`; something else than an optimizer, or one that keeps what is
            neither a dense tensor nor a real number that torch can hold.
    """
    state = {}
    for part in agree_on_parts(partial(_optimizer_parts, model, optimizer), "full_optimizer_state"):
        save_part(part, state)
    return state


def _optimizer_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Part]:
    parts = []
    for entry in (entry for group in _optimizer_entries(model, optimizer) for entry in group):
        for key, value in optimizer.state.get(entry.tensor, {}).items():
            names = tuple(f"{name}.{key}" for name in entry.names)
            if shape_of(value) not in ((), shape_of(entry.tensor)):
                raise ValueError(
                    f"{names[0]} has shape {shape_of(value)}: neither a single number nor its parameter's "
                    f"shape {shape_of(entry.tensor)}"
                )
            if value is not None:
                parts.append(Part(names, entry, value))
    return parts


@torch.no_grad()
def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor | float]
) -> None:
    """Give the optimizer, new or used, this rank's part of a `full_optimizer_state`.

    Every rank gives the whole `state`, any mapping, compared as that of `load_full_state_dict` is. The optimizer keeps
    its own hyper-parameters. A parameter of which `state` holds nothing (it had had no gradient yet) starts afresh.

    Raises:
        ValueError: names are missing, not the model's, of another shape, complex for a real parameter, or neither dense
            tensors with entries, which DTensors are not, nor real numbers that torch can hold (all are listed), or the
            optimizer has parameters that are not the model's; the ranks give different states.
        TypeError: something else than a model, an optimizer, a mapping.
        RuntimeError: the process group that the model is split over was destroyed.

        On every rank that the model is split over, where it concerns one. Nothing has changed then, on any.
    """
    check_module(model)
    groups, call = groups_of(model), "load_full_optimizer_state"
    restored = together(partial(_restored, model, optimizer, state), groups, call)
    check_same_beginnings(state, groups, call, "give different states")
    # The optimizer's own method knows on which device each number must live (a fused Adam's step, say).
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def _restored(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor | float]
) -> dict[int, dict[str, Tensor | float]]:
    """What this rank's optimizer is to keep, by the parameters' numbers in it."""
    _check_mapping(state)
    saved_keys = {}  # by parameter name
    for name in state:
        parameter, _, key = str(name).rpartition(".")  # what is no name is told as one that is not the model's
        saved_keys.setdefault(parameter, {})[key] = None
    slots = []  # for each parameter, in the optimizer's order: its entry and its keys
    for group in _optimizer_entries(model, optimizer):
        # An optimizer keeps the same keys for all parameters of a group: what one of them has, none may lack.
        keys = {key: None for entry in group for name in entry.names for key in saved_keys.get(name, ())}
        slots += [(entry, keys if saved_keys.keys() & set(entry.names) else ()) for entry in group]

    expected, dtypes = {}, {}
    for entry, keys in slots:
        for key in keys:
            number = shape_of(state.get(f"{entry.names[0]}.{key}", entry.tensor)) == ()
            names = {f"{name}.{key}": shape for name, shape in entry.shapes().items()}
            expected |= dict.fromkeys(names, ()) if number else names
            dtypes |= {} if number else dict.fromkeys(names, entry.tensor.dtype)
    check_state(state, expected, dtypes, cast="real")  # an optimizer may keep others than its parameters'

    restored = {}
    for index, (entry, keys) in enumerate(slots):
        for key in keys:
            values = [state[f"{name}.{key}"] for name in entry.names]
            if shape_of(values[0]) == ():
                value = copy_on_cpu(values[0])
            else:
                value = torch.empty_like(entry.tensor)
                _load(entry, value, values)
            restored.setdefault(index, {})[key] = value
    return restored


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Entry]]:
    """The entries of the optimizer's parameters, by group, in its order."""
    entries = {id(entry.tensor): entry for entry in model_entries(model)}
    if not hasattr(optimizer, "param_groups"):  # others than torch's have them too
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unknown = sum(id(param) not in entries for param in params)
    if unknown:
        raise ValueError(f"{unknown} of the optimizer's {len(params)} parameters are not the model's")
    return [[entries[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _load(entry: Entry, part: Tensor, wholes: list[Tensor]) -> None:
    """Fill `part`, which is split as the entry's tensor is, in place."""
    own = own_part(entry.pack(wholes), splits(entry.tensor))
    # torch 2.11 copies a strided view that is to be negated (or conjugated) to a GPU as it lies in memory.
    local(part).copy_(own.resolve_conj().resolve_neg())


def _check_mapping(state: Mapping) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping of names to tensors, on every rank the whole one, not {type(state).__name__}"
        )


def check_state(
    state: Mapping[str, object],
    expected: dict[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    *,
    cast: str = "floating-point",
    kind: type = Tensor,
) -> None:
    """Raise one ValueError that lists every way in which `state` has not the shapes and the dtypes that are expected.

    Where no dtype is expected a single number may be a plain one.

    Args:
        cast: the dtypes that do for another: "floating-point" ones for each other (a weight of integers is a quantized
            one, say), or "real" ones.
        kind: of the values; of tensors, only this rank's dense ones with entries fit.
    """
    given = dict.fromkeys(state)  # whether a name is in it a mapping may tell by reading the tensor
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in given]
    extra = [name for name in given if name not in expected]
    misshapen, odd, no_tensors = [], [], []
    for name in (name for name in expected if name in given):
        tensor, own = state[name], dtypes.get(name)
        unfit = "" if kind is not Tensor and isinstance(tensor, kind) else _unfit(tensor, own is None)
        shape, dtype = shape_of(tensor), getattr(tensor, "dtype", None)
        del tensor  # before the next one is read
        if unfit:
            no_tensors.append(f"{name}, not {unfit}")
            continue
        if shape != expected[name]:
            misshapen.append(f"{name} {shape}, not {expected[name]}")
        if own not in (None, dtype) and not (_CAST[cast](dtype, own) and _copies(dtype, own)):
            odd.append(f"{name} {dtype}, not {own}")
    if missing or extra or misshapen or odd or no_tensors:
        raise ValueError(
            f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(extra)} extra, "
            f"{len(misshapen)} of another shape"
            + (f", {len(odd)} of another dtype (only {cast} ones are cast)" if odd else "")
            + (f", {len(no_tensors)} that are no tensors" if no_tensors else "")
            + "".join(f"\n  missing: {text}" for text in missing)
            + "".join(f"\n  extra: {text}" for text in extra)
            + "".join(f"\n  of another shape: {text}" for text in misshapen)
            + "".join(f"\n  of another dtype: {text}" for text in odd)
            + "".join(f"\n  a tensor is wanted: {text}" for text in no_tensors)
        )


_CAST = {
    "floating-point": lambda given, own: given.is_floating_point and own.is_floating_point,
    "real": torch.can_cast,
}


def _copies(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether torch does: some dtypes are there for what packs several numbers in one."""
    return attempt(lambda: torch.empty(1, dtype=own).copy_(torch.empty(1, dtype=given)))[1] is None


def _unfit(value: object, number: bool) -> str:
    """`odd_kind`, of a whole tensor with entries: what computes by itself may communicate or have none."""
    odd = odd_kind(value, number)
    if odd or not isinstance(value, Tensor):
        return odd
    if value.is_meta:
        return "one on the meta device"
    return "" if type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ else class_of(value)
