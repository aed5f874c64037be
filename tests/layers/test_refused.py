"""What layers, operations and `generate` refuse: DTensors and other odd tensors, and arguments of another type."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.compare import Block, refuses
from tests.layers.test_arguments import LAYERS, SIZES
from tpfused import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelGatedMLP,
    ParallelMLP,
    ParallelTransformer,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    all_gather_matmul,
    column_matmul,
    matmul_all_gather,
    matmul_all_reduce,
    matmul_reduce_scatter,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)
from tpfused.group import TPGroup
from tpfused.layers.norm import Norm

OPERATIONS = (all_gather_matmul, column_matmul, matmul_all_gather, matmul_all_reduce, matmul_reduce_scatter)


def check_dtensors(ctx, tp):
    told = "DTensor", "x.to_local()"
    mesh = ctx.mesh(tp)

    def whole(x):
        return DTensor.from_local(x.to(ctx.device), mesh, [Replicate()])

    for mode in ("group", "mesh"):
        block = Block(ctx, tp, mode, 0)
        options = {"device": ctx.device, **block.place}
        x = whole(torch.ones(2, 3, 8))
        for layer, sizes in (
            (ColumnParallelLinear, (8, 4)),
            (RowParallelLinear, (8 * tp, 4)),
            (ParallelMLP, (8, 4)),
            (ParallelGatedMLP, (8, 4)),
            (ParallelAttention, (8, 4)),
            (Norm, ("rmsnorm", 8)),
        ):
            made = layer(*sizes, **options)
            with refuses(TypeError, f"{layer.__name__}: the input", *told):
                made(x)
        local = x.to_local()
        attention = ParallelAttention(8, 4, **options)
        with refuses(TypeError, "the mask", *told):
            attention(local, whole(torch.ones(3, 2, dtype=torch.bool)))
        with refuses(TypeError, "the residual", *told):
            attention(local, residual=x)
        weight, bias = (torch.ones(size, device=ctx.device) for size in ((4, 8), 4))
        for operation in OPERATIONS:
            for operands, what in (
                ((x, weight), "input"),
                ((local, whole(weight)), "weight"),
                ((local, weight, whole(bias)), "bias"),
            ):
                with refuses(TypeError, f"{operation.__name__}: the {what}", *told):
                    operation(*operands, group=block.group)
        ids = torch.zeros(2, 3, dtype=torch.int64, device=ctx.device)
        with refuses(TypeError, "the token ids", *told):
            VocabParallelEmbedding(8, 4, **options)(whole(ids))
        with refuses(TypeError, "the logits", *told):
            vocab_parallel_cross_entropy(x, ids, group=block.group)
        with refuses(TypeError, "the labels", *told):
            vocab_parallel_cross_entropy(local, whole(ids), group=block.group)
        with refuses(TypeError, "the logits", *told):
            vocab_parallel_argmax(x, 8 * tp, block.group)
        with refuses(TypeError, "ids", *told):
            ParallelTransformer(TransformerConfig(**SIZES), **options).generate(whole(ids), 2)


def test_dtensors_are_refused_where_inputs_are_checked(workers, tp):
    workers.run(check_dtensors, tp)


def check_kinds_of_calls(ctx, tp):
    """What is refused does not depend on the calls before."""
    group = ctx.group(tp)
    x, weight, bias = (torch.ones(size, device=ctx.device) for size in ((2 * tp, 5), (3, 5), 3))
    nested = torch.nested.nested_tensor([torch.ones(2, 5)], device=ctx.device)
    for operation in OPERATIONS:
        for _ in range(2):
            for operands, told in (
                ((x.to_sparse(), weight), "input"),
                ((x.to_sparse_csr(), weight), "input"),
                ((nested, weight), "input"),
                ((x, weight.to_sparse()), "weight"),
                ((x, weight, bias.to_sparse()), "bias"),
                ((x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)), "16 bits"),
                (("x", weight), "the input must be a tensor, not str"),
                ((x, None), "NoneType"),
                ((x, weight, 1.0), "the bias must be a tensor, not float"),
            ):
                with refuses(TypeError, operation.__name__, told):
                    operation(*operands, group=group)
            operation(x, weight, group=group)
            operation(x, weight, bias, group=group)
    total, outputs, inputs = 2 * tp * tp, 3 * tp, 5 * tp
    for _ in range(2):
        for options in (
            {"total_len": float(total)},
            {"total_len": True},
            {"sequence_dim": 0.0},
            {"sequence_dim": False},
            {"out_features": float(outputs)},
            {"save_gathered": 0},
            {"save_gathered": "no"},
        ):
            with refuses(TypeError, next(iter(options))):
                all_gather_matmul(x, weight, group=group, **options)
        with refuses(TypeError, "out_features"):
            all_gather_matmul(x, [weight, weight], out_features=[outputs, float(outputs)], group=group)
        for operation in (matmul_all_reduce, matmul_reduce_scatter):
            with refuses(TypeError, "in_features"):
                operation(x, weight, in_features=float(inputs), group=group)
            operation(x, weight, in_features=inputs, group=group)
        given = {"total_len": total, "sequence_dim": 0, "save_gathered": False, "group": group}
        all_gather_matmul(x, weight, out_features=outputs, **given)
        all_gather_matmul(x, [weight, weight], out_features=[outputs, outputs], **given)


def test_operations_refuse_the_same_after_calls_that_were_right(workers, tp):
    workers.run(check_kinds_of_calls, tp)


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_integers_must_be_integers(value):
    alone = {"group": TPGroup(None, 0, 1)}
    for name in ("column", "row", "mlp", "gated", "attention", "embedding"):
        with refuses(TypeError, "sequence_dim", repr(value)):
            LAYERS[name](sequence_dim=value, **alone)
    with refuses(TypeError, "padding_idx", repr(value)):
        VocabParallelEmbedding(8, 4, value, **alone)
    column = LAYERS["column"](sequence_parallel=True, **alone)
    with refuses(TypeError, "total_len", repr(value)):
        column(torch.ones(1, 4), total_len=value)
    with refuses(TypeError, "out_features", repr(value)):
        column_matmul(torch.ones(1, 4), torch.ones(1, 4), out_features=value, **alone)


def test_numpys_integers_are_integers():
    """Sizes often come from an array's; layers keep Python's own."""
    numpy = pytest.importorskip("numpy")
    three, four, eight = (numpy.int64(n) for n in (3, 4, 8))
    alone = {"group": TPGroup(None, 0, 1)}
    for layer in (
        ColumnParallelLinear(four, eight, **alone),
        RowParallelLinear(four, eight, **alone),
        ParallelMLP(four, eight, **alone),
        ParallelGatedMLP(four, eight, **alone),
        ParallelAttention(eight, four, **alone),
        VocabParallelEmbedding(eight, four, three, **alone),
    ):
        for module in layer.modules():
            numbers = {name: value for name, value in vars(module).items() if isinstance(value, numpy.generic)}
            assert not numbers
    ParallelTransformer(TransformerConfig(**{name: numpy.int64(size) for name, size in SIZES.items()}), **alone)
    for odd in (numpy.True_, numpy.float32(4), torch.tensor(4)):
        with refuses(TypeError, "in_features must be an integer", repr(odd)):
            ColumnParallelLinear(odd, 8, **alone)


def test_masks_are_named_with_their_dtype():
    attention = ParallelAttention(8, 4, group=TPGroup(None, 0, 1))
    with refuses(ValueError, "torch.float32", (3, 2), "boolean"):
        attention(torch.ones(2, 3, 8), torch.ones(3, 2))


def test_what_generate_draws_by_must_be_numbers():
    model = ParallelTransformer(TransformerConfig(**SIZES), group=TPGroup(None, 0, 1))
    ids = torch.zeros(1, 2, dtype=torch.int64)
    for odd in ("a", True, torch.tensor(0.5), [0.5]):
        with refuses(TypeError, "temperature must be a number", repr(odd)):
            model.generate(ids, 2, temperature=odd)
        with refuses(TypeError, "top_p must be a number", repr(odd)):
            model.generate(ids, 2, temperature=1.0, top_p=odd)
