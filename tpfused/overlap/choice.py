"""Which tier an overlapped operation runs by: measured once for each case, agreed by all ranks of its group, and kept.

A case is an operation, its activation, a dtype and the shape of all ranks' operands, its rows, and the batches they lie
in, rounded to powers of two. It is the same on every rank: all come to one that is new to them at the same call, and
measure it together. Of what is kept on disk the first rank's word counts, for other hosts may have other files. A known
case costs one look into a dictionary.
"""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import tpfused
from tpfused.agreement import by_rank, together
from tpfused.explanation import Choice, size_text
from tpfused.group import TPGroup, exists
from tpfused.kernels.matmul import in_tf32
from tpfused.overlap import saved
from tpfused.overlap.communicator import (
    MAKING,
    TYPES,
    Communicator,
    Rehearsal,
    Rows,
    Shape,
    check_agreement,
    communicator_of,
    exchange,
    meet_for,
    rows_text,
)
from tpfused.overlap.measure import fastest, measure
from tpfused.overlap.tiers import PLAIN, TIERS, exact, wanted, why_invalid

Chosen = tuple[Communicator, str] | None
Attempt = Callable[[Chosen], object] | None

CHOOSING = "the choice of a tier"
MOST = 4096  # shapes that are known, cases that are listed, and of one group cases that are measured


@dataclass(frozen=True)
class _Place:
    """What a group has on its GPUs: its communicator and tiers, and why it has none, or not all. The same on all
    ranks."""

    communicator: Communicator | None = None
    tiers: tuple[str, ...] = ()
    name: str = ""  # cards, hosts and versions, for which a measurement is kept
    why_none: str = ""


_UNKNOWN = object()
# By what `choose` calls a key: in a case, the shape's rows are rounded.
_known: dict[tuple, Chosen] = {}
# What was measured is not forgotten, for the other ranks remember it, and would not measure it again with this one.
_measured: dict[tuple, Chosen] = {}
_listed: dict[tuple, Choice] = {}
_places: dict[tuple[dist.ProcessGroup, torch.device], _Place] = {}
_GROUP = 2  # where keys and cases have their process group


def choose(
    operation: str, group: TPGroup, x: Tensor, shape: Shape, attempt: Attempt, rows: Rows | None = None
) -> Chosen:
    """The communicator and tier that `operation` is to run by; None: the plain path.

    Where the case is new it is measured, by all ranks of the group, unless a CUDA graph is being captured.

    Args:
        x: this rank's input, for its device and dtype.
        shape: rows, input features and output features of all ranks: the same on each, or a call of one waits for
            others that never come. What a rank cannot know is None.
        attempt: runs the operation's forward once, without autograd, by what it is given: a result of this function.
            None: nothing travels in the operation, and there is nothing to measure.
        rows: how the rows lie, in which the ranks must agree as well.

    Raises:
        ValueError: the tier that TPFUSED_TIER or `tier` asks for is not to be had here; the ranks' shapes differ, which
            is looked at where the case is new, and under TORCH_DISTRIBUTED_DEBUG=DETAIL at each call outside of
            captures.
        RuntimeError: an earlier operation of the group was given up on this rank, or on any where the case is new.
    """
    dtype = x.dtype
    detail = group.size > 1 and dist.get_debug_level() == dist.DebugLevel.DETAIL
    if detail and not (_is_on_gpu(x) and _is_capturing()):  # no graph holds an exchange of objects
        check_agreement(group, operation, shape, dtype, wanted[-1] + ", deterministic" * exact[-1], rows)
    key = (
        shape, operation, group.process_group, group.replicas, x.get_device(), dtype, wanted[-1], exact[-1],
        in_tf32(dtype),
    )  # fmt: skip
    chosen = _known.get(key, _UNKNOWN)
    if chosen is _UNKNOWN:
        chosen = _look_closer(key, operation, group, x, shape, attempt, rows)
    if chosen is None and group.size > 1:  # else the operation itself looks
        place = _places.get((group.process_group, x.device))
        if place is not None and place.communicator is not None:
            place.communicator.check_alive()
    return chosen


def tiers_of(group: TPGroup, device: torch.device) -> tuple[str, ...]:
    """The tiers that the group has on its GPUs. The first call for a group is a collective of all its ranks, and warns
    of why there are no others.
    """
    return _place_of(group, device, capturing=False, operation="tiers_of").tiers


def peers_of(group: TPGroup, x: Tensor) -> Communicator | None:
    """The group's communicator on x's GPU, once `choose` has made one, where the ranks have memory that peers write:
    not after they failed to get more of it. The same on all ranks."""
    place = _places.get((group.process_group, x.device)) if _is_on_gpu(x) and group.replicas == 1 else None
    communicator = None if place is None else place.communicator
    return communicator if communicator is not None and communicator.has_peers else None


def made() -> list[Choice]:
    """The choices of this process, for `explain`; the same ones, made in other groups or for other reasons, once."""
    told: list[Choice] = []
    for choice in _listed.values():
        if choice not in told:
            told.append(choice)
    return told


def bucket(rows: int) -> int:
    """The power of two that is nearest to `rows`, by their ratio; 0 for 0."""
    below = 1 << rows.bit_length() >> 1
    return below if rows * rows <= 2 * below * below else 2 * below


def _look_closer(
    key: tuple, operation: str, group: TPGroup, x: Tensor, shape: Shape, attempt: Attempt, rows: Rows | None
) -> Chosen:
    """`choose`, for a shape that is not known, or not any more."""
    size = bucket(shape[0]), *shape[1:]
    case = size, *key[1:]
    if case in _measured:
        return _know(key, _measured[case])
    _forget_destroyed_groups()
    dtype = "tf32" if case[-1] else str(x.dtype).removeprefix("torch.")
    with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
        capturing = _is_on_gpu(x) and _is_capturing()
        place, tier, why = _settled(operation, group, x, shape, attempt, capturing)
        us, is_measured = {}, tier is None
        if is_measured:
            case_text, call = (f"{operation} {dtype} {' '.join(map(size_text, sizes))}" for sizes in (size, shape))
            tier, why, us = _agreed(case_text, call + rows_text(rows), place, group, x.device, attempt)
            if place.why_none:
                why += f"; not by copy engines, for {place.why_none}"
    chosen = None if tier == "reference" else (place.communicator, tier)
    if case in _listed or len(_listed) < MOST:
        _listed[case] = Choice(operation, *size, dtype, group.size, tier, why, us)
    if is_measured:
        _measured[case] = chosen
    return chosen if capturing else _know(key, chosen)  # what is captured unmeasured, a later call may measure


def _know(key: tuple, chosen: Chosen) -> Chosen:
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = chosen
    return chosen


def _settled(
    operation: str, group: TPGroup, x: Tensor, shape: Shape, attempt: Attempt, capturing: bool
) -> tuple[_Place, str | None, str]:
    """The tier where that needs no measuring, and why; None where it does."""
    name = wanted[-1]
    if told := why_invalid(name):
        raise ValueError(told)
    why_plain = _why_plain(group, x, shape)
    if why_plain:
        if name in TIERS:
            warnings.warn(f"tpfused: {operation} runs on the plain path, not by {name!r}: {why_plain}", stacklevel=2)
        return _Place(), "reference", why_plain
    if name in PLAIN:
        return _Place(), "reference", "forced"
    place = _place_of(group, x.device, capturing, operation)
    if name in TIERS and name not in place.tiers:
        why_none = f" ({place.why_none})" if place.why_none else ""
        raise ValueError(f"tier {name!r} is not to be had in this group, only {(*place.tiers, 'reference')}{why_none}")
    if name in TIERS:
        return place, name, "forced"
    if not place.tiers:
        return place, "reference", place.why_none
    if name == "first":
        return place, place.tiers[0], "not measured, as was asked for"
    if attempt is None:
        return place, place.tiers[0], "not measured: nothing travels"
    if exact[-1]:
        return place, place.tiers[0], "not measured: deterministic"
    if capturing:
        return place, place.tiers[0], "not measured, for a CUDA graph was captured"
    if sum(case[_GROUP] is group.process_group for case in _measured) >= MOST:
        return place, place.tiers[0], f"not measured, as were {MOST} others"
    return place, None, ""


def _why_plain(group: TPGroup, x: Tensor, shape: Shape) -> str | None:
    """What decides must be the same on every rank: not its own share, which may be empty."""
    if group.size == 1:
        return "one rank"
    if group.replicas > 1:
        return "several ranks hold the same shard"
    if not _is_on_gpu(x):
        return f"the tensors are on the {x.device.type.upper()}"
    if x.dtype not in TYPES:
        return f"no tier for {str(x.dtype).removeprefix('torch.')}"
    return "an operand is empty" if 0 in shape else None


def _agreed(
    case: str, call: str, place: _Place, group: TPGroup, device: torch.device, attempt: Attempt
) -> tuple[str, str, saved.Times]:
    """The tier to take, why, and the times: those that are kept, or new ones. `call` is the case with its rows as they
    are, in which the ranks must agree as well."""
    is_first = group.rank == 0
    meet_for(call, group.process_group)
    kept = saved.load().get(place.name, {}).get(case) if is_first else None
    together(place.communicator.check_alive, [group.process_group], CHOOSING)
    calls, (us, *_) = zip(*exchange((call, kept), group.process_group, CHOOSING), strict=True)
    if len(set(calls)) > 1:
        raise ValueError(f"the ranks call an operation with different sizes: {', '.join(calls)}")
    if us and set(us) == {*place.tiers, "reference"}:
        return *_taken(us, "measured before, kept on disk"), us
    candidates = {tier: partial(attempt, (place.communicator, tier)) for tier in place.tiers}
    rehearsals = {tier: partial(attempt, (Rehearsal(place.communicator), tier)) for tier in place.tiers}
    candidates["reference"] = partial(attempt, None)  # torch's collectives can't be rehearsed
    us, failures = measure(candidates, rehearsals, device, group.process_group)
    # What was given up is no slower tier.
    together(place.communicator.check_alive, [group.process_group], CHOOSING)
    if is_first and not failures:  # a failure may have been for want of memory, which another process has
        saved.save(place.name, case, us)
    return *_taken(us, "measured", *(f"{tier} failed on {what}" for tier, what in failures.items())), us


def _taken(us: saved.Times, *why: str) -> tuple[str, str]:
    """The tier, and why."""
    tier = fastest(us)
    if tier in us and us[tier] > min(us.values()):
        why = *why, "what is faster gains too little"
    return tier, "; ".join(why)


def _place_of(group: TPGroup, device: torch.device, capturing: bool, operation: str) -> _Place:
    key = group.process_group, device
    if key not in _places:
        if capturing:
            return _Place(why_none="its first operation was captured in a CUDA graph: run one before")
        meet_for(f"{operation}, the group's first overlapped operation,", group.process_group)
        _places[key] = _look_around(group, device)
    return _places[key]


def _look_around(group: TPGroup, device: torch.device) -> _Place:
    communicator, why_none = None, ""
    try:
        communicator = communicator_of(group, device)
    except Exception as error:  # on one rank, perhaps: the others must not use theirs
        why_none = f"{type(error).__name__}: {error}"
    tiers = communicator.tiers if communicator else ()
    told = by_rank((why_none, tiers, *_card(device), platform.node()), group.process_group, MAKING)
    all_why, all_tiers, cards, slots, hosts = zip(*told.values(), strict=True)
    for rank, why_none in zip(told, all_why, strict=True):
        if why_none:
            why_none = f"rank {rank} has no communicator: {why_none}"
            warnings.warn(f"tpfused: collectives are not overlapped with matmuls, for {why_none}", stacklevel=2)
            return _Place(why_none=why_none)
    if not all(all_tiers):
        return _Place(why_none="a rank lacks the compiled extension")
    tiers = tuple(tier for tier in tiers if all(tier in others for others in all_tiers))
    built = communicator.module.build_info()
    all_cards = " + ".join(f"{count} x {card}" for card, count in sorted(Counter(cards).items()))
    all_slots = ", ".join(sorted(set(slots)))  # which GPUs of a host, for some pairs may have another link than others
    name = (
        f"{all_cards} (PCI {all_slots}), hosts: {len(set(hosts))}, tiers: {' '.join(tiers)}, "
        f"tpfused {tpfused.__version__} {built['sources']}, torch {torch.__version__}, NCCL {built['nccl_loaded']}"
    )
    return _Place(communicator, tiers, name, communicator.why_no_peers)


def _forget_destroyed_groups() -> None:
    groups = {case[_GROUP] for case in (*_measured, *_listed)} | {key[0] for key in _places}
    dead = {group for group in groups - {None} if not exists(group)}
    if dead:
        _known.clear()
        for table, index in ((_measured, _GROUP), (_listed, _GROUP), (_places, 0)):
            for key in [key for key in table if key[index] in dead]:
                del table[key]


# What tests without a GPU replace.


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _card(device: torch.device) -> tuple[str, str]:
    """Its name and its PCI address."""
    card = torch.cuda.get_device_properties(device)
    return card.name, f"{card.pci_domain_id:x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}"
