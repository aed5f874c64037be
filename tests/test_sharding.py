"""Who owns which rows, against torch.chunk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpfused.sharding import divide, padded_shard_size, shard_range, shard_size

sizes = st.one_of(st.integers(0, 40), st.integers(0, 200_000))
worlds = st.integers(1, 70)


@given(sizes, worlds)
def test_splits_like_torch_chunk(size, world):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(world)] if size else []
    chunks += [[]] * (world - len(chunks))
    for rank, chunk in enumerate(chunks):
        start, stop = shard_range(size, world, rank)
        assert list(range(start, stop)) == chunk
        assert shard_size(size, world, rank) == len(chunk)


@given(sizes, worlds)
def test_shards_cover_the_axis_once_and_padding_comes_last(size, world):
    ranges = [shard_range(size, world, rank) for rank in range(world)]
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in zip(ranges[:-1], ranges[1:], strict=True))
    shards = [stop - start for start, stop in ranges]
    assert sum(shards) == size and shards == sorted(shards, reverse=True)
    padded = padded_shard_size(size, world)
    assert max(shards) == padded
    assert all(start == rank * padded for rank, (start, stop) in enumerate(ranges) if stop > start)


def test_gpt2_vocabulary_and_empty_shards():
    for size, expected in ((50257, [12565, 12565, 12565, 12562]), (5, [2, 2, 1, 0]), (2, [1, 1, 0, 0]), (0, [0, 0, 0])):
        assert [shard_size(size, len(expected), rank) for rank in range(len(expected))] == expected


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_divide(quotient, denominator):
    assert divide(quotient * denominator, denominator, "x") == quotient
    if denominator > 1:
        with pytest.raises(ValueError, match=rf"heads.*{quotient * denominator + 1}\D.*{denominator}"):
            divide(quotient * denominator + 1, denominator, "heads")


@pytest.mark.parametrize("rank", [-1, 4, 7])
def test_a_rank_outside_the_world(rank):
    with pytest.raises(ValueError, match=rf"{rank}\D.*4"):
        shard_range(10, 4, rank)


@pytest.mark.parametrize("call", [padded_shard_size, lambda size, world: shard_range(size, world, 0)])
def test_sizes_that_cannot_be(call):
    with pytest.raises(ValueError, match="-3"):
        call(-3, 2)
    for world in (0, -2):
        with pytest.raises(ValueError, match=str(world)):
            call(8, world)
    with pytest.raises(ValueError, match="0"):
        divide(8, 0, "x")
