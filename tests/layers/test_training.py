"""What training does with layers, by torch alone and overlapped: recomputes, accumulates, freezes and ties weights."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.compare import Block, collectives_made
from tests.layers.paths import assert_near, gradients, make_model, paths
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tests.overlap.test_operations import forced
from tpfused import ColumnParallelLinear, ParallelTransformerBlock, RowParallelLinear
from tpfused.overlap.tiers import tier
from tpfused.placement import local

CONFIGS = [
    replace(GPT, sequence_parallel=True),
    replace(LLAMA, sequence_parallel=True, sequence_dim=1, num_kv_heads=1),
    replace(LLAMA, tie_embeddings=True),
]
two_ranks = pytest.mark.parametrize("tp", [2], indirect=True)
modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def make_block(block, config):
    """A block, this rank's part of an input, and the tokens of all."""
    torch.manual_seed(block.seed)
    module = ParallelTransformerBlock(config, device=block.device, **block.place)
    dim = config.sequence_dim
    x = block.randn(*((6, 2) if dim == 0 else (2, 6)), config.hidden_size, dtype=torch.float32)
    return module, block.own(x, dim if config.sequence_parallel else None), 6 if config.sequence_parallel else None


def check_recomputed_blocks(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        config = replace(config, dropout=0.2, attention_dropout=0.2)
        for name in paths(ctx, tp):
            found = []
            for reentrant in (None, False, True):
                module, x, total_len = make_block(block, config)
                x = x.detach().clone().requires_grad_()

                def run(x, module=module, total_len=total_len):
                    return module(x, total_len=total_len)

                torch.manual_seed(block.seed)
                out = run(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
                out.square().sum().backward()
                found.append({"out": out.detach(), "x": x.grad, **gradients(module)})
            for recomputed in found[1:]:
                assert_near(recomputed, found[0], f"{name} {config}")


def check_recomputed_outside(ctx, tp, seed):
    """Backward recomputes by the tier of forward, also where that was chosen around forward alone."""
    block = Block(ctx, tp, "group", seed)
    config = replace(CONFIGS[0], checkpoint_activations=True)
    ids = draw_ids(block, config, 6)
    found = []
    for name in ("reference", "p2p"):
        model = make_model(block, config)
        with forced(ctx, tp, "p2p"):
            with tier(name):
                loss = model.loss(ids, ids.roll(1, 1))
            loss.backward()
        found.append(gradients(model))
    assert_near(*found, "by the other tier")


def check_accumulation(ctx, tp, mode, seed):
    """Micro-batches add up to the batch; two backward passes of one graph to twice its gradient."""
    block = Block(ctx, tp, mode, seed)
    for config in (*CONFIGS, replace(CONFIGS[0], checkpoint_activations=True)):
        for name in paths(ctx, tp):
            model, ids = make_model(block, config), draw_ids(block, config, 6, batch=4)
            model.loss(ids, ids.roll(1, 1), reduction="sum").backward()
            expected = gradients(model)
            model.zero_grad()
            for part in ids.chunk(4):
                model.loss(part, part.roll(1, 1), reduction="sum").backward()
            assert_near(gradients(model), expected, f"micro-batches {name} {config}")
            model.zero_grad()
            loss = model.loss(ids, ids.roll(1, 1), reduction="sum")
            for retain in (True, True, False):
                loss.backward(retain_graph=retain)
            tripled = {key: 3 * value for key, value in expected.items()}
            assert_near(gradients(model), tripled, f"retained {name} {config}")


def check_without_gradients(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS:
        for name in paths(ctx, tp):
            model, ids = make_model(block, config), draw_ids(block, config, 6)
            expected = {"logits": model(ids).detach(), "loss": model.loss(ids, ids.roll(1, 1)).detach()}
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    found = {"logits": model(ids), "loss": model.loss(ids, ids.roll(1, 1))}
                    assert not found["loss"].requires_grad
                    assert found["logits"].is_inference() == (context is torch.inference_mode)
                    found = {key: value.clone() for key, value in found.items()}
                assert_near(found, expected, f"{context.__name__} {name} {config}", 1e-5)
            model.loss(ids, ids.roll(1, 1)).backward()  # and training goes on


class CountsMatmuls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


def check_frozen(ctx, tp, seed):
    """Backward makes no matmul and no collective for a gradient that nobody wants."""
    block = Block(ctx, tp, "group", seed)
    whole, shard = block.randn(4, 8, dtype=torch.float32), block.randn(4, 8 // tp, dtype=torch.float32)
    # Matmuls and collectives for the gradients of x, the weight, the bias.
    column, row = (ColumnParallelLinear, whole), (RowParallelLinear, shard)
    regathered = ["all_gather"]  # the plain path has kept the whole input instead
    ledger = [
        (*column, {}, (1, ["all_reduce"]), (1, []), (0, [])),
        (*column, {"gather_output": True}, (1, ["all_reduce"]), (1, []), (0, [])),
        (*column, {"sequence_parallel": True}, (1, ["reduce_scatter"]), (1, regathered), (0, [])),
        (*row, {}, (1, []), (1, []), (0, [])),
        (*row, {"sequence_parallel": True}, (1, ["all_gather"]), (1, ["all_gather"]), (0, ["all_reduce"])),
    ]
    for name in paths(ctx, tp):
        for kind, x, options, *wanted in ledger:
            torch.manual_seed(block.seed)
            layer = kind(8, 8, device=block.device, **options, **block.place)
            everything = None
            for needs in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)):
                layer.weight.requires_grad_(bool(needs[1]))
                layer.bias.requires_grad_(bool(needs[2]))
                leaves = x.clone().requires_grad_(bool(needs[0])), layer.weight, layer.bias
                out = layer(leaves[0])
                with collectives_made() as made, CountsMatmuls() as matmuls:
                    grads = torch.autograd.grad(out.sum(), [leaf for leaf in leaves if leaf.requires_grad])
                found = dict(zip([i for i in range(3) if needs[i]], grads, strict=True))
                everything = everything or found
                assert_near(found, {i: everything[i] for i in found}, f"{name} {kind.__name__} {options} {needs}")
                needed = [each for each, need in zip(wanted, needs, strict=True) if need]
                kept = regathered if name == "reference" and kind is ColumnParallelLinear else []
                collectives = {each for _, names in needed for each in names if each not in kept}
                if name == "reference" or ctx.device.type == "cpu":
                    assert set(made) == collectives, (name, kind.__name__, options, needs, made)
                if ctx.device.type == "cpu":
                    count = sum(count for count, _ in needed)
                    assert matmuls.count == count, (name, kind.__name__, options, needs, matmuls.count)


def check_tied(ctx, tp, mode, seed):
    """A head that was given the embedding's weight, as `tie_embeddings` does it."""
    block = Block(ctx, tp, mode, seed)
    for sequence in (False, True):
        for name in paths(ctx, tp):
            config = replace(GPT, bias=False, sequence_parallel=sequence)
            tied = make_model(block, replace(config, tie_embeddings=True))
            model = make_model(block, config)
            model.head.weight = model.embedding.weight
            with torch.no_grad():
                for param, other in zip(model.parameters(), tied.parameters(), strict=True):
                    local(param).copy_(local(other))
            ids = draw_ids(block, config, 6)
            for each in (model, tied):
                each.loss(ids, ids.roll(1, 1)).backward()
            assert_near(gradients(model), gradients(tied), name)


@modes
@two_ranks
def test_recomputed_blocks(workers, tp, mode, seed):
    workers.run(check_recomputed_blocks, tp, mode, seed)


@two_ranks
def test_recomputation_by_the_tier_of_forward(workers, tp, seed):
    workers.run(check_recomputed_outside, tp, seed)


@modes
@two_ranks
def test_accumulation(workers, tp, mode, seed):
    workers.run(check_accumulation, tp, mode, seed)


@modes
@two_ranks
def test_without_gradients(workers, tp, mode, seed):
    workers.run(check_without_gradients, tp, mode, seed)


@two_ranks
def test_frozen_parameters_cost_nothing(workers, tp, seed):
    workers.run(check_frozen, tp, seed)


@modes
@two_ranks
def test_tied_weights(workers, tp, mode, seed):
    workers.run(check_tied, tp, mode, seed)
