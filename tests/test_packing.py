"""The row orders of packed weights: what is where, back and forth, and that shards come out packed too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpfused.collectives import own_slice
from tpfused.group import TPGroup
from tpfused.packing import GateUpPacking, QKVPacking, pack_gate_up, pack_qkv, unpack_gate_up, unpack_qkv

kv_heads = st.integers(1, 6)
queries_each = st.integers(1, 4)
head_dim = st.integers(1, 5)
trailing = st.sampled_from([(), (3,), (2, 3)])


def rows(count: int, trailing: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(count, *trailing, dtype=torch.float64)


def test_qkv_rows_go_by_key_value_head():
    q, k, v = torch.arange(8), torch.arange(100, 104), torch.arange(200, 204)
    packed = pack_qkv(q, k, v, num_heads=4, num_kv_heads=2)  # heads of two rows
    assert packed.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_gate_and_up_rows_alternate():
    assert pack_gate_up(torch.arange(3), torch.arange(10, 13)).tolist() == [0, 10, 1, 11, 2, 12]


@given(kv_heads, queries_each, head_dim, trailing)
def test_qkv_round_trip(kv, queries, d, trailing):
    wholes = (rows(kv * queries * d, trailing), rows(kv * d, trailing), rows(kv * d, trailing))
    packing = QKVPacking(kv * queries, kv)
    unpacked = packing.unpack(packing.pack(wholes))
    assert all(torch.equal(a, b) for a, b in zip(unpacked, wholes, strict=True))


@given(st.integers(0, 9), trailing)
def test_gate_up_round_trip(features, trailing):
    wholes = (rows(features, trailing), rows(features, trailing))
    packing = GateUpPacking()
    unpacked = packing.unpack(packing.pack(wholes))
    assert all(torch.equal(a, b) for a, b in zip(unpacked, wholes, strict=True))


@given(st.integers(1, 4), kv_heads, queries_each, head_dim)
def test_a_shard_of_the_packed_is_the_packed_shards(ranks, kv_each, queries, d):
    kv = kv_each * ranks
    wholes = (rows(kv * queries * d, ()), rows(kv * d, ()), rows(kv * d, ()))
    packed = pack_qkv(*wholes, kv * queries, kv)
    for rank in range(ranks):
        group = TPGroup(None, rank, ranks)
        shards = [own_slice(whole, 0, group) for whole in wholes]
        assert torch.equal(own_slice(packed, 0, group), pack_qkv(*shards, kv_each * queries, kv_each))


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda r: pack_qkv(r(8), r(4), r(4), 5, 2), ("5", "2")),  # heads are no multiple of kv heads
        (lambda r: pack_qkv(r(9), r(4), r(4), 4, 2), ("9", "4")),  # rows are no multiple of heads
        (lambda r: pack_qkv(r(8), r(4), r(6), 4, 2), ("v has 6 rows", "8", "4")),  # v of another size
        (lambda r: unpack_qkv(r(12), 4, 2), ("12", "8")),
        (lambda r: pack_gate_up(r(3), r(4)), ("(3,)", "(4,)")),
        (lambda r: unpack_gate_up(r(5)), ("5", "2")),
    ],
)
def test_sizes_that_do_not_fit_are_named(call, told):
    with pytest.raises(ValueError) as raised:
        call(torch.arange)
    assert all(text in str(raised.value) for text in told)
