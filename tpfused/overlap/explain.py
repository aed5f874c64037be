"""`explain()`: which tier the overlapped operations of this process run by, and why."""

from __future__ import annotations

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


class Explanation(tuple[Choice, ...]):
    """Choices, in the order in which they were made; as text, a table of them."""

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

        return "\n".join(line(row).rstrip() for row in table)


def explain() -> Explanation:
    """Which tier each overlapped operation of this process runs by, for each shape and group, and why.

    ``print(explain())`` shows a table; iterating gives the `Choice` of each line. Looking costs the operations nothing,
    and is no collective.
    """
    from tpfused.overlap import choice  # which needs the above

    return Explanation(choice.made())
