"""Layers, blocks and models whose forward and backward passes are captured in CUDA graphs, beside eager ones."""

from dataclasses import replace

import pytest
import torch

from tests.compare import Block
from tests.layers.paths import assert_near, gradients
from tests.layers.test_transformer import GPT, LLAMA
from tests.overlap.cases import make_graphed, poisoned
from tpfused import ParallelMLP, ParallelTransformer, ParallelTransformerBlock
from tpfused.overlap import communicator
from tpfused.overlap.tiers import tier

pytestmark = pytest.mark.gpu
REPLAYS = 20
SIZES = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "vocab_size": 512, "max_positions": 64}
BATCH, TOKENS = 4, 64
CONFIGS = [
    replace(GPT, ffn_size=1024, **SIZES),
    replace(GPT, ffn_size=1024, sequence_parallel=True, **SIZES),
    replace(LLAMA, ffn_size=512, num_kv_heads=2, sequence_parallel=True, sequence_dim=1, **SIZES),
]
two_ranks = pytest.mark.parametrize("tp", [2], indirect=True)
on_gpus = pytest.mark.parametrize("workers", ["cuda"], indirect=True)
tiers = pytest.mark.parametrize("name", ["p2p", "nccl"])


def check(block, name, build, draw, tolerance):
    """Replays with new inputs and new weights; the second module, of the same weights, is never captured."""
    communicator.set_timeout(20)
    made = []
    for _ in range(2):
        torch.manual_seed(block.seed)
        made.append(build())
    module, eager = made
    torch.manual_seed(block.seed + 1)
    given = draw()
    with poisoned(), tier(name):
        graphed = make_graphed(module, (given,))
        for step in range(REPLAYS):
            with torch.no_grad():  # as an optimizer would, in place
                for param, twin in zip(module.parameters(), eager.parameters(), strict=True):
                    twin.add_(0.01 * torch.randn_like(twin))
                    param.copy_(twin)
            given, found = draw(), []
            for function, layer in ((graphed, module), (eager, eager)):
                layer.zero_grad()
                x = given.detach().clone().requires_grad_(given.is_floating_point())
                out = function(x)
                torch.manual_seed(step)
                out.backward(torch.randn_like(out))
                found.append({"out": out.detach().clone(), **gradients(layer)})
                if x.grad is not None:
                    found[-1]["x"] = x.grad
            assert_near(*found, f"{type(module).__name__} by {name}, replay {step}", tolerance)


def check_mlp(ctx, tp, name, dtype, seed):
    block = Block(ctx, tp, "group", seed)
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel, "device": ctx.device, "dtype": dtype, **block.place}
        rows = TOKENS // tp if sequence_parallel else TOKENS

        def draw(rows=rows):
            return torch.randn(rows, BATCH, 256, device=ctx.device, dtype=dtype).requires_grad_()

        tolerance = 1e-4 if dtype == torch.float32 else 0.03
        check(block, name, lambda options=options: ParallelMLP(256, 1024, "gelu_tanh", **options), draw, tolerance)


def check_block(ctx, tp, name, seed):
    block = Block(ctx, tp, "group", seed)
    for config in CONFIGS:
        total_len = TOKENS if config.sequence_parallel else None

        class Whole(torch.nn.Module):
            """Takes one tensor, as what is captured must."""

            def __init__(self, config=config, total_len=total_len):
                super().__init__()
                self.block = ParallelTransformerBlock(config, device=ctx.device, **block.place)
                self.total_len = total_len

            def forward(self, x):
                return self.block(x, total_len=self.total_len)

        def draw(config=config):
            rows = TOKENS // tp if config.sequence_parallel else TOKENS
            shape = (rows, BATCH) if config.sequence_dim == 0 else (BATCH, rows)
            return torch.randn(*shape, 256, device=ctx.device).requires_grad_()

        check(block, name, Whole, draw, 1e-4)


def check_model(ctx, tp, name, seed):
    """Ids have no gradient; the loss follows outside of the graph."""
    block = Block(ctx, tp, "group", seed)
    for config in CONFIGS:

        def draw(config=config):
            ids = torch.randint(config.vocab_size, (BATCH, TOKENS), device=ctx.device)
            torch.distributed.broadcast(ids, torch.distributed.get_global_rank(block.group, 0), group=block.group)
            return ids

        def build(config=config):
            return ParallelTransformer(config, device=ctx.device, **block.place)

        check(block, name, build, draw, 1e-4)


@on_gpus
@two_ranks
@tiers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mlp(workers, tp, name, dtype, seed):
    workers.run(check_mlp, tp, name, dtype, seed, timeout=120)


@on_gpus
@two_ranks
@tiers
def test_blocks(workers, tp, name, seed):
    workers.run(check_block, tp, name, seed, timeout=120)


@on_gpus
@two_ranks
@tiers
def test_models(workers, tp, name, seed):
    workers.run(check_model, tp, name, seed, timeout=120)
