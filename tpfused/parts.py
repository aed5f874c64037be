"""This rank's parts of a model's tensors, what they are called in a checkpoint, and how they become whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import getattr_static
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.agreement import attempt, by_rank, raise_together, together
from tpfused.checks import check_module, kind_of
from tpfused.packing import Packing
from tpfused.parallel.same import check_alike
from tpfused.placement import gather_whole, is_dtensor, local, own_box, splits, whole_shape

_COMPARED = 256  # entries of a tensor: one page of a file or two
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and activation checkpointing call a module


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
        return {name: shape_of(whole) for name, whole in zip(self.names, wholes, strict=True)}


class Part(NamedTuple):
    """What is to be put together from all ranks, and under which names."""

    names: tuple[str, ...]
    entry: Entry
    value: Tensor | float  # split as the entry's tensor is, unless it is a number

    @property
    def is_number(self) -> bool:
        """A single one beside a tensor, the same on each rank."""
        return shape_of(self.value) != shape_of(self.entry.tensor)


def model_parts(model: nn.Module) -> list[Part]:
    return [Part(entry.names, entry, entry.tensor) for entry in model_entries(model)]


def agree_on_parts(find: Callable[[], list[Part]], call: str) -> list[Part]:
    """What `find` gives here, once it has given the same, split in the same way, on all ranks of the default group, and
    all of it can be gathered.

    Raises:
        ValueError: tensors on the meta device, others on another rank, or others' parts.
        TypeError: what is neither a dense tensor nor a single number beside one.
        Exception: what `find` raises.

        On every rank, where it concerns one.
    """
    parts: list[Part] = []
    groups: list[list[int]] = []  # the ranks of those that tensors are split over

    def describe() -> list[str]:
        parts.extend(find())
        on_meta = [part.names[0] for part in parts if getattr(part.value, "is_meta", False)]
        if on_meta:
            raise ValueError(
                f"{len(on_meta)} tensors are on the meta device ({on_meta[0]}, ...): there is nothing to save"
            )
        for part in parts:
            value = part.value if part.is_number else local(part.value)
            _check_kind(value, part.names[0], call, number=part.is_number)
        return [_describe(part, groups) for part in parts]

    if not dist.is_initialized():
        describe()
        return parts
    check_alike(describe, dist.group.WORLD, call)
    if groups:  # as many on each rank, by the descriptions
        of_all = by_rank(groups, dist.group.WORLD, call)
        for rank, own in of_all.items():
            for index, ranks in enumerate(own):
                odd = next((member for member in ranks if of_all[member][index] != ranks), None)
                if odd is not None:
                    raise ValueError(
                        f"the ranks split the model over different groups: rank {rank} over the ranks {ranks}, but "
                        f"rank {odd} over {of_all[odd][index]}"
                    )
    return parts


def _describe(part: Part, groups: list[list[int]]) -> str:
    """In the same words on ranks that belong together. `groups`: those met so far, which is their number in the words,
    as their ranks are others in another tensor-parallel group.
    """
    tensor = part.entry.tensor
    if part.is_number:
        return f"{part.names[0]} {kind_of(part.value)}"
    text = f"{part.names[0]} {list(whole_shape(tensor))} {kind_of(part.value)}"
    for dim, _, group in splits(tensor):
        if group.size > 1:
            ranks = dist.get_process_group_ranks(group.process_group)
            if ranks not in groups:
                groups.append(ranks)
            text += f", dimension {dim} in {group.size} parts over its group {groups.index(ranks)}"
    return text


def check_dense_entries(entries: Iterable[Entry], call: str) -> None:
    for entry in entries:
        _check_kind(local(entry.tensor), entry.names[0], call)


def _check_kind(value: object, name: str, call: str, number: bool = False) -> None:
    if odd := odd_kind(value, number):
        raise TypeError(f"{call}: {name} must be a dense tensor{' or a number' if number else ''}, not {odd}")


def odd_kind(value: object, number: bool = False) -> str:
    """What `value` is, if it is neither a dense tensor, whole or this rank's part, nor, where one will do, a number."""
    if not isinstance(value, Tensor):
        holds = number and isinstance(value, Real) and attempt(torch.as_tensor, value)[1] is None
        return "" if holds else class_of(value)
    if nn.parameter.is_lazy(value):
        return "an uninitialised one"
    if value.is_nested:
        return "a nested one"
    if value.layout is not torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} one"
    if value.is_quantized:
        return "a quantized one"
    return "a DTensor: give its full_tensor()" if is_dtensor(value) else ""


def class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def model_entries(model: nn.Module, *, tied_again: bool = False) -> Iterator[Entry]:
    """In the same order on every rank; a tied one once, under its first name, or under each (`tied_again`)."""
    check_module(model)
    packed = {}  # path of a packed child -> its packing and the paths of what it holds
    seen = set()
    for path, module in _walk(model, ()):
        # Its own attributes: a wrapper's `__getattr__` gives those of the module that is wrapped.
        shards, stored_as = getattr_static(module, "_shards", ()), getattr_static(module, "stored_as", None)
        hidden = [name for name in shards if module._parameters.get(name) is None]
        if hidden:
            raise ValueError(
                f"{'.'.join((*path, hidden[0]))} is parametrized or pruned; make that permanent first "
                f"(remove_parametrizations, prune.remove), or build the layer with mesh="
            )
        for child, packing in getattr_static(module, "packed_children", {}).items():
            packed[*path, child] = packing, [(*path, name) for name in packing.names]
        packing, paths = packed.get(path, (stored_as, [path]))
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
    wrapped = _wrapped(module)
    for name, child in module.named_children():
        yield from _walk(child, path if child is wrapped else (*path, name))


def unwrapped(model: nn.Module) -> nn.Module:
    """What is in the wrappers that leave no trace in names."""
    while (inner := _wrapped(model)) is not None:
        model = inner
    return model


def _wrapped(module: nn.Module) -> nn.Module | None:
    """What a wrapper that leaves no trace in names holds; None: the module is none."""
    names = ("module",) if isinstance(module, nn.parallel.DistributedDataParallel) else _WRAPPED
    return next((module._modules[name] for name in names if name in module._modules), None)


def save_part(part: Part, state: dict[str, Tensor | float]) -> None:
    """Put it whole into `state`. Collective."""
    if part.is_number:
        wholes = [part.value] * len(part.names)
    else:
        wholes = part.entry.unpack(gather_whole(local(part.value), splits(part.entry.tensor)))
    if _keeps_result():
        state.update(zip(part.names, map(copy_on_cpu, wholes), strict=True))


def _keeps_result() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def copy_on_cpu(value: Tensor | float) -> Tensor | float:
    """A contiguous copy that shares no memory with the model; a plain number as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def shape_of(value: object) -> tuple[int, ...]:
    """Empty where it has none, or none that can be told: see `odd_kind`."""
    return attempt(lambda: tuple(value.shape))[0] or ()


def check_same_beginnings(tensors: Mapping[str, Any], groups: list[dist.ProcessGroup], call: str, what: str) -> None:
    """Refuse, on every rank, tensors of one shape that are not the same ones: their shards would be of no model.

    Args:
        tensors: this rank's, or what has a shape and is sliced as they are, or numbers. Each is asked for once.
        call: as for `by_rank`.
        what: the ranks do, then.

    Raises:
        ValueError: some tensors begin with other entries on another rank, or have another dtype; names them all.
    """

    def look() -> dict[str, bytes]:
        return {name: _first_bytes(tensor) for name, tensor in tensors.items()} if groups else {}

    first, failure = together(look, groups, call), None
    of_all = hashlib.sha256(repr(sorted(first.items())).encode()).digest()
    for group in groups:
        if len(set(by_rank(of_all, group, call).values())) > 1:  # as all of this group's ranks see
            (one, own), *others = by_rank(first, group, call).items()
            rank, other = next((rank, other) for rank, other in others if other != own)
            names = own | other
            different = [name for name in names if own.get(name) != other.get(name)]
            failure = ValueError(
                f"the ranks {what}: {len(different)} of {len(names)} tensors begin with other entries on rank {rank} "
                f"than on rank {one}, or have another dtype, or are not there"
                + "".join(f"\n  {name}" for name in different)
            )
    raise_together(failure, groups, call)


def _first_bytes(tensor: Any) -> bytes:
    """Of its first entries, at most so many of one row: a few, whatever its size."""
    if hasattr(tensor, "shape"):
        shape = tuple(tensor.shape)
        box = [slice(0, min(1, size)) for size in shape[:-1]] + [slice(0, min(_COMPARED, size)) for size in shape[-1:]]
        tensor = tensor[tuple(box)]
    return bytes(copy_on_cpu(torch.as_tensor(tensor).reshape(-1)).view(torch.uint8).tolist())
