"""Layers, blocks and models whose forward and backward passes are captured in CUDA graphs, beside eager ones."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import Block
from tests.conftest import gpu_world
from tests.distributed import Workers
from tests.layers.paths import assert_near, gradients
from tests.layers.test_transformer import GPT, LLAMA
from tests.overlap.cases import make_graphed, poisoned
from tpfused import ParallelMLP, ParallelTransformer, ParallelTransformerBlock, random
from tpfused.collectives import all_gather
from tpfused.group import resolve_group
from tpfused.layers.transformer import hidden_dropout
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


class WholeBlock(nn.Module):
    """Takes one tensor, as what is captured must."""

    def __init__(self, config, **place):
        super().__init__()
        self.block = ParallelTransformerBlock(config, **place)
        self.total_len = TOKENS if config.sequence_parallel else None

    def forward(self, x):
        return self.block(x, total_len=self.total_len)


class DroppingMLP(nn.Module):
    """A feed-forward layer with the dropout that a block has after it."""

    def __init__(self, config, **place):
        super().__init__()
        self.mlp = ParallelMLP(256, 1024, "gelu_tanh", sequence_parallel=config.sequence_parallel, **place)
        self.config, self.group = config, resolve_group(place["group"])

    def forward(self, x):
        return hidden_dropout(self.mlp(x), self.config, self.group, self.training)


def check_block(ctx, tp, name, seed):
    block = Block(ctx, tp, "group", seed)
    for config in CONFIGS:

        def build(config=config):
            return WholeBlock(config, device=ctx.device, **block.place)

        def draw(config=config):
            rows = TOKENS // tp if config.sequence_parallel else TOKENS
            shape = (rows, BATCH) if config.sequence_dim == 0 else (BATCH, rows)
            return torch.randn(*shape, 256, device=ctx.device).requires_grad_()

        check(block, name, build, draw, 1e-4)


def check_dropout(ctx, tp, name, kind, sequence_parallel, seed):
    """Each replay draws anew: from one state what an eager call draws that goes a capture's way, gradients too."""
    communicator.set_timeout(20)
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    config = replace(CONFIGS[sequence_parallel], dropout=0.1, attention_dropout=0.1)
    made = []
    for _ in range(2):
        torch.manual_seed(block.seed)
        made.append(kind(config, device=ctx.device, **block.place))
    module, eager = made
    torch.manual_seed(block.seed + 1)
    rows = TOKENS // tp if sequence_parallel else TOKENS
    given, grad = torch.randn(2, rows, BATCH, 256, device=ctx.device).unbind()

    def run(function, layer, draws_from):
        """`draws_from`: a seed; None: the state that is there."""
        layer.zero_grad()
        x = given.clone().requires_grad_()
        if draws_from is not None:
            torch.manual_seed(draws_from)
        out = function(x)
        out.backward(grad)
        return {"out": out.detach().clone(), "x": x.grad, **gradients(layer)}

    def of_ranks(x):
        return all_gather(x.unsqueeze(0), 0, tp, group)

    with poisoned(), tier(name):
        graphed = make_graphed(module, (given.clone().requires_grad_(),))
        outs = [run(graphed, module, None)["out"] for _ in range(REPLAYS)]
        assert all(not torch.equal(one, other) for one, other in zip(outs, outs[1:], strict=False))
        states = [None] * tp
        torch.distributed.all_gather_object(states, random.state_of(ctx.device), group=block.group)
        assert len(set(states)) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random, "_is_capturing", lambda device: True)
            for step in range(REPLAYS):
                found = [run(function, layer, step) for function, layer in ((graphed, module), (eager, eager))]
                assert_near(*found, f"{kind.__name__} with dropout by {name}, replay {step}", 1e-4)
    if kind is DroppingMLP:
        dropped = of_ranks((found[0]["out"] == 0).float())
        assert 0.05 < dropped.mean() < 0.15
        assert torch.equal(dropped[0], dropped[1]) != sequence_parallel
    elif not sequence_parallel:  # what each rank has whole stays alike, with the ranks' own heads' dropout within
        assert len(of_ranks(found[0]["out"]).unique(dim=0)) == 1


def check_own_masks(ctx, tp, seed):
    """Of the ranks' own dropout alone: its gradient is its mask, another at each replay and on each rank."""
    group = resolve_group(ctx.group(tp))
    torch.manual_seed(seed)

    def drop(x):
        return random.rank_dropout(F.dropout(x, 0.1), 0.1, group)

    graphed, seen = make_graphed(drop, (torch.ones(TOKENS, 256, device=ctx.device, requires_grad=True),)), []
    for _ in range(REPLAYS):
        x = torch.ones(TOKENS, 256, device=ctx.device, requires_grad=True)
        out = graphed(x)
        (dx,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(dx, out.detach())
        seen.append((out.detach() != 0).float())
    every = all_gather(torch.stack(seen).unsqueeze(0), 0, tp, group).flatten(0, 1).flatten(1)
    assert len(every.unique(dim=0)) == tp * REPLAYS
    assert 0.79 < every.mean() < 0.83


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
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "tokens"])
@pytest.mark.parametrize("kind", [WholeBlock, DroppingMLP])
def test_dropout(workers, tp, name, kind, sequence_parallel, seed):
    workers.run(check_dropout, tp, name, kind, sequence_parallel, seed, timeout=120)


@pytest.mark.gpu
@tiers
def test_dropout_where_nothing_was_multiplied_by_torch_before(name, seed):
    if gpu_world() < 2:
        pytest.skip("needs two ranks")
    with Workers("cuda", 2) as pool:
        pool.run(check_dropout, 2, name, WholeBlock, True, seed, timeout=120)


@on_gpus
@two_ranks
def test_each_rank_drops_its_own(workers, tp, seed):
    workers.run(check_own_masks, tp, seed, timeout=120)


@on_gpus
@two_ranks
@tiers
def test_models(workers, tp, name, seed):
    workers.run(check_model, tp, name, seed, timeout=120)
