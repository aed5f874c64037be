"""What a layer must refuse, or do right, where a user goes off the usual path."""

import copy
import pickle
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.compare import Block, assert_close, refuses
from tpfused import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    ParallelTransformer,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    clip_grad_norm_,
    rank_rng,
    vocab_parallel_cross_entropy,
)
from tpfused.collectives import all_gather, all_reduce
from tpfused.group import TPGroup, resolve_group
from tpfused.layers.norm import Norm

NO_TENSORS = None, "x", 3, [[1]], np.ones((2, 3), dtype=np.int64)


def check_second_derivative(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    for layer in (
        ParallelMLP(4, 8, dtype=torch.float64, device=block.device, **block.place),
        ColumnParallelLinear(4, 8, gather_output=True, dtype=torch.float64, device=block.device, **block.place),
        RowParallelLinear(4, 8, input_is_parallel=False, dtype=torch.float64, device=block.device, **block.place),
    ):
        x = block.randn(3, 4).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated once"):
            grad.square().sum().backward()


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_second_derivatives_are_refused(workers, tp):
    workers.run(check_second_derivative, tp)


def check_learned_mask(ctx, tp, seed):
    """The gradient of a bias on the attention scores is whole on each rank, for each head or common to all."""
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    for heads in (4, 1):
        torch.manual_seed(block.seed)
        dense = ParallelAttention(8, 4, dtype=torch.float64, device=block.device, group=TPGroup(None, 0, 1))
        torch.manual_seed(block.seed)
        layer = ParallelAttention(8, 4, dtype=torch.float64, device=block.device, **block.place)
        x, bias = block.randn(5, 2, 8), block.randn(1, heads, 5, 5)
        expected, mine = (bias.clone().requires_grad_() for _ in range(2))
        dense(x, expected).square().sum().backward()
        layer(x, mine).square().sum().backward()
        assert_close(mine.grad, expected.grad, f"bias of {heads} heads")
        assert torch.equal(all_reduce(mine.grad, group) / tp, mine.grad)


def test_a_learned_mask_gets_its_whole_gradient(workers, tp, seed):
    workers.run(check_learned_mask, tp, seed)


def check_rank_rng(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    torch.manual_seed(0)
    draws = []
    for group in (block.group, resolve_group(block.group)):
        torch.manual_seed(0)
        with rank_rng(group, str(block.device)):
            draws.append(torch.rand(4, device=block.device))
    assert torch.equal(*draws)
    of_all = all_gather(draws[0][None], 0, tp, resolve_group(block.group))
    assert len(of_all.unique(dim=0)) == tp


def test_rank_rng_takes_what_layers_take(workers, tp):
    workers.run(check_rank_rng, tp)


def check_masks_are_refused_first(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    options = {"sequence_parallel": True, "dtype": torch.float64, "device": block.device, **block.place}
    layer = ParallelAttention(8, 4, **options)
    x = block.randn(2, 3, 8)
    for mask, error in (
        (torch.ones(7, 7, dtype=torch.bool, device=block.device), ValueError),
        (torch.ones(3, 2 * tp, device=block.device), ValueError),
        (torch.ones(3, 2 * tp, dtype=torch.int64, device=block.device), TypeError),
        (torch.ones(3, 2 * tp, dtype=torch.bool, device="meta"), ValueError),
        ([[True]], TypeError),
    ):
        with refuses(error):
            layer(x, mask)
    with refuses(TypeError, "6.0"):
        layer(x, total_len=6.0)
    model = ParallelTransformer(
        TransformerConfig.gpt(vocab_size=9, hidden_size=8, num_layers=1, num_heads=4, ffn_size=8, max_positions=8),
        device=block.device,
        **block.place,
    )
    ids = torch.zeros(2, 3, dtype=torch.int64, device=block.device)
    with refuses(TypeError, "float32"):
        model.loss(ids, ids.float())
    with refuses(ValueError, (2, 3), (2, 2)):
        model.loss(ids, ids[:, :2])
    for odd in NO_TENSORS:
        told = type(odd).__name__
        with refuses(TypeError, "ParallelTransformer: ids", told):
            model(odd)
        with refuses(TypeError, "ParallelTransformer: ids", told):
            model.loss(odd, ids)
        with refuses(TypeError, "labels", told):
            model.loss(ids, odd)
        with refuses(TypeError, "the input", told):
            layer(odd)
        if odd is not None:
            for call in (model, partial(model.loss, ids)):
                with refuses(TypeError, "ParallelTransformer: the mask", told):
                    call(ids, odd)
    with refuses(ValueError, "ParallelTransformer", (2, 4)):
        model(ids, torch.ones(2, 4, dtype=torch.bool, device=block.device))
    for name, error in (
        ("vocab_size", TypeError),
        ("ignore_index", TypeError),
        ("label_smoothing", TypeError),
        ("z_loss", TypeError),
        ("overwrite_logits", TypeError),
        ("reduction", ValueError),
        ("check", ValueError),
        ("backend", ValueError),
    ):
        with refuses(error, name, "x"):
            model.loss(ids, ids, **{name: "x"})
    with refuses(TypeError, "['foo', 'group']", "ignore_index"):
        model.loss(ids, ids, foo=1, group=None)
    for name, huge in (("ignore_index", 2**70), ("z_loss", 10**400)):
        with refuses(ValueError, name):
            model.loss(ids, ids, **{name: huge})


def test_masks_and_labels_are_refused_before_any_collective(workers, tp):
    workers.run(check_masks_are_refused_first, tp)


def check_mesh_without_names(ctx):
    halves = [DeviceMesh(ctx.device.type, [first, first + 1]) for first in range(0, ctx.world, 2)]
    with refuses(ValueError, 1, 2, ctx.world, "mesh_dim_names"):
        ParallelAttention(16, 4, 1, mesh=halves[ctx.rank // 2], device=ctx.device)


def test_heads_shared_by_some_ranks_need_a_mesh_with_names(workers):
    if workers.world < 4:
        pytest.skip("needs two meshes")
    workers.run(check_mesh_without_names)


def check_all_ranks_without_names(ctx, seed):
    """As transformers makes it: what torch calls a mesh's dimensions changes nothing."""
    results = []
    for names in (None, ("tp",)):
        mesh = init_device_mesh(ctx.device.type, (ctx.world,), mesh_dim_names=names)
        torch.manual_seed(seed)
        with mock.patch.dict("tpfused.group._REPLICA_MESHES", clear=True):  # of one process group, both
            layer = ParallelAttention(16, 4, 1, mesh=mesh, device=ctx.device)
        layer(torch.randn(5, 2, 16, device=ctx.device)).square().mean().backward()
        norm = clip_grad_norm_(layer.parameters(), 0.1)
        torch.optim.SGD(layer.parameters(), 1.0).step()
        results.append([norm, *(param.full_tensor() for param in layer.parameters())])
        assert {param.device_mesh.ndim for param in layer.parameters()} == {1, 2}
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_heads_shared_on_a_mesh_without_names(workers, seed):
    if workers.world == 1:
        pytest.skip("one rank shares no heads")
    workers.run(check_all_ranks_without_names, seed)


def test_meta_tensors_pass_through():
    alone = {"group": TPGroup(None, 0, 1), "device": "meta"}
    out = RowParallelLinear(6, 4, **alone)(ColumnParallelLinear(4, 6, **alone)(torch.ones(2, 4, device="meta")))
    assert out.is_meta and out.shape == (2, 4)


def test_one_process_pickles_and_copies():
    layer = ColumnParallelLinear(4, 6, group=TPGroup(None, 0, 1))
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other.weight, layer.weight)


def test_masks_that_become_infinite_in_half_precision():
    attention = ParallelAttention(8, 2, group=TPGroup(None, 0, 1), dtype=torch.float16)
    nn.init.zeros_(attention.out.bias)
    mask = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min)
    assert torch.equal(attention(torch.ones(3, 1, 8, dtype=torch.float16), mask), torch.zeros(3, 1, 8).half())


@pytest.mark.parametrize("sequence_dim", [None, 0.0, "0"])
def test_a_sequence_dim_that_is_no_integer_is_refused(sequence_dim):
    with pytest.raises(TypeError, match="sequence_dim"):
        ColumnParallelLinear(4, 6, sequence_parallel=True, sequence_dim=sequence_dim, group=TPGroup(None, 0, 1))


def test_unchecked_labels_outside_the_vocabulary_give_nan():
    logits, target = torch.randn(3, 8), torch.tensor([1, 99, -100])
    loss = vocab_parallel_cross_entropy(logits, target, check="off", reduction="none", group=TPGroup(None, 0, 1))
    assert loss.isnan().tolist() == [False, True, False] and loss[2] == 0


def check_unsure_ids(ctx, tp):
    """What a GPU does, where bad ids are known too late to raise: their rows are NaN, and gradients still flow."""
    block = Block(ctx, tp, "group", 0)
    ids = torch.tensor([[0, 9], [1, 2], [-1, 6]], device=block.device)
    expected = torch.tensor([[False, True], [False, False], [True, False]], device=block.device)
    for sequence_dim in (None, 0, 1):
        options = {} if sequence_dim is None else {"sequence_parallel": True, "sequence_dim": sequence_dim}
        layer = VocabParallelEmbedding(7, 4, device=block.device, **options, **block.place)
        layer._id_check = lambda ids, *arguments: (ids, True)
        out = layer(ids)
        assert torch.equal(out.isnan().all(-1), block.own(expected, sequence_dim))
        assert torch.equal(out.isnan().any(-1), block.own(expected, sequence_dim))
        out.nan_to_num(0.0).sum().backward()
        assert layer.weight.grad.isfinite().all()


def test_rows_of_unsure_ids_are_nan(workers, tp):
    workers.run(check_unsure_ids, tp)


def check_odd_inputs(ctx, tp):
    """Tensors that are sparse, nested or of 8 bits, and of autocast's other dtypes."""
    block = Block(ctx, tp, "group", 0)
    place = {"device": ctx.device, **block.place}
    x = torch.ones(2, 1, 8, device=ctx.device)
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], device=ctx.device)
    layers = [ColumnParallelLinear(8, 8, **place), RowParallelLinear(8 * tp, 8, **place), Norm("rmsnorm", 8, **place)]
    for autocasts in (False, True):
        with torch.autocast(ctx.device.type, torch.bfloat16, enabled=autocasts):
            for layer in (*layers, ParallelMLP(8, 8, **place)):
                for odd, told in (
                    (x.to_sparse(), "sparse_coo"),
                    (nested, "nested"),
                    (x.to(torch.float8_e4m3fn), "float8"),
                ):
                    with refuses(TypeError, told):
                        layer(odd)
    ids = torch.zeros(2, 2, dtype=torch.int64, device=ctx.device)
    with refuses(TypeError, "sparse_coo", "token ids"):
        VocabParallelEmbedding(8, 8, **place)(ids.to_sparse())
    with refuses(TypeError, "sparse_coo", "logits"):
        vocab_parallel_cross_entropy(torch.ones(2, 2, 4, device=ctx.device).to_sparse(), ids, group=block.group)
    for dtype in (torch.float8_e4m3fn, torch.int32):
        for kind in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
            with refuses(TypeError, "dtype must be", dtype):
                kind(8, 8, dtype=dtype, **place)


def test_sparse_nested_and_8_bit_inputs_are_refused(workers, tp):
    workers.run(check_odd_inputs, tp)


def check_bias(ctx, tp, backend):
    """Of another dtype or size than the weight's: one error at any number of ranks, on either path."""
    block = Block(ctx, tp, "group", 0)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(4 * tp, 4 * tp, device=ctx.device, dtype=torch.bfloat16, backend=backend, **block.place)
        x = torch.ones(2, layer.weight.shape[1], device=ctx.device, dtype=torch.bfloat16)
        layer.bias.data = layer.bias.data.float()
        with refuses(TypeError, f"{kind.__name__}: the bias is", torch.float32, torch.bfloat16):
            layer(x)
        if kind is RowParallelLinear:
            norm = Norm("rmsnorm", 4 * tp, device=ctx.device, dtype=torch.bfloat16, **block.place)
            residual = torch.ones(2, 4 * tp, device=ctx.device, dtype=torch.bfloat16)
            with torch.no_grad(), refuses(TypeError, f"{kind.__name__}: the bias is", torch.float32, torch.bfloat16):
                layer(x, then=(residual, norm))
        layer.bias.data = layer.bias.data[:1].bfloat16()
        with refuses(ValueError, f"{kind.__name__}: the bias must have", (1,)):
            layer(x)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_bias_unlike_the_weight_is_refused(workers, tp, backend):
    workers.run(check_bias, tp, backend)


def check_whole_input(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    layer = RowParallelLinear(4 * tp, 3, device=ctx.device, **block.place)
    with refuses(ValueError, "input of 4 features", f"this rank's part of {4 * tp} as a column-parallel", (2, 4 * tp)):
        layer(torch.randn(2, 4 * tp, device=ctx.device))


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_all_features_where_a_ranks_part_is_wanted(workers, tp):
    workers.run(check_whole_input, tp)
