"""The vocabulary-parallel embedding against nn.Embedding."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from tests.compare import Block, collectives_made, compare, refuses
from tpfused import VocabParallelEmbedding
from tpfused.group import TPGroup
from tpfused.layers import embedding as layer_module
from tpfused.placement import local

# Even, uneven, one id only (empty shards), GPT-2's.
VOCABULARIES = [16, 13, 5, 1, 50257]
# As in test_linear: where the tokens are, and how many; None is without sequence parallelism.
TOKENS = [(None, 5), (0, 8), (0, 5), (1, 2), (-1, 1)]

modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def dense_and_parallel(block, vocabulary, width, padding_idx=None, dtype=torch.float64, **options):
    torch.manual_seed(block.seed)
    dense = nn.Embedding(vocabulary, width, padding_idx, device=block.device, dtype=dtype)
    torch.manual_seed(block.seed)
    place = {"device": block.device, "dtype": dtype, **block.place}
    return dense, VocabParallelEmbedding(vocabulary, width, padding_idx, **options, **place)


def draw_ids(block, vocabulary, shape):
    """Ids that include the first, the last and the same one twice, in a layout with strides."""
    ids = torch.randint(vocabulary, shape, device=block.device)
    flat = ids.view(-1)
    if flat.numel() > 2:
        flat[0], flat[1], flat[2] = 0, vocabulary - 1, vocabulary - 1
    return ids.repeat_interleave(2, -1)[..., ::2]


def embedding_case(block, vocabulary, sequence_dim, tokens, padding_idx=None, dtype=torch.float64, width=3, ids=None):
    options = {} if sequence_dim is None else {"sequence_parallel": True, "sequence_dim": sequence_dim}
    dense, layer = dense_and_parallel(block, vocabulary, width, padding_idx, dtype, **options)
    block.check_parameter(layer.weight, dense.weight, 0)
    if ids is None:
        ids = draw_ids(block, vocabulary, (tokens, 3) if sequence_dim in (None, 0) else (3, tokens))
    out_dim = -2 if sequence_dim == -1 else sequence_dim
    grad = block.randn(*ids.shape, width, dtype=dtype)

    out = layer(ids)
    out.backward(block.own(grad, out_dim))
    split = {"out": out_dim, "weight": 0}
    compare(
        {"out": out.detach(), "weight": local(layer.weight.grad)},
        lambda weight: nn.functional.embedding(ids, weight, padding_idx),
        {"weight": dense.weight},
        grad,
        lambda name, tensor: block.own(tensor, split[name]),
        f"vocabulary {vocabulary}, {tokens} tokens along {sequence_dim}, padding {padding_idx}",
    )


def check_dense(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for vocabulary, (sequence_dim, tokens) in block.some(product(VOCABULARIES, TOKENS)):
        embedding_case(block, vocabulary, sequence_dim, tokens)
    embedding_case(block, 13, None, 0)
    embedding_case(block, 13, 0, 0)
    embedding_case(block, 13, None, None, ids=torch.tensor(7, device=ctx.device))
    embedding_case(block, 13, None, None, ids=torch.tensor([3, 12], device=ctx.device, dtype=torch.int32))
    for dtype in (torch.float32, torch.bfloat16):
        embedding_case(block, 13, None, 5, dtype=dtype, width=32)


def check_padding(ctx, tp, mode, seed):
    """The padding id is global: its row is zero and without gradient on its owner, and no other row is."""
    block = Block(ctx, tp, mode, seed)
    for padding_idx in (0, 5, 7, 12, -1, -13):
        ids = torch.arange(13, device=ctx.device)
        embedding_case(block, 13, None, 13, padding_idx, ids=ids)
        embedding_case(block, 13, 0, 13, padding_idx, ids=ids)
        dense, layer = dense_and_parallel(block, 13, 3, padding_idx)
        out = layer(ids)
        out.sum().backward()
        zero_rows = (out == 0).all(-1).nonzero().flatten().tolist()
        assert zero_rows == [padding_idx % 13] and layer.padding_idx == padding_idx % 13
        expected = torch.ones(13, 3, dtype=torch.float64, device=ctx.device)
        expected[padding_idx] = 0
        assert torch.equal(local(layer.weight.grad), block.own(expected, 0))


def check_counts(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    ids = torch.zeros(tp, dtype=torch.int64, device=ctx.device)
    for options, forward, backward in (
        ({}, ["all_reduce"], []),
        ({"sequence_parallel": True}, ["reduce_scatter"], ["all_gather"]),
    ):
        _, layer = dense_and_parallel(block, 8, 3, **options)
        with collectives_made() as names:
            out = layer(ids)
            assert names == (forward if tp > 1 else [])
            names.clear()
            out.sum().backward()
            assert names == (backward if tp > 1 else [])


def check_copies(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    dense, layer = dense_and_parallel(block, 13, 3, padding_idx=4)
    block.check_parameter(copy.deepcopy(layer).weight, dense.weight, 0)
    empty = VocabParallelEmbedding(13, 3, 4, device="meta", dtype=torch.float64, **block.place)
    empty.to_empty(device=ctx.device)
    torch.manual_seed(block.seed)
    empty.reset_parameters()
    block.check_parameter(empty.weight, dense.weight, 0)
    ids = torch.arange(13, device=ctx.device)
    assert torch.equal(empty(ids), dense(ids))

    torch.manual_seed(block.seed)
    table = torch.empty(13, 3, dtype=torch.float64, device=ctx.device)
    nn.init.uniform_(table)
    torch.manual_seed(block.seed)
    made = VocabParallelEmbedding(
        13, 3, init_method=nn.init.uniform_, device=ctx.device, dtype=torch.float64, **block.place
    )
    block.check_parameter(made.weight, table, 0)


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)

    def make(*args, **options):
        return VocabParallelEmbedding(*args, device=ctx.device, **options, **block.place)

    def ids(*values):
        return torch.tensor(values, device=ctx.device)

    layer = make(10, 4)
    sync = make(10, 4, check="sync")
    for bad in (10, -1, 12345678901):
        with refuses(ValueError, bad, 10):
            sync(ids(3, bad, 4))
    with refuses(ValueError, "-7 (the smallest) and 31 (the largest)", 10):
        sync(ids(-7, 2, 31))
    with refuses(ValueError, "found 11 (the largest)"):
        sync(ids(11))
    for dtype in (torch.float32, torch.bool, torch.uint8):
        with refuses(TypeError, dtype):
            layer(ids(1).to(dtype))
    with refuses(TypeError, "list"):
        layer([1, 2])
    with refuses(ValueError, "meta", ctx.device.type):
        layer(ids(1).to("meta"))
    for padding_idx in (10, -11):
        with refuses(ValueError, padding_idx, 10):
            make(10, 4, padding_idx)
    with refuses(ValueError, "num_embeddings", 0):
        make(0, 4)
    with refuses(ValueError, "embedding_dim", -4):
        make(10, -4)
    with refuses(TypeError, "num_embeddings", "float"):
        make(10.0, 4)
    with refuses(ValueError, "later"):
        make(10, 4, check="later")(ids(1))
    with refuses(ValueError, 2, (2, 3)):
        make(10, 4, sequence_parallel=True, sequence_dim=2)(ids(1, 2, 3, 4, 5, 6).view(2, 3))


def check_late_refusal(ctx, tp):
    """By default a GPU is not waited for: NaN for a bad id, the error at the next call. The CPU raises at once."""
    block = Block(ctx, tp, "group", 0)
    layer = VocabParallelEmbedding(10, 4, device=ctx.device, **block.place)
    bad, good = torch.tensor([3, 10], device=ctx.device), torch.tensor([3, 9], device=ctx.device)
    if ctx.device.type == "cpu":
        with refuses(ValueError, 10):
            layer(bad)
    else:
        out = layer(bad)
        assert out[1].isnan().all() and not out[0].isnan().any()
        with refuses(ValueError, 10):
            layer(good)
    assert not layer(good).isnan().any()
    off = VocabParallelEmbedding(10, 4, check="off", device=ctx.device, **block.place)
    assert (off(bad)[1] == 0).all()


@modes
def test_equals_dense(workers, tp, mode, seed):
    workers.run(check_dense, tp, mode, seed)


@modes
def test_padding_is_a_global_id(workers, tp, mode, seed):
    workers.run(check_padding, tp, mode, seed)


def test_makes_only_its_own_collectives(workers, tp):
    workers.run(check_counts, tp)


@modes
def test_copies_init_method_and_the_meta_device(workers, tp, mode, seed):
    workers.run(check_copies, tp, mode, seed)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


def test_bad_ids_without_a_synchronisation(workers, tp):
    workers.run(check_late_refusal, tp)


def test_the_plain_path_can_be_forced(monkeypatch):
    def kernel(*args):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr(layer_module, "runs_kernels", lambda x, backend, *told: backend is None)
    monkeypatch.setattr(layer_module, "embedding", kernel)
    ids, alone = torch.zeros(3, dtype=torch.int64), {"group": TPGroup(None, 0, 1)}
    VocabParallelEmbedding(5, 4, backend="reference", **alone)(ids)
    with pytest.raises(AssertionError, match="kernel"):
        VocabParallelEmbedding(5, 4, **alone)(ids)
