"""`explain()`: what the overlapped operations and the layers of this process run by, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

KERNEL, PLAIN = "kernel", "plain PyTorch"
MOST_TOLD = 1024


@dataclass(frozen=True)
class Choice:
    """What an operation does with shapes of about one size.

    Attributes:
        operation: its name; whether it saves all ranks' rows; its activation; of batch-first inputs, how many batches
            they lie in, a power of two.
        rows, in_features, out_features: of all ranks; `rows` is a power of two, for all shapes that it is nearest to;
            None: not told, and a rank's own weight has its part only.
        dtype: "bfloat16", "float16", "float32", "tf32" (float32, multiplied as TF32), ...
        ranks: how many the tensor-parallel group has.
        tier: "p2p", "nccl", or "reference": the plain path, torch's collective before or after the whole matmul.
        why: how that was decided.
        us: microseconds of each tier that was measured, of the rank that was the slowest.
    """

    operation: str
    rows: int
    in_features: int | None
    out_features: int | None
    dtype: str
    ranks: int
    tier: str
    why: str
    us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupMemory:
    """What operations keep on one of this process's GPUs, in bytes.

    Attributes:
        device: such as "cuda:0".
        ranks: how many the group has.
        peers: the memory that the group's other ranks write; torch's allocator does not count it.
        workspaces: of its matmuls and transfers; torch's allocator counts them.
    """

    device: str
    ranks: int
    peers: int
    workspaces: int

    def __str__(self) -> str:
        peers, workspaces = (f"{size / 2**20:,.1f} MiB" for size in (self.peers, self.workspaces))
        return f"{self.ranks} ranks on {self.device}: {peers} that peers write, {workspaces} of workspaces"


@dataclass(frozen=True)
class Computation:
    """What a layer computes with besides the overlapped operations.

    Attributes:
        what: is computed: "embedding", "attention", ...
        dtype, device: such as "bfloat16" and "cuda".
        runs_by: "kernel" of this package, "plain PyTorch", or the name of torch's back end of attention.
        why: it is the plain path; of attention, the shape that the back end was asked for.
    """

    what: str
    dtype: str
    device: str
    runs_by: str
    why: str


class Explanation(tuple[Choice, ...]):
    """Choices, in the order in which they were made; as text, tables of these and of what layers compute with.

    Attributes:
        computations: a `Computation` of each kind that layers have run, but for compiled code.
        memory: a `GroupMemory` of each group and GPU.
    """

    computations: tuple[Computation, ...]
    memory: tuple[GroupMemory, ...]

    def __new__(
        cls,
        choices: Iterable[Choice] = (),
        memory: Iterable[GroupMemory] = (),
        computations: Iterable[Computation] = (),
    ):
        made = super().__new__(cls, choices)
        made.memory, made.computations = tuple(memory), tuple(computations)
        return made

    def __repr__(self) -> str:
        parts = [self._choices() if self else "no overlapped operation has run in this process"]
        if self.computations:
            rows = [(told.what, told.dtype, told.device, told.runs_by, told.why) for told in self.computations]
            parts.append(_table([("layers compute", "dtype", "on", "by", "why"), *rows]))
        return "\n\n".join(["\n".join([parts[0], *map(str, self.memory)]), *parts[1:]])

    def _choices(self) -> str:
        timed = [name for name in ("p2p", "nccl", "reference") if any(name in choice.us for choice in self)]
        times = [f"{name} us" for name in timed]
        table = [("operation", "rows (rounded)", "in", "out", "dtype", "ranks", *times, "runs by", "why")]
        for choice in self:
            shape = [size_text(size, ",") for size in (choice.rows, choice.in_features, choice.out_features)]
            times = [f"{choice.us[name]:,.1f}" if name in choice.us else "" for name in timed]
            table.append((choice.operation, *shape, choice.dtype, str(choice.ranks), *times, choice.tier, choice.why))
        unknown = any(None in (choice.in_features, choice.out_features) for choice in self)
        note = "\n?: all ranks' features, which in_features= or out_features= would tell" if unknown else ""
        return _table(table, right={1, 2, 3, *range(5, 6 + len(timed))}) + note


def size_text(size: int | None, form: str = "") -> str:
    """A size, which this rank may not know."""
    return "?" if size is None else format(size, form)


def _table(rows: list[tuple[str, ...]], right: Collection[int] = ()) -> str:
    """Columns side by side, those of the indices `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(text.rjust(width) if i in right else text.ljust(width) for i, (text, width) in cells)

    return "\n".join(line(row).rstrip() for row in rows)


_told: dict[tuple, Computation] = {}


def tell(what: str, x: Tensor, runs_by: str, why: str) -> None:
    """Note for `explain` what a layer computes with, on a tensor like `x`. Looking again at what is known costs a
    microsecond; compiled code, which does not come here when it runs, tells nothing."""
    if torch.compiler.is_compiling():
        return
    key = what, x.dtype, x.device.type, runs_by, why
    if key not in _told and len(_told) < MOST_TOLD:
        _told[key] = Computation(what, str(x.dtype).removeprefix("torch."), x.device.type, runs_by, why)


def explain() -> Explanation:
    """Which tier each overlapped operation of this process runs by, for each shape and group, and why; and what else
    the layers compute with: kernels, torch's back ends of attention, or plain PyTorch.

    ``print(explain())`` shows tables, and what memory is kept; iterating gives the `Choice` of each line of the first.
    Looking costs the operations nothing, and is no collective.
    """
    from tpfused.overlap import choice, communicator  # which need the above

    memory = [
        GroupMemory(str(made.device), made.size, made.peer_bytes, made.workspace_bytes)
        for made in communicator.all_made()
    ]
    return Explanation(choice.made(), memory, _told.values())
