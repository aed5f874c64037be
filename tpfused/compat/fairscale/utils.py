"""fairscale's arithmetic of shards, which are all of one size. What it asserts is a `ValueError` here, which is an
`AssertionError`, too.

Accepted without meaning here: the `world_size` of `vocab_range_from_per_partition_vocab_size` (as in fairscale), which
no rank is compared with.
"""

from __future__ import annotations

from torch import Tensor

from tpfused import sharding
from tpfused.checks import check_boolean
from tpfused.compat import asserted
from tpfused.compat.sizes import size_of


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises `ValueError` unless `denominator` divides `numerator`."""
    divide(numerator, denominator)


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, which must be whole: `ValueError` otherwise."""
    return asserted.divide(numerator, denominator, "division with a remainder")


divide = divide_and_check_no_remainder


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """``[..., n]`` -> `num_partitions` tensors ``[..., n / num_partitions]``: views, unless they are to be contiguous.

    Raises:
        ValueError: `num_partitions` does not divide n.
    """
    check_boolean(contiguous_split_chunks, "contiguous_split_chunks")
    last = size_of(tensor, -1, "split_tensor_along_last_dim")
    parts = tensor.split(divide(last, num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Which entries ``[first, last)`` of a vocabulary a rank owns."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """`world_size` is without meaning."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Raises `ValueError` where the vocabulary does not divide by the number of ranks."""
        divide(global_vocab_size, world_size)
        return sharding.shard_range(global_vocab_size, world_size, rank)
