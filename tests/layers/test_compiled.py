"""Blocks and whole models under torch.compile, as one graph: results, gradients and random draws of eager calls; and
exported."""

import io
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block
from tests.conftest import gpu_world
from tests.distributed import Workers
from tests.layers.paths import assert_near, gradients, make_model
from tests.layers.test_training import make_block
from tests.layers.test_transformer import GPT, LLAMA, draw_ids
from tests.overlap.test_operations import forced
from tpfused import ColumnParallelLinear, KVCache
from tpfused.collectives import all_gather
from tpfused.group import resolve_group
from tpfused.overlap.operators import sizes_of
from tpfused.overlap.plans import plan_of
from tpfused.random import rank_dropout

SEQUENCE = replace(GPT, sequence_parallel=True, num_layers=1)
TIED = replace(LLAMA, tie_embeddings=True, num_layers=1)
SHARED_HEADS = replace(LLAMA, sequence_parallel=True, sequence_dim=1, num_kv_heads=1, bias=True, num_layers=1)
ranks = pytest.mark.parametrize("tp", [2], indirect=True)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def workers(request):
    """No more than are needed, for compiling takes long."""
    if request.param == "cuda" and gpu_world() < 2:
        pytest.skip("needs two GPUs")
    with Workers(request.param, 2) as pool:
        yield pool


def compiled(function, backend):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def check_model(ctx, tp, mode, seed, config, path, autocasts, backend):
    block = Block(ctx, tp, mode, seed)
    with forced(ctx, tp, path):
        model = make_model(block, config)
        ids, labels, found = draw_ids(block, config, 6), draw_ids(block, config, 6), []
        for function in (model.loss, compiled(model.loss, backend)):
            model.zero_grad()
            with torch.autocast(ctx.device.type, torch.bfloat16) if autocasts else nullcontext():
                loss = function(ids, labels)
            loss.backward()
            found.append({"loss": loss.detach(), **gradients(model)})
        assert_near(*reversed(found), f"{path} {config}", 0.1 if autocasts else 2e-4)


def check_forward(ctx, tp, seed):
    """A block with its gradients, and a model without."""
    block = Block(ctx, tp, "group", seed)
    with forced(ctx, tp, "p2p"):
        module, x, total_len = make_block(block, SHARED_HEADS)
        found = []
        for function in (module, compiled(module, "aot_eager")):
            module.zero_grad()
            given = x.detach().clone().requires_grad_()
            out = function(given, total_len=total_len)
            out.square().sum().backward()
            found.append({"out": out.detach(), "x": given.grad, **gradients(module)})
        assert_near(*reversed(found), "a block")
        model, ids = make_model(block, TIED), draw_ids(block, TIED, 6)
        with torch.no_grad():
            assert_near({"logits": compiled(model, "aot_eager")(ids)}, {"logits": model(ids)}, "a model")


def check_no_tokens(ctx, tp, seed):
    """After others, whose number made theirs a symbol."""
    block = Block(ctx, tp, "group", seed)
    with forced(ctx, tp, "p2p"):
        layer = ColumnParallelLinear(6, 8, sequence_parallel=True, device=block.device, **block.place)
        function = compiled(layer, "aot_eager")
        for tokens, batch in ((4, 2), (6, 3), (8, 0)):
            x = torch.randn(tokens // tp, batch, 6, device=block.device, requires_grad=True)
            out = function(x)
            torch.testing.assert_close(out, layer(x))
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert grad.shape == x.shape


def check_options(ctx, tp, seed):
    """With recomputation, of several lengths, for all ranks must recompute the same; and with main_grads."""
    block = Block(ctx, tp, "group", seed)
    with forced(ctx, tp, "p2p"):
        for options in (
            {"checkpoint_activations": True, "num_layers": 2},
            {"checkpoint_activations": True, "num_layers": 2, "save_gathered": True},
            {"accumulate_main_grad": True},
        ):
            model = make_model(block, replace(SEQUENCE, **options))
            weights = {key: p for key, p in model.named_parameters() if key.endswith("weight") and "norm" not in key}
            functions = model.loss, compiled(model.loss, "aot_eager")
            for tokens in (6, 8, 5):
                ids, found = draw_ids(block, SEQUENCE, tokens), []
                for function in functions:
                    model.zero_grad()
                    for weight in weights.values():
                        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                    function(ids, ids.roll(1, 1)).backward()
                    grads = {f"{key} main": weight.main_grad.clone() for key, weight in weights.items()}
                    found.append(gradients(model) | grads)
                assert_near(*reversed(found), f"{options}, {tokens} tokens")


def check_dropout(ctx, tp, seed, options, backend):
    """The draws are those of eager calls, where the back end has torch's; always, the ranks stay in step."""
    block, found = Block(ctx, tp, "group", seed), []
    config = replace(GPT, num_layers=1, dropout=0.3, attention_dropout=0.3, **options)
    model, ids = make_model(block, config), draw_ids(block, config, 6)
    for function in (model, compiled(model, backend)):
        model.zero_grad()
        torch.manual_seed(block.seed)
        out = function(ids)
        out.square().sum().backward()
        found.append({"out": out.detach(), **gradients(model)})
        ends = all_gather(torch.rand(1, 8, device=ctx.device), 0, tp, model.group)
        found[-1]["after"] = ends[0]
        assert len(ends.unique(dim=0)) == 1
        norms = all_gather(found[-1]["norm.weight"].unsqueeze(0), 0, tp, model.group)
        torch.testing.assert_close(norms[0], norms[1])
    if backend == "aot_eager" and ctx.device.type == "cpu":  # other attention draws otherwise on GPUs
        assert_near(*reversed(found), f"dropout {options}")


def check_rank_dropout(ctx, tp, seed, backend):
    """Each rank drops its own entries, and the derivative the same ones."""
    group = resolve_group(ctx.group(tp))
    x = torch.ones(64, device=ctx.device, requires_grad=True)
    torch.manual_seed(seed)
    out = compiled(lambda x: F.dropout(rank_dropout(F.dropout(x, 0.2), 0.5, group), 0.2), backend)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())  # x is 1: both are the masks' product
    assert len(all_gather(out.detach().unsqueeze(0), 0, tp, group).unique(dim=0)) == tp


@torch.no_grad()
def check_cache(ctx, tp, seed):
    """A compiled model with a cache: prompts, several tokens, single ones; and compiled blocks."""
    block = Block(ctx, tp, "group", seed)
    for config in (TIED, SEQUENCE):
        model, ids = make_model(block, config).eval(), draw_ids(block, config, 9)
        function, cache = compiled(model, "aot_eager"), KVCache(model, 2, 9)
        out = torch.cat([function(part, cache=cache) for part in ids.split([4, 3, 1, 1], 1)], 1)
        assert_near({"logits": out}, {"logits": model(ids)}, f"a cache of {config}")
        prompts, mask = ids[:, :6], torch.ones(2, 6, dtype=torch.bool, device=ids.device)
        mask[0, :2] = False
        expected = model.generate(prompts, 3, mask=mask)
        torch._dynamo.reset()
        for part in model.blocks:
            part.compile(fullgraph=True, backend="aot_eager")
        assert torch.equal(model.generate(prompts, 3, mask=mask), expected)


def check_exported(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in (TIED, SEQUENCE):
        model, ids = make_model(block, config).eval(), draw_ids(block, config, 6)
        with pytest.raises(RuntimeError, match=r"wrong gradients: export it under torch.no_grad\(\)"):
            torch.export.export(model, (ids,))
        layer = ColumnParallelLinear(4, 4, bias=False, backend="reference", **block.place).requires_grad_(False)
        for each in (layer, ColumnParallelLinear(4, 4, **block.place)):  # also where nothing requires gradients yet
            with pytest.raises(RuntimeError, match=r"wrong gradients: export it under torch.no_grad\(\)"):
                torch.export.export(each.to(ctx.device), (torch.ones(2, 4, device=ctx.device),))
        with torch.no_grad():
            for strict in (False, True):
                exported = torch.export.export(model, (ids,), strict=strict).module()
                assert_near({"logits": exported(ids)}, {"logits": model(ids)}, f"exported, strict={strict}, {config}")
        # Of DTensors, nothing in the program records gradients.
        told = "exported for inference has no backward pass" if mode == "group" else "does not require grad"
        with pytest.raises(RuntimeError, match=told):
            exported(ids).sum().backward()
        one = ColumnParallelLinear(4, 4, accumulate_main_grad=True, group=ctx.group(1))  # has no collective
        with pytest.raises(RuntimeError, match="no main_grad"):
            torch.export.export(one, (torch.ones(2, 4),))


@torch.no_grad()
def check_exported_for_later(ctx, tp, mode, seed):
    """For any number of tokens, and saved."""
    block, file = Block(ctx, tp, mode, seed), io.BytesIO()
    model = make_model(block, TIED).eval()
    of_tokens = {1: torch.export.Dim("tokens", min=2, max=TIED.max_positions)}
    torch.export.save(torch.export.export(model, (draw_ids(block, TIED, 6),), dynamic_shapes=(of_tokens,)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for tokens in (6, 3, 9):
        ids = draw_ids(block, TIED, tokens)
        assert_near({"logits": loaded(ids)}, {"logits": model(ids)}, f"{tokens} tokens")


def check_another_ranks_program(ctx, tp):
    x, weight = torch.ones(4, 2, device=ctx.device), torch.ones(2, 2, device=ctx.device)
    plan = plan_of(resolve_group(ctx.group(tp)), None, 4 * tp, 1, 1, 2, 2)
    own, other = sizes_of(plan), sizes_of(plan._replace(tp=replace(plan.tp, rank=1 - plan.tp.rank)))
    name = plan.tp.process_group.group_name
    run = partial(torch.ops.tpfused.all_gather_matmul, x, [weight], [], None)
    assert torch.equal(run(own, False, name)[0], torch.full((4 * tp, 2), 2.0, device=ctx.device))
    with pytest.raises(RuntimeError, match=f"made by rank {1 - plan.tp.rank} of 2 runs on rank {plan.tp.rank} of"):
        run(other, False, name)


@ranks
@pytest.mark.parametrize("mode", ["group", "mesh"])
@pytest.mark.parametrize("check", [check_exported, check_exported_for_later])
def test_export(workers, tp, check, mode, seed):
    workers.run(check, tp, mode, seed, timeout=240)


@ranks
def test_a_program_of_another_rank(workers, tp):
    workers.run(check_another_ranks_program, tp, timeout=60)


@ranks
@pytest.mark.parametrize(
    "mode, config, path, autocasts",
    [
        ("group", SEQUENCE, "p2p", False),
        ("group", SHARED_HEADS, "p2p", True),
        ("group", TIED, "reference", False),
        ("mesh", SEQUENCE, "p2p", False),
    ],
    ids=["overlapped", "autocast", "plain", "mesh"],
)
def test_models(workers, tp, mode, seed, config, path, autocasts):
    workers.run(check_model, tp, mode, seed, config, path, autocasts, "aot_eager", timeout=240)


@ranks
def test_inductor(workers, tp, seed):
    workers.run(check_model, tp, "group", seed, TIED, "p2p", False, "inductor", timeout=240)


@ranks
def test_a_block_and_no_gradients(workers, tp, seed):
    workers.run(check_forward, tp, seed, timeout=240)


@ranks
def test_no_tokens_where_their_number_is_a_symbol(workers, tp, seed):
    workers.run(check_no_tokens, tp, seed, timeout=60)


@ranks
def test_recomputation_and_main_grads(workers, tp, seed):
    workers.run(check_options, tp, seed, timeout=240)


@ranks
@pytest.mark.parametrize(
    "options, backend",
    [
        ({"sequence_parallel": True}, "aot_eager"),
        ({"checkpoint_activations": True}, "aot_eager"),
        ({"sequence_parallel": True}, "inductor"),
    ],
    ids=["tokens", "recomputed", "inductor"],
)
def test_dropout(workers, tp, seed, options, backend):
    workers.run(check_dropout, tp, seed, options, backend, timeout=240)


@ranks
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ranks_drop_their_own(workers, tp, seed, backend):
    workers.run(check_rank_dropout, tp, seed, backend, timeout=240)


@pytest.mark.gpu
def test_a_length_is_not_set_in_a_capture():
    """Each replay of a compiled model's step would set the length of the capture."""
    length = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.ops.tpfused.set_length(length, 2)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        torch.ops.tpfused.set_length(length, 3)
    assert length.item() == 2


@ranks
def test_a_cache(workers, tp, seed):
    workers.run(check_cache, tp, seed, timeout=240)
