"""`explain()`: which tier the overlapped operations of this process run by, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Choice:
    """What an operation does with shapes of about one size.

    Attributes:
        operation: its name.
        rows, in_features, out_features: of all ranks; `rows` is a power of two, for all shapes that it is nearest to;
            None: unknown.
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
        workspaces: of the device's matmuls and transfers, which all groups share; torch's allocator counts them.
    """

    device: str
    ranks: int
    peers: int
    workspaces: int

    def __str__(self) -> str:
        peers, workspaces = (f"{size / 2**20:,.1f} MiB" for size in (self.peers, self.workspaces))
        return f"{self.ranks} ranks on {self.device}: {peers} that peers write, {workspaces} of workspaces"


class Explanation(tuple[Choice, ...]):
    """Choices, in the order in which they were made; as text, a table of them.

    Attributes:
        memory: a `GroupMemory` of each group and GPU.
    """

    memory: tuple[GroupMemory, ...]

    def __new__(cls, choices: Iterable[Choice] = (), memory: Iterable[GroupMemory] = ()):
        made = super().__new__(cls, choices)
        made.memory = tuple(memory)
        return made

    def __repr__(self) -> str:
        if not self:
            return "no overlapped operation has run in this process"
        timed = [name for name in ("p2p", "nccl", "reference") if any(name in choice.us for choice in self)]
        times = [f"{name} us" for name in timed]
        table = [("operation", "rows", "in", "out", "dtype", "ranks", *times, "runs by", "why")]
        for choice in self:
            sizes = choice.rows, choice.in_features, choice.out_features
            shape = ["?" if size is None else f"{size:,}" for size in sizes]
            times = [f"{choice.us[name]:,.1f}" if name in choice.us else "" for name in timed]
            table.append((choice.operation, *shape, choice.dtype, str(choice.ranks), *times, choice.tier, choice.why))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        numbers = {1, 2, 3, *range(5, 6 + len(timed))}

        def line(row: tuple[str, ...]) -> str:
            cells = enumerate(zip(row, widths, strict=True))
            return "  ".join(text.rjust(width) if i in numbers else text.ljust(width) for i, (text, width) in cells)

        return "\n".join([*(line(row).rstrip() for row in table), *map(str, self.memory)])


def explain() -> Explanation:
    """Which tier each overlapped operation of this process runs by, for each shape and group, and why.

    ``print(explain())`` shows a table, and what memory is kept; iterating gives the `Choice` of each line. Looking
    costs the operations nothing, and is no collective.
    """
    from tpfused.overlap import calls, choice, communicator  # which need the above

    workspaces = calls.workspace_bytes()
    memory = [
        GroupMemory(str(device), made.size, made.peer_bytes, workspaces.get(device, 0))
        for device, made in communicator.all_made()
    ]
    return Explanation(choice.made(), memory)
