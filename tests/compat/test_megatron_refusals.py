"""What Megatron-LM's layers refuse here: switches, sizes and options that are not supported."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.compare import Block, refuses
from tests.compat.test_megatron import config_of, make
from tpfused.checks import AssertedError
from tpfused.compat import megatron
from tpfused.compat.megatron import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def check_refusals(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    for option in (
        {"is_expert": True},
        {"embedding_activation_buffer": []},
        {"grad_output_buffer": []},
        {"output_dtype": torch.float16},
        {"pg_collection": SimpleNamespace(gtp_remat=SimpleNamespace(size=lambda: 2))},
    ):
        ((name, value),) = option.items()
        with refuses(ValueError, name, "gtp_remat of 2 ranks" if name == "pg_collection" else value):
            make(ColumnParallelLinear, block, 8, 16, **option)
    make(ColumnParallelLinear, block, 8, 16, output_dtype=torch.float64, pg_collection=SimpleNamespace())
    for switch in ("disable_grad_reduce", "skip_weight_param_allocation", "gather_output"):
        with refuses(TypeError, switch, "'no'"):
            make(ColumnParallelLinear, block, 8, 16, **{switch: "no"})
    for switch in ("perform_initialization", "use_cpu_initialization", "gradient_accumulation_fusion"):
        with refuses(TypeError, f"config.{switch}", "'no'"):
            VocabParallelEmbedding(16, 8, init_method=None, config=config_of(block, **{switch: "no"}))
    with refuses(TypeError, "keep_master_weight_for_test", "'no'"):
        make(RowParallelLinear, block, 8, 16, keep_master_weight_for_test="no")
    with refuses(TypeError, "reduce_scatter_embeddings", "'no'"):
        make(VocabParallelEmbedding, block, 16, 8, reduce_scatter_embeddings="no")
    column, x = make(ColumnParallelLinear, block, 8, 16), block.randn(2, 1, 8)
    with refuses(TypeError, "runtime_gather_output", "'no'"):
        column(x, runtime_gather_output="no")
    for switch in ("gather_output", "sequence_parallel", "disable_grad_reduce"):
        column, row = make(ColumnParallelLinear, block, 8, 16), make(RowParallelLinear, block, 8 * tp, 16)
        for layer in (column, row) if switch == "sequence_parallel" else (column,):
            setattr(layer, switch, "no")
            with refuses(TypeError, switch, "'no'"):
                layer(x)
    for size, error, *told in ((2, ValueError, "gtp_weight_remat_size 2"), ("2", TypeError, "remat_size", "'2'")):
        with refuses(error, *told):
            VocabParallelEmbedding(16, 8, init_method=None, config=config_of(block, gtp_weight_remat_size=size))
    VocabParallelEmbedding(16, 8, init_method=None, config=config_of(block, gtp_weight_remat_size=None))
    with refuses(TypeError, "pg_collection.gtp_remat must be a process group, not 2"):
        make(ColumnParallelLinear, block, 8, 16, pg_collection=SimpleNamespace(gtp_remat=2))

    def new_tensor(weight):
        return torch.randn_like(weight)

    for kind in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        with refuses(ValueError, "new_tensor returned a new tensor"):
            make(kind, block, 8, 16, init=new_tensor)
        with refuses(TypeError, "init_method", "'normal'"):
            make(kind, block, 8, 16, init="normal")
    with refuses(ValueError, "new_tensor returned a new tensor"):
        make(ColumnParallelLinear, block, 8, 16, init=new_tensor, stride=2)
    for wrong in (None, {"sequence_parallel": True}, 3, [], torch.zeros(1)):
        with refuses(TypeError, "config", type(wrong).__name__):
            ColumnParallelLinear(8, 16, config=wrong, init_method=None)
    with refuses(ValueError, "is_expert True"):
        make(RowParallelLinear, block, 8, 16, is_expert=True)
    with refuses(TypeError, "stride", "'1'"):
        make(ColumnParallelLinear, block, 8, 16, stride="1")
    headless = make(ColumnParallelLinear, block, 8, 16, skip_weight_param_allocation=True)
    with refuses(ValueError, (16 // tp, 8)):
        headless(block.randn(4, 2, 8))
    with refuses(ValueError, (16 // tp, 8), (3, 8)):
        headless(block.randn(4, 2, 8), weight=block.randn(3, 8))
    with refuses(TypeError, "ColumnParallelLinear: the weight", "list"):
        headless(block.randn(4, 2, 8), weight=[1.0])
    with refuses(TypeError, "VocabParallelEmbedding: the ids", "list"):
        make(VocabParallelEmbedding, block, 16, 8, reduce_scatter_embeddings=True)([[1]])
    for name in ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"):
        for odd in (3, None, [1.0]):
            with refuses(TypeError, name, type(odd).__name__):
                getattr(megatron, name)(odd, group=block.group)
    for name in (
        "scatter_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "all_gather_last_dim_from_tensor_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region",
    ):
        with refuses(ValueError, name, "no dimensions"):
            getattr(megatron, name)(block.randn(), group=block.group)
        with refuses(TypeError, name, "list"):
            getattr(megatron, name)([1.0], group=block.group)
    with refuses(TypeError, "tensor_parallel_output_grad must be True or False", "'no'"):
        megatron.gather_from_sequence_parallel_region(block.randn(2), "no", block.group)
    if tp == 1:
        return
    for kind, sizes, told in (
        (ColumnParallelLinear, (8, tp + 1), "output_size"),
        (RowParallelLinear, (tp + 1, 8), "input_size"),
        (VocabParallelEmbedding, (tp + 1, 8), "num_embeddings"),
    ):
        with refuses(AssertedError, told, tp + 1, tp):
            make(kind, block, *sizes)
    with refuses(AssertedError, "output_size", tp, "stride of 2"):
        make(ColumnParallelLinear, block, 8, tp, stride=2)
    row = make(RowParallelLinear, block, 8, 8, sequence_parallel=True)
    with refuses(AssertedError, tp + 1, tp):
        row(block.randn(tp + 1, 2, 8 // tp))
    embedding = make(VocabParallelEmbedding, block, 16, 8, reduce_scatter_embeddings=True)
    with refuses(AssertedError, tp + 1, tp):
        embedding(torch.zeros(2, tp + 1, dtype=torch.int64, device=block.device))
    with refuses(ValueError, (4,)):
        embedding(torch.zeros(4, dtype=torch.int64, device=block.device))
    x = block.randn(tp + 1, 2, tp + 1)
    for name in (
        "scatter_to_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region",
    ):
        with refuses(AssertedError, name, tp + 1, tp):
            getattr(megatron, name)(x, group=block.group)
    with refuses(ValueError, "output_split_sizes"):
        megatron.gather_from_sequence_parallel_region(x, group=block.group, output_split_sizes=[1, 2])
    with refuses(ValueError, "input_split_sizes"):
        megatron.reduce_scatter_to_sequence_parallel_region(x, group=block.group, input_split_sizes=[1, 2])


def test_what_is_refused(workers, tp, seed):
    workers.run(check_refusals, tp, seed)


def check_main_grads(ctx, tp):
    """One of 16 bits, which autograd would otherwise add to, is to fit as one of float32."""
    block = Block(ctx, tp, "group", 0)
    for dtype in (torch.bfloat16, torch.float32):
        for kind, given in ((ColumnParallelLinear, False), (ColumnParallelLinear, True), (RowParallelLinear, False)):
            layer = make(kind, block, 8, 8 * tp, fused=True).to(torch.bfloat16)
            weight = nn.Parameter(layer.weight.detach().clone()) if given else layer.weight
            options = {"dtype": dtype, "device": block.device}
            for main_grad, error, told in (
                (torch.zeros(1, weight.shape[1], **options), ValueError, (1, weight.shape[1])),
                (torch.zeros(3, *weight.shape, **options), ValueError, (3, *weight.shape)),
                (torch.zeros(weight.shape[::-1], **options).t(), ValueError, "contiguous"),
                (torch.zeros(weight.shape, dtype=dtype, device="meta"), ValueError, "meta"),
                (torch.zeros(weight.shape, **options).to_sparse(), TypeError, "sparse"),
                (torch.zeros(weight.shape, **options).half(), TypeError, "float32 or the weight's torch.bfloat16"),
            ):
                weight.main_grad = main_grad
                x = torch.ones(2, 1, 8 // tp if kind is RowParallelLinear else 8, dtype=torch.bfloat16)
                with refuses(error, f"{kind.__name__}.weight", "main_grad", told):
                    layer(x.to(block.device), **({"weight": weight} if given else {}))


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_a_main_grad_that_does_not_fit_is_refused(workers, tp):
    workers.run(check_main_grads, tp)


def check_parametrized(ctx, tp):
    """Of one rank: of several, any parametrized shard is refused."""
    layer = make(ColumnParallelLinear, Block(ctx, tp, "group", 0), 8, 8, fused=True)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with refuses(ValueError, "ColumnParallelLinear.weight", "gradient_accumulation_fusion"):
        layer(torch.ones(2, 1, 8, device=ctx.device))


@pytest.mark.parametrize("tp", [1], indirect=True)
def test_parametrized_weights_with_main_grads_are_refused(workers, tp):
    workers.run(check_parametrized, tp)
