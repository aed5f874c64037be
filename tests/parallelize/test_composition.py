"""Tensor parallelism with torch's other parallelisms and ways to train: the dense model's losses and gradient norms.

Two ranks split the model, unless said otherwise; the others see other data.
"""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import tpfused
from tests.parallelize.training import (
    MODELS,
    OWN,
    PARALLELIZED,
    STEPS,
    TOLERANCE,
    assert_same,
    backward,
    batches,
    blocks,
    dense_losses,
    laid_out,
    train,
)
from tpfused import ColumnParallelLinear, RowParallelLinear


@pytest.fixture(autouse=True)
def two_ranks(workers):
    if workers.world < 2:
        pytest.skip("needs 2 ranks")


def check_data_parallel(ctx, seed, name, how, accumulate):
    module, dp = laid_out(ctx, name, seed, how)
    found = train(module, backward(module, dp, accumulate=accumulate), batches(seed, ctx.device))
    assert_same(found, dense_losses(ctx, name, seed), TOLERANCE[name])


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2(workers, seed, name):
    """Over two micro-batches; over one with torch's norms, below."""
    workers.run(check_data_parallel, seed, name, "fsdp2", 2)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OWN)
def test_ddp(workers, seed, name, accumulate):
    workers.run(check_data_parallel, seed, name, "ddp", accumulate)


@pytest.mark.parametrize("name", [PARALLELIZED[1], "own-llama"])
def test_replicas_with_dtensors(workers, seed, name):
    """What DDP does for plain parameters: FSDP2 over a (replicas, 1) mesh."""
    workers.run(check_data_parallel, seed, name, "hsdp", 2)


def check_ddp_on_a_mesh(ctx, seed, name):
    module, _ = laid_out(ctx, name, seed, "tp")
    ddp = DistributedDataParallel(module, device_mesh=ctx.grid(2)["dp"])
    with pytest.raises(ValueError, match=r"VocabParallelEmbedding.weight.*device_mesh=.*process_group="):
        ddp(next(batches(seed, ctx.device)))


@pytest.mark.parametrize("name", [PARALLELIZED[0], "own-llama"])
def test_ddps_own_handling_of_dtensors_is_refused(workers, seed, name):
    workers.run(check_ddp_on_a_mesh, seed, name)


def check_checkpointing(ctx, seed, name, how):
    calls = []

    def recompute(module):
        if name in OWN:
            module.model.config = dataclasses.replace(module.model.config, checkpoint_activations=True)
        else:
            module.model.gradient_checkpointing_enable()
        blocks(module)[0].mlp.register_forward_pre_hook(lambda mlp, args: calls.append(1))

    module, dp = laid_out(ctx, name, seed, how, prepare=recompute)
    found = train(module, backward(module, dp), batches(seed, ctx.device))
    assert_same(found, dense_losses(ctx, name, seed), TOLERANCE[name])
    assert len(calls) == 2 * STEPS


@pytest.mark.parametrize(
    "name, how", [*[pytest.param(*p.values, "fsdp2", marks=p.marks) for p in PARALLELIZED], *[(n, "ddp") for n in OWN]]
)
def test_activation_checkpointing(workers, seed, name, how):
    workers.run(check_checkpointing, seed, name, how)


def check_compiled(ctx, seed, name, how):
    torch.compiler.reset()
    options = {"backend": "aot_eager", "fullgraph": True}
    if how == "whole":
        module, dp = laid_out(ctx, name, seed, "tp")
        step = backward(torch.compile(module, **options))
    else:
        module, dp = laid_out(ctx, name, seed, how, prepare=lambda m: [b.compile(**options) for b in blocks(m)])
        step = backward(module, dp)
    assert_same(train(module, step, batches(seed, ctx.device)), dense_losses(ctx, name, seed), TOLERANCE[name])


@pytest.mark.parametrize(
    "name, how", [("own-llama", "whole"), pytest.param(*PARALLELIZED[1].values, "fsdp2", marks=PARALLELIZED[1].marks)]
)
def test_compile(workers, seed, name, how):
    workers.run(check_compiled, seed, name, how)


def check_bfloat16(ctx, seed, name, how):
    """Under autocast, and by FSDP2's policy, the layers compute in bfloat16; parameters are float32."""
    dtypes = set()

    def note(module):
        for layer in module.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.register_forward_hook(lambda layer, args, out: dtypes.add(out.dtype))

    expected = dense_losses(ctx, name, seed, bfloat16=True)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if how == "fsdp2" else {}
    module, dp = laid_out(ctx, name, seed, how, dtype=torch.float32, prepare=note, **policy)
    found = train(module, backward(module, dp, autocast=how != "fsdp2"), batches(seed, ctx.device))
    assert_same(found, expected, 2e-2)
    assert dtypes == {torch.bfloat16} and {param.dtype for param in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", MODELS)
def test_autocast(workers, seed, name):
    workers.run(check_bfloat16, seed, name, "tp")


@pytest.mark.parametrize("name", [PARALLELIZED[0], "own-gpt"])
def test_mixed_precision_of_fsdp2(workers, seed, name):
    workers.run(check_bfloat16, seed, name, "fsdp2")


def check_torchs_own(ctx, seed, name, tp):
    """Two key-value heads on four ranks are DTensors on a mesh of their own, which torch's norm cannot take together
    with others.
    """
    clip = tpfused.clip_grad_norm_ if tp == 4 and "llama" in name else nn.utils.clip_grad_norm_
    expected = dense_losses(ctx, name, seed)
    for how, options in [("tp", {"fused": True}), ("fsdp2", {"foreach": True})][: 1 if tp == 4 else 2]:
        module, dp = laid_out(ctx, name, seed, how, tp=tp)
        found = train(module, backward(module, dp), batches(seed, ctx.device), clip, **options)
        assert_same(found, expected, TOLERANCE[name])


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_torchs_clip_grad_norm_and_fast_adamw(workers, tp, seed, name):
    workers.run(check_torchs_own, seed, name, tp)
