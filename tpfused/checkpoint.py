"""The whole model and optimizer from all ranks' parts, and back, in the dense model's names and shapes.

Packed weights are written under the names of what they hold (``attention.qkv.weight`` as
``attention.q.weight``, ``.k.`` and ``.v.``), so that a model saved at one tensor-parallel degree loads at any
other, and into a model that does not pack. Wrappers leave no trace in the names: DistributedDataParallel,
FSDP2, torch.compile. A parameter used in two places (tied embeddings) is written once, under the first.

Besides the result, one tensor at a time is whole on each rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.checks import check_module
from tpfused.packing import Packing
from tpfused.placement import gather_whole, local, own_box, own_part, splits, whole_shape


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, whole, on the CPU.

    Collective: every rank calls it. Rank 0 of the default process group gets the result, the others an
    empty dict.
    """
    state = {}
    for entry in model_entries(model):
        save_entry(entry, entry.tensor, entry.names, state)
    return state


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of each tensor of a `full_state_dict` into the model, in place.

    Every rank gives the whole `state`. It may be any mapping, such as one that reads a file: each tensor is
    asked for twice (for its shape first) and not kept. Dtypes and devices are the model's: floating-point
    tensors are cast, no others.

    Raises:
        ValueError: names are missing, not the model's, of another shape, or of another dtype where one of the
            two is no floating-point one (all are listed), or the model is on the meta device. Nothing has
            changed then.
        TypeError: a model that is no nn.Module, a state that is no mapping.
    """
    entries = list(model_entries(model))
    _check_mapping(state)
    if not state and entries:
        raise ValueError(
            "the state is empty: full_state_dict gives it to rank 0 only, and every rank needs the whole of it here"
        )
    shapes = {name: shape for entry in entries for name, shape in entry.shapes().items()}
    check_state(state, shapes, {name: entry.tensor.dtype for entry in entries for name in entry.names})
    on_meta = [entry.names[0] for entry in entries if entry.tensor.is_meta]
    if on_meta:
        raise ValueError(f"{len(on_meta)} tensors are on the meta device ({on_meta[0]}, ...): call to_empty() first")
    for entry in entries:
        _load(entry, entry.tensor, [state[name] for name in entry.names])


@torch.no_grad()
def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | float]:
    """What the optimizer keeps for each parameter, whole, on the CPU, as ``"<parameter>.<key>"``.

    Tensors of the parameter's shape are put together as the parameter is (``weight.exp_avg``); single numbers
    are taken as they are (``weight.step``). Hyper-parameters such as the learning rate are not included.
    Collective, with the result on rank 0 only, as for `full_state_dict`.

    Raises:
        ValueError: the optimizer has parameters that are not the model's, or keeps tensors of another shape.
    """
    state = {}
    for entry in (entry for group in _optimizer_entries(model, optimizer) for entry in group):
        for key, value in optimizer.state.get(entry.tensor, {}).items():
            names = [f"{name}.{key}" for name in entry.names]
            if _shape(value) == _shape(entry.tensor):
                save_entry(entry, value, names, state)
            elif _shape(value) != ():
                raise ValueError(
                    f"{names[0]} has shape {_shape(value)}: neither a single number nor its parameter's "
                    f"shape {_shape(entry.tensor)}"
                )
            elif value is not None and _keeps_result():
                state.update((name, _copy_on_cpu(value)) for name in names)
    return state


@torch.no_grad()
def load_full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor | float]
) -> None:
    """Give the optimizer, new or used, this rank's part of a `full_optimizer_state`.

    Every rank gives the whole `state`, any mapping. The optimizer keeps its own hyper-parameters. A parameter
    of which `state` holds nothing (it had had no gradient yet) starts afresh.

    Raises:
        ValueError: names are missing, not the model's, or of another shape (all are listed), or the optimizer
            has parameters that are not the model's. Nothing has changed then.
        TypeError: something else than a model, an optimizer, a mapping.
    """
    _check_mapping(state)
    saved_keys = {}  # by parameter name
    for name in state:
        parameter, _, key = name.rpartition(".")
        saved_keys.setdefault(parameter, {})[key] = None
    slots = []  # for each parameter, in the optimizer's order: its entry and its keys
    for group in _optimizer_entries(model, optimizer):
        # An optimizer keeps the same keys for all parameters of a group: what one of them has, none may lack.
        keys = {key: None for entry in group for name in entry.names for key in saved_keys.get(name, ())}
        slots += [(entry, keys if saved_keys.keys() & set(entry.names) else ()) for entry in group]

    expected = {}
    for entry, keys in slots:
        for key in keys:
            number = _shape(state.get(f"{entry.names[0]}.{key}", entry.tensor)) == ()
            expected |= {f"{name}.{key}": () if number else shape for name, shape in entry.shapes().items()}
    check_state(state, expected, {})  # of any dtype: an optimizer may keep others than its parameters'

    restored = {}
    for index, (entry, keys) in enumerate(slots):
        for key in keys:
            values = [state[f"{name}.{key}"] for name in entry.names]
            if _shape(values[0]) == ():
                value = _copy_on_cpu(values[0])
            else:
                value = torch.empty_like(entry.tensor)
                _load(entry, value, values)
            restored.setdefault(index, {})[key] = value
    # The optimizer's own method knows on which device each number must live (a fused Adam's step, say).
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


class Entry(NamedTuple):
    """A parameter or buffer of this rank, and what it is called in a checkpoint."""

    names: tuple[str, ...]  # of each of the tensors packed in it; one where it is not packed
    tensor: Tensor
    packing: Packing | None

    def unpack(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole,) if self.packing is None else self.packing.unpack(whole)

    def pack(self, wholes: list[Tensor]) -> Tensor:
        return wholes[0] if self.packing is None else self.packing.pack(wholes)

    def read(self, sources: list[Tensor]) -> Tensor:
        """This rank's part, from the whole tensors of `names` or what is sliced like them: no more of them is read."""
        box = own_box(whole_shape(self.tensor), splits(self.tensor))
        return sources[0][box] if self.packing is None else self.packing.read(sources, box)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        wholes = self.unpack(torch.empty(whole_shape(self.tensor), device="meta"))
        return {name: _shape(whole) for name, whole in zip(self.names, wholes, strict=True)}


def model_entries(model: nn.Module, *, tied_again: bool = False) -> Iterator[Entry]:
    """In the same order on every rank; a tied one once, under its first name, or under each (`tied_again`)."""
    check_module(model)
    packed = {}  # path of a packed child -> its packing and the paths of what it holds
    seen = set()
    for path, module in _walk(model, ()):
        hidden = [name for name in getattr(module, "_shards", ()) if module._parameters.get(name) is None]
        if hidden:
            raise ValueError(f"{'.'.join((*path, hidden[0]))} is parametrized or pruned; make that permanent first")
        for child, packing in getattr(module, "packed_children", {}).items():
            packed[*path, child] = packing, [(*path, name) for name in packing.names]
        packing, paths = packed.get(path, (getattr(module, "stored_as", None), [path]))
        persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (module._parameters | persistent).items():
            if tensor is not None and (tied_again or id(tensor) not in seen):
                seen.add(id(tensor))
                yield Entry(tuple(".".join((*path, name)) for path in paths), tensor, packing)


def _walk(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """All modules, parents first, with their paths as they would be without wrappers."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        module.reshard()  # a forward without backward may have left gathered parameters in place
    yield path, module
    for name, child in module.named_children():
        wrapped = name == "_orig_mod" or isinstance(module, nn.parallel.DistributedDataParallel)
        yield from _walk(child, path if wrapped else (*path, name))


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


def save_entry(entry: Entry, part: Tensor, names: Iterable[str], state: dict) -> None:
    """Put `part`, which is split as the entry's tensor is, whole into `state`. Collective."""
    whole = gather_whole(local(part), splits(entry.tensor))
    if _keeps_result():
        state.update(zip(names, map(_copy_on_cpu, entry.unpack(whole)), strict=True))


def _load(entry: Entry, part: Tensor, wholes: list[Tensor]) -> None:
    """Fill `part`, which is split as the entry's tensor is, in place."""
    local(part).copy_(own_part(entry.pack(wholes), splits(entry.tensor)))


def _keeps_result() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _copy_on_cpu(value: Tensor | float) -> Tensor | float:
    """A contiguous copy that shares no memory with the model; a plain number as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def _check_mapping(state: Mapping) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping of names to tensors, on every rank the whole one, not {type(state).__name__}"
        )


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def check_state(
    state: Mapping[str, object], expected: dict[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise one ValueError that lists every way in which `state` has not the shapes and the dtypes that are expected.

    One floating-point dtype does for another. No others do: a weight of integers is a quantized one, say.
    """
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in state]
    extra = [name for name in state if name not in expected]
    misshapen, odd = [], []
    for name in (name for name in expected if name in state):
        tensor = state[name]
        shape, dtype, own = _shape(tensor), getattr(tensor, "dtype", None), dtypes.get(name)
        del tensor  # before the next one is read
        if shape != expected[name]:
            misshapen.append(f"{name} {shape}, not {expected[name]}")
        if own not in (None, dtype) and not all(getattr(each, "is_floating_point", False) for each in (dtype, own)):
            odd.append(f"{name} {dtype}, not {own}")
    if missing or extra or misshapen or odd:
        raise ValueError(
            f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(extra)} extra, "
            f"{len(misshapen)} of another shape"
            + (f", {len(odd)} of another dtype (only floating-point ones are cast)" if odd else "")
            + "".join(f"\n  missing: {text}" for text in missing)
            + "".join(f"\n  extra: {text}" for text in extra)
            + "".join(f"\n  of another shape: {text}" for text in misshapen)
            + "".join(f"\n  of another dtype: {text}" for text in odd)
        )
