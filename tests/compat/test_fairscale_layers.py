"""fairscale's layers against dense ones of its initialisation."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import init

from tests.compare import assert_close, refuses
from tests.compat.fairscale_groups import float64_on, model_parallel, own
from tpfused.checks import AssertedError
from tpfused.compat import fairscale as compat
from tpfused.compat.fairscale import layers, mappings, utils
from tpfused.placement import gather_whole, splits
from tpfused.sharding import shard_range


def dense_and_parallel(kind, dense_kind, seed, *sizes, **options):
    """The dense layer with fairscale's initialisation, and the parallel one, from one seed."""
    dense = dense_kind(*sizes, **({"padding_idx": options["padding_idx"]} if "padding_idx" in options else {}))
    torch.manual_seed(seed)
    with torch.no_grad():
        init.xavier_normal_(dense.weight)
        if getattr(dense, "bias", None) is not None:
            dense.bias.zero_()
    torch.manual_seed(seed)
    return dense, kind(*sizes, **options)


def check_linear(ctx, tp, seed):
    with model_parallel(tp), float64_on(ctx.device):
        for kind, dim, flag in (
            (layers.ColumnParallelLinear, 0, "gather_output"),
            (layers.RowParallelLinear, 1, "input_is_parallel"),
        ):
            for options in ({}, {flag: False}, {flag: True}, {"keep_master_weight_for_test": True}):
                dense, layer = dense_and_parallel(kind, nn.Linear, seed, 8, 12, **options)
                assert list(layer.state_dict()) == ["weight", "bias"]
                assert torch.equal(layer.weight, own(dense.weight, dim))
                assert torch.equal(layer.get_master_weight(), dense.weight)
                kept = layer.master_weight
                assert torch.equal(kept, dense.weight) if len(options) and flag not in options else kept is None
                with torch.no_grad():
                    dense.bias.normal_()
                    layer.bias.copy_(own(dense.bias, 0) if dim == 0 else dense.bias)
                x = torch.randn(3, 2, 8)
                grad = torch.randn(3, 2, 12)
                split_in = dim == 1 and options.get(flag, False)
                split_out = dim == 0 and not options.get(flag, True)
                xs = x.clone().requires_grad_()
                out = layer(own(xs, -1) if split_in else xs)
                x.requires_grad_()
                expected = dense(x)
                assert_close(out, own(expected, -1) if split_out else expected)
                expected.backward(grad)
                out.backward(own(grad, -1) if split_out else grad)
                assert_close(layer.weight.grad, own(dense.weight.grad, dim))
                assert_close(layer.bias.grad, own(dense.bias.grad, 0) if dim == 0 else dense.bias.grad)
                assert_close(own(xs.grad, -1) if split_in else xs.grad, own(x.grad, -1) if split_in else x.grad)


def test_linear_layers(workers, tp, seed):
    workers.run(check_linear, tp, seed)


def check_embedding(ctx, tp, seed):
    with model_parallel(tp), float64_on(ctx.device):
        for kind, dim in ((layers.VocabParallelEmbedding, 0), (layers.ParallelEmbedding, 1)):
            for padding in ({}, {"padding_idx": 5}, {"padding_idx": -1}):
                dense, layer = dense_and_parallel(kind, nn.Embedding, seed, 12, 8, **padding)
                assert list(layer.state_dict()) == ["weight"]
                assert torch.equal(layer.weight, own(dense.weight, dim))
                assert torch.equal(gather_whole(layer.weight.detach(), splits(layer.weight)), dense.weight)
                ids = torch.cat([torch.arange(12), torch.randint(12, (8,))]).view(4, 5)
                grad = torch.randn(4, 5, 8)
                out, expected = layer(ids), dense(ids)
                assert_close(out, expected)
                out.backward(grad)
                expected.backward(grad)
                assert_close(layer.weight.grad, own(dense.weight.grad, dim))
        table = layers.VocabParallelEmbedding(12, 8)
        assert (table.vocab_start_index, table.vocab_end_index) == shard_range(12, tp, ctx.rank % tp)
        out = table(torch.tensor([-1, 3, 12]))
        assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).all()


def test_embeddings(workers, tp, seed):
    workers.run(check_embedding, tp, seed)


def check_refusals(ctx, tp):
    column, row = layers.ColumnParallelLinear, layers.RowParallelLinear
    vocabulary, hidden = layers.VocabParallelEmbedding, layers.ParallelEmbedding
    with model_parallel(tp), ctx.device:
        for make, *told in (
            (lambda: column(4, 8, stride=2), "stride", 2),
            (lambda: row(8, 4, stride=2), "stride", 2),
            (lambda: vocabulary(8, 4, max_norm=1.5), "max_norm", 1.5),
            (lambda: vocabulary(8, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
            (lambda: hidden(8, 4, sparse=True), "sparse"),
            (lambda: vocabulary(8, 4, padding_idx=8), "padding_idx", 8),
            (lambda: hidden(8, 4, padding_idx=-9), "padding_idx", -9),
        ):
            with refuses(ValueError, *told):
                make()
        for make, *told in (
            (lambda: column(4, "6"), "out_features", "'6'"),
            (lambda: row("4", 6), "in_features", "'4'"),
            (lambda: vocabulary("4", 6), "num_embeddings", "'4'"),
            (lambda: hidden(4, "6"), "embedding_dim", "'6'"),
            (lambda: vocabulary(4, 6, padding_idx="1"), "padding_idx", "'1'"),
            (lambda: hidden(4, 8, padding_idx="1"), "padding_idx", "'1'"),
        ):
            with refuses(TypeError, *told):
                make()
        with refuses(ValueError, "stride must be 1, not '1'"):
            column(4, 8, stride="1")
        for name in ("scatter_to_model_parallel_region", "gather_from_model_parallel_region"):
            with refuses(ValueError, name, "no dimensions"):
                getattr(mappings, name)(torch.tensor(1.0))
            with refuses(TypeError, name, "list"):
                getattr(mappings, name)([1.0])
        with refuses(AssertedError, 7, 2):
            utils.ensure_divisibility(7, 2)
        for name in ("copy_to_model_parallel_region", "reduce_from_model_parallel_region"):
            for odd in (3, None, [1.0]):
                with refuses(TypeError, name, type(odd).__name__):
                    getattr(mappings, name)(odd)
            with refuses(TypeError, name, "sparse"):
                getattr(mappings, name)(torch.ones(2, 2).to_sparse())
        for odd, told in ((torch.ones(2), "float32"), ([1], "list"), (torch.tensor([1]).to_sparse(), "sparse")):
            with refuses(TypeError, "token ids", told):
                hidden(8, 4)(odd)
        with refuses(TypeError, "split_tensor_along_last_dim", "list"):
            utils.split_tensor_along_last_dim([1.0], 1)
        with refuses(TypeError, "contiguous_split_chunks must be True or False", "'no'"):
            utils.split_tensor_along_last_dim(torch.ones(2), 1, "no")
        logits = torch.zeros(2, 8 // tp)
        with refuses(ValueError, (2,), (3,)):
            compat.vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
        if tp == 1:
            return
        for make, *told in (
            (lambda: column(4, 9), "out_features", 9),
            (lambda: row(9, 4), "in_features", 9),
            (lambda: vocabulary(9, 4), "num_embeddings", 9),
            (lambda: hidden(4, 9), "embedding_dim", 9),
            (lambda: mappings.scatter_to_model_parallel_region(torch.zeros(2, 9)), 9, tp),
        ):
            with refuses(AssertedError, *told):
                make()
        if ctx.device.type == "cpu":
            with refuses(ValueError, 8):
                compat.vocab_parallel_cross_entropy(logits, torch.tensor([8, 0]))


def test_what_would_change_results_is_refused(workers, tp):
    workers.run(check_refusals, tp)


def new_tensor(weight):
    return torch.nn.init.normal_(torch.empty_like(weight))


def check_init_methods(ctx, tp):
    """One that returns a new tensor leaves the weight as it was, uninitialised."""
    with model_parallel(tp), ctx.device:
        makers = [
            lambda init_method, kind=kind: kind(8, 4, init_method=init_method)
            for kind in (layers.ColumnParallelLinear, layers.VocabParallelEmbedding, layers.ParallelEmbedding)
        ]
        shard = torch.empty(8 // tp, 4)
        makers.append(lambda init_method: layers._initialize_affine_weight(shard, 8, 4, 8 // tp, 0, init_method))
        for make in makers:
            with refuses(ValueError, "new_tensor returned a new tensor"):
                make(new_tensor)
            with refuses(TypeError, "init_method", "'normal'"):
                make("normal")


def test_an_init_method_that_fills_nothing_is_refused(workers, tp):
    workers.run(check_init_methods, tp)


def check_weights_of_the_programs_own(ctx, tp, seed):
    """Programs read, replace and load `weight` as they like; the layer computes with what is there."""
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        for kind, dim in ((layers.ColumnParallelLinear, 0), (layers.RowParallelLinear, 1)):
            whole, x = torch.randn(12, 8), torch.randn(3, 8)
            expected = F.linear(x, whole)
            layer = kind(8, 12, bias=False, init_method=lambda weight: weight)
            mine = own(whole, dim).contiguous()
            layer.weight = nn.Parameter(mine, requires_grad=False)
            assert_close(layer(x), expected)
            assert torch.equal(layer.get_master_weight(), whole)
            layer.weight.data = 2 * mine
            assert_close(layer(x), 2 * expected)
            for assign in (False, True):
                layer.load_state_dict({"weight": (3 + assign) * mine}, strict=True, assign=assign)
                assert_close(layer(x), (3 + assign) * expected)
            assert_close(copy.deepcopy(layer)(x), 4 * expected)
            torch.testing.assert_close(layer.float()(x.float()), 4 * expected.float(), rtol=1e-5, atol=1e-5)
            del layer.weight
            layer.weight = mine
            assert_close(layer(x), expected)
            assert torch.equal(layer.get_master_weight(), whole)
            if kind is layers.RowParallelLinear:
                partial = F.linear(own(x, -1), layer.weight)
                assert_close(mappings.reduce_from_model_parallel_region(partial), expected)


def test_a_program_may_replace_weights(workers, tp, seed):
    workers.run(check_weights_of_the_programs_own, tp, seed)


def check_other_sizes(ctx, tp, seed):
    """Sizes are those of the weights that are there; the layer stays what it was."""
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        whole, x = torch.randn(20, 8), torch.randn(3, 8)
        column = layers.ColumnParallelLinear(8, 12, bias=False)
        column.weight = nn.Parameter(own(whole, 0).clone())
        assert_close(column(x), F.linear(x, whole))
        row = layers.RowParallelLinear(12, 8, bias=False)
        row.weight = nn.Parameter(own(whole.t(), 1).clone())
        assert_close(row(F.linear(x, whole)), F.linear(F.linear(x, whole), whole.t()))
        assert torch.equal(row.get_master_weight(), whole.t())
        table = layers.ParallelEmbedding(20, 12)
        table.weight = nn.Parameter(own(whole, 1).clone())
        ids = torch.randint(20, (3,))
        assert torch.equal(table(ids), whole[ids])
        assert (column.out_features, row.in_features, table.embedding_dim) == (12, 12, 12)


def test_a_weight_of_another_size(workers, tp, seed):
    workers.run(check_other_sizes, tp, seed)


def check_layers_of_the_programs_own(ctx, tp, seed):
    """Programs derive layers that make all they need themselves, by the function that fairscale's layers call."""
    with model_parallel(tp), float64_on(ctx.device):

        class Own(layers.ColumnParallelLinear):
            def __init__(self, in_features, out_features, dim, keep):
                nn.Module.__init__(self)
                self.in_features, self.out_features = in_features, out_features
                shape = [in_features, out_features // tp] if dim else [out_features // tp, in_features]
                self.weight = nn.Parameter(torch.empty(shape))
                self.register_parameter("bias", None)
                whole = (in_features, out_features) if dim else (out_features, in_features)
                self.master_weight = layers._initialize_affine_weight(
                    self.weight, *whole, out_features // tp, dim, init.xavier_normal_, return_master_weight=keep
                )

            def forward(self, x):
                return F.linear(mappings.copy_to_model_parallel_region(x), self.weight)

        for dim, keep in ((0, True), (1, False)):
            torch.manual_seed(seed)
            whole = init.xavier_normal_(torch.empty([8, 12] if dim else [12, 8]))
            after = torch.rand(1)
            torch.manual_seed(seed)
            layer = Own(8, 12, dim, keep)
            assert torch.equal(torch.rand(1), after)
            assert torch.equal(layer.weight, own(whole, dim)) and layer.weight.requires_grad
            assert torch.equal(layer.master_weight, whole) if keep else layer.master_weight is None
        torch.manual_seed(seed)
        layer = copy.deepcopy(Own(8, 12, 0, False)).double()
        assert str(tp) in repr(layer)
        whole = layer.get_master_weight()
        x = torch.randn(3, 8, requires_grad=True)
        grad = torch.randn(3, 12)
        layer(x).backward(own(grad, -1))
        assert_close(x.grad, grad @ whole)
        with refuses(ValueError, "stride", 2):
            layers._initialize_affine_weight(layer.weight, 12, 8, 12 // tp, 0, init.zeros_, stride=2)


def test_a_program_may_derive_layers(workers, tp, seed):
    workers.run(check_layers_of_the_programs_own, tp, seed)


def check_forwards_that_are_inherited(ctx, tp, seed):
    """A program's layer sets what fairscale's forward reads, and no more; it may name the input."""
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        whole, bias, x, ids = torch.randn(12, 8), torch.randn(12), torch.randn(3, 8), torch.randint(12, (3, 2))

        def derived(kind, dim, **settings):
            class Own(kind):
                def __init__(self):
                    nn.Module.__init__(self)
                    vars(self).update(settings)
                    self.weight = nn.Parameter(own(whole, dim).clone())
                    if "gather_output" in settings or "input_is_parallel" in settings:
                        self.bias = nn.Parameter(own(bias, 0).clone() if dim == 0 else bias.clone())

            return Own()

        sizes = {"in_features": 8, "out_features": 12}
        table = {"num_embeddings": 12, "embedding_dim": 8, "padding_idx": None}
        for layer, given, expected in (
            (derived(layers.ColumnParallelLinear, 0, gather_output=True, **sizes), x, F.linear(x, whole, bias)),
            (derived(layers.RowParallelLinear, 1, input_is_parallel=False, **sizes), x, F.linear(x, whole, bias)),
            (derived(layers.VocabParallelEmbedding, 0, **table), ids, whole[ids]),
            (derived(layers.ParallelEmbedding, 1, **table), ids, whole[ids]),
        ):
            assert_close(layer(given), expected)
            assert_close(layer(input_=given), expected)
            layer(given).sum().backward()
            assert all(param.grad is not None for param in layer.parameters())
            assert getattr(layer, "_weight", None) is None and hasattr(layer, "_weight") == (
                "padding_idx" in vars(layer)
            )


def test_inherited_forwards(workers, tp, seed):
    workers.run(check_forwards_that_are_inherited, tp, seed)


def check_defaults(ctx, tp):
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    kinds += (layers.VocabParallelEmbedding, layers.ParallelEmbedding)
    with model_parallel(tp):
        torch.set_default_dtype(torch.bfloat16)
        try:
            for device in (ctx.device, torch.device("meta")):
                torch.set_default_device(device)
                for kind in kinds:
                    for param in kind(8, 8).parameters():
                        assert (param.dtype, param.device.type) == (torch.bfloat16, device.type)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)


def test_default_dtype_and_device_are_honoured(workers, tp):
    workers.run(check_defaults, tp)
