"""Which rank owns which rows: pure integer arithmetic, no tensors.

Every axis that tensor parallelism splits (output features, input features, vocabulary, tokens) is split like
`torch.chunk`: all ranks own ``ceil(size / world)`` consecutive entries, except that the last ranks may own fewer, or
none. 50257 rows on 4 ranks: 12565, 12565, 12565, 12562. This is also how DTensor's ``Shard`` splits, so a plain shard
and a DTensor's local tensor are always the same rows.

A consequence the collectives rely on: the shards padded to one size and laid end to end are the whole axis followed by
padding only, never with padding in between.
"""


def divide(numerator: int, denominator: int, what: str) -> int:
    """``numerator / denominator`` where it is whole; a `ValueError` that begins with `what` otherwise."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator}")
    return numerator // denominator


def padded_shard_size(size: int, world: int) -> int:
    """The largest shard's size, which all ranks but the last ones have: ``ceil(size / world)``."""
    if size < 0:
        raise ValueError(f"cannot split a negative size {size}")
    if world < 1:
        raise ValueError(f"cannot split over {world} ranks")
    return -(-size // world)


def shard_range(size: int, world: int, rank: int) -> tuple[int, int]:
    """The half-open range ``[start, stop)`` of an axis of `size` entries that `rank` of `world` ranks owns."""
    shard = padded_shard_size(size, world)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks")
    return min(rank * shard, size), min((rank + 1) * shard, size)


def shard_size(size: int, world: int, rank: int) -> int:
    """How many entries of an axis of `size` entries `rank` of `world` ranks owns (0 for a last, empty rank)."""
    start, stop = shard_range(size, world, rank)
    return stop - start
