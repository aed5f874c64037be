"""Whole models and blocks against the dense reference, and what only shows in them: dropout, recomputation, counts."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block, assert_close, check_module, collectives_made, refuses, twins, unpacked
from tpfused import ParallelTransformer, ParallelTransformerBlock, TransformerConfig, reference
from tpfused.collectives import all_gather
from tpfused.group import TPGroup, resolve_group
from tpfused.overlap.tiers import tier
from tpfused.placement import local

SIZES = {"vocab_size": 13, "hidden_size": 6, "num_layers": 2, "num_heads": 4, "max_positions": 9, "head_dim": 2}
GPT = TransformerConfig.gpt(ffn_size=10, **SIZES)
LLAMA = TransformerConfig.llama(ffn_size=8, num_kv_heads=2, **SIZES)
CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt-tied": replace(GPT, num_layers=1, tie_embeddings=True, causal=False, activation="relu"),
    "llama-tied": replace(LLAMA, num_layers=1, tie_embeddings=True, num_kv_heads=1, bias=True, activation="gelu_tanh"),
    "gpt-xavier": replace(GPT, num_layers=1, init="xavier", vocab_size=3, positions="rotary", norm="rmsnorm"),
}
# None, or (sequence_dim, tokens): 5 tokens divide unevenly, 2 are fewer than 4 ranks.
SEQUENCES = [None, (0, 8), (0, 5), (1, 5), (1, 2)]

modes = pytest.mark.parametrize("mode", ["group", "mesh"])


def sequence_parallel(config, sequence):
    return config if sequence is None else replace(config, sequence_parallel=True, sequence_dim=sequence[0])


def draw_ids(block, config, tokens, batch=2):
    return torch.randint(config.vocab_size, (batch, tokens), device=block.device)


def model_case(block, config, sequence, mask=None, dtype=torch.float64):
    """Logits and the gradients of all parameters; the loss."""
    config = sequence_parallel(config, sequence)
    tokens = 5 if sequence is None else sequence[1]
    model, whole = twins(block, lambda **place: ParallelTransformer(config, **place), dtype)
    torch.manual_seed(block.seed + 1)
    ids, labels = draw_ids(block, config, tokens), draw_ids(block, config, tokens)
    labels[0, 0] = -100

    def dense_logits(**state):
        keys = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
        return reference.transformer(ids, state, config, keys)

    what, grad = f"{config}, {tokens} tokens", block.randn(*ids.shape, config.vocab_size, dtype=dtype)
    check_module(
        model, lambda: model(ids, mask), {}, grad, dense_logits, whole, lambda _, out: block.own(out, -1), what
    )
    with torch.no_grad():
        loss, expected = (
            model.loss(ids, labels, mask),
            F.cross_entropy(dense_logits(**whole).flatten(0, 1), labels.flatten()),
        )
    torch.testing.assert_close(loss, expected)


def check_models(ctx, tp, mode, seed, name):
    block = Block(ctx, tp, mode, seed)
    for sequence in block.some(SEQUENCES):
        model_case(block, CONFIGS[name], sequence)


def check_masks(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    distance = torch.arange(5, device=ctx.device).double()
    slopes = torch.arange(1, 5, device=ctx.device).double()[:, None, None]
    alibi = -slopes * (distance[:, None] - distance).abs()
    padding = torch.arange(5, device=ctx.device) < torch.tensor([[5], [3]], device=ctx.device)
    for mask in (alibi[None], padding):
        for config in (GPT, LLAMA):
            for sequence in (None, (0, 5)):
                model_case(block, config, sequence, mask)


def check_float32(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    for config in (GPT, LLAMA):
        for sequence in (None, (0, 8)):
            # bias only with rotary positions: a key's has no gradient but rounding without
            config_ = replace(config, hidden_size=32, head_dim=8, ffn_size=64, bias=config.positions == "rotary")
            model_case(block, config_, sequence, dtype=torch.float32)


def check_block(ctx, tp, mode, seed):
    """A block by itself, in both layouts of its input."""
    block = Block(ctx, tp, mode, seed)
    for config in (GPT, LLAMA):
        for sequence in block.some(SEQUENCES):
            config = sequence_parallel(config, sequence)
            tokens = 5 if sequence is None else sequence[1]
            module, whole = twins(block, lambda config=config, **place: ParallelTransformerBlock(config, **place))
            tokens_first = config.sequence_dim == 0

            def dense(x, config=config, tokens_first=tokens_first, **state):
                weights = reference.Weights(state)
                x = x.transpose(0, 1) if tokens_first else x

                def norm(x, name):
                    at = weights.below(name)
                    return reference.normalize(x, config.norm, at["weight"], at["bias"], config.norm_eps)

                heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
                theta = config.rope_theta if config.positions == "rotary" else None
                attention = weights.below("attention")
                h = norm(x, "attention_norm")
                x = x + reference.attention(h, attention, heads, kv_heads, causal=True, rope_theta=theta)
                feed_forward = reference.gated_mlp if config.gated else reference.mlp
                x = x + feed_forward(norm(x, "mlp_norm"), weights.below("mlp"), config.activation)
                return x.transpose(0, 1) if tokens_first else x

            shape = (tokens, 2) if tokens_first else (2, tokens)
            dim = config.sequence_dim if config.sequence_parallel else None
            total_len = tokens if config.sequence_parallel else None
            check_module(
                module,
                lambda x, module=module, total_len=total_len: module(x, total_len=total_len),
                {"x": block.randn(*shape, config.hidden_size)},
                block.randn(*shape, config.hidden_size),
                dense,
                whole,
                lambda _, value, dim=dim: block.own(value, dim),
                f"block of {config}, {tokens} tokens",
            )


def check_training(ctx, tp, mode, seed):
    """Five steps of SGD, which a gradient of the wrong size does not survive."""
    block = Block(ctx, tp, mode, seed)
    for config, sequence in ((GPT, None), (LLAMA, (0, 5))):
        config = sequence_parallel(config, sequence)
        losses = []
        for place in ({"group": TPGroup(None, 0, 1)}, block.place):
            torch.manual_seed(block.seed)
            model = ParallelTransformer(config, device=ctx.device, dtype=torch.float64, **place)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            torch.manual_seed(block.seed + 1)
            losses.append([])
            ids = draw_ids(block, config, 5)
            for _ in range(5):
                loss = model.loss(ids, ids)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.detach())
        alone, parallel = map(torch.stack, losses)
        assert_close(parallel, alone)
        assert alone[-1] < 0.95 * alone[0]


def check_dropout_outside(ctx, tp, seed):
    """Without sequence parallelism the ranks drop alike, and so alike to one rank alone."""
    block = Block(ctx, tp, "group", seed)
    config = replace(GPT, dropout=0.5)
    found = []
    for place in ({"group": TPGroup(None, 0, 1)}, block.place):
        torch.manual_seed(block.seed)
        model = ParallelTransformer(config, device=ctx.device, dtype=torch.float64, **place)
        ids = draw_ids(block, config, 5)
        loss = model.loss(ids, ids)
        loss.backward()
        found.append((loss.detach(), model.positions.weight.grad, model.blocks[1].mlp_norm.weight.grad))
        assert not torch.equal(loss, model.loss(ids, ids))
        model.eval()
        assert torch.equal(model.loss(ids, ids), model.loss(ids, ids))
    for alone, parallel in zip(*found, strict=True):
        assert_close(parallel, alone)


def check_dropout_of_own_tokens(ctx, tp, seed):
    """Under sequence parallelism no two ranks' tokens may be dropped alike; all tokens are one here."""
    block = Block(ctx, tp, "group", seed)
    group = resolve_group(block.group)
    torch.manual_seed(block.seed)
    config = replace(GPT, hidden_size=64, dropout=0.5, sequence_parallel=True)
    model = ParallelTransformer(config, device=ctx.device, dtype=torch.float64, **block.place)
    torch.nn.init.zeros_(model.positions.weight)
    entered = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].detach()))
    model(torch.zeros(1, 8, dtype=torch.int64, device=ctx.device))
    tokens = all_gather(entered[0], 0, 8, group).flatten(0, 1)
    assert len((tokens == 0).unique(dim=0)) == 8
    common = torch.rand(1, 4, device=ctx.device, dtype=torch.float64)
    assert len(all_gather(common, 0, tp, group).unique(dim=0)) == 1


def check_recomputation(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config, sequence in ((GPT, None), (LLAMA, (0, 8))):
        config = replace(sequence_parallel(config, sequence), dropout=0.3, attention_dropout=0.3)
        found = []
        for recompute in (False, True):
            torch.manual_seed(block.seed)
            model = ParallelTransformer(
                replace(config, checkpoint_activations=recompute), device=ctx.device, dtype=torch.float64, **block.place
            )
            ids = draw_ids(block, config, 8)
            loss = model.loss(ids, ids)
            with collectives_made() as names:
                loss.backward()
            found.append((len(names), loss.detach(), *(local(param.grad) for param in model.parameters())))
        kept, recomputed = found
        assert recomputed[0] > kept[0] or tp == 1  # it did recompute
        for a, b in zip(kept[1:], recomputed[1:], strict=True):
            assert_close(b, a)


def check_counts(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    replicated = ["all_reduce"] * 6  # weights and biases of two norms, biases of two row layers
    for options, forward, backward in (
        ({}, ["all_reduce"] * 2, ["all_reduce"] * 2),
        ({"sequence_parallel": True}, ["all_gather", "reduce_scatter"] * 2, ["all_gather", "reduce_scatter"] * 2),
    ):
        module = ParallelTransformerBlock(replace(GPT, **options), device=ctx.device, **block.place)
        x = block.randn(2, 3, GPT.hidden_size, dtype=torch.float32).requires_grad_()
        with tier("sequential"), collectives_made() as names:  # torch's, on a GPU too
            out = module(x)
            assert names == (forward if tp > 1 else [])
            names.clear()
            out.sum().backward()
            expected = backward + (replicated if options else [])
            assert sorted(names) == (sorted(expected) if tp > 1 else [])


def check_copies(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    for config in CONFIGS.values():
        model, _ = twins(block, lambda config=config, **place: ParallelTransformer(config, **place))
        ids = draw_ids(block, config, 5)
        logits, other = model(ids), copy.deepcopy(model)
        with torch.no_grad():
            for param in model.parameters():
                local(param).zero_()
        assert torch.equal(other(ids), logits)

        torch.manual_seed(block.seed)
        made = ParallelTransformer(config, device=ctx.device, dtype=torch.float64, **block.place)
        empty = ParallelTransformer(config, device="meta", dtype=torch.float64, **block.place)
        assert all(param.is_meta for param in empty.parameters())
        empty.to_empty(device=ctx.device)
        torch.manual_seed(block.seed)
        for module in empty.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for (name, param), expected in zip(empty.named_parameters(), made.parameters(), strict=True):
            assert torch.equal(local(param), local(expected)), name
        assert torch.equal(empty(ids), made(ids))


def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)

    def make(config=GPT, **fields):
        return ParallelTransformer(replace(config, **fields), device=ctx.device, **block.place)

    for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size", "max_positions"):
        with refuses(ValueError, field, -3):
            make(**{field: -3})
        with refuses(TypeError, field, "float"):
            make(**{field: 2.5})
    for field, value in (
        ("positions", "sinus"),
        ("norm", "batchnorm"),
        ("activation", "tanh"),
        ("init", "zeros"),
        ("sequence_dim", 2),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("attention_dropout", 1.5),
    ):
        with refuses(ValueError, field, value):
            make(**{field: value})
    with refuses(ValueError, 4, 3):
        make(num_kv_heads=3)
    with refuses(ValueError, 6, 4):
        make(head_dim=None)
    with refuses(ValueError, "even", 3):
        make(LLAMA, head_dim=3)
    if tp > 1:
        with refuses(ValueError, 3, tp):
            make(num_heads=3)
        with refuses(ValueError, tp + 1, tp):
            make(LLAMA, ffn_size=tp + 1)

    model = make()
    ids = torch.zeros(2, 5, dtype=torch.int64, device=ctx.device)
    with refuses(ValueError, 10, 9):
        model(ids.new_zeros(2, 10))
    with refuses(ValueError, (5,)):
        model(ids[0])
    with refuses(TypeError, torch.float32):
        model(ids.float())
    with refuses(ValueError, "meta", ctx.device.type):
        model(ids.to("meta"))
    if ctx.device.type == "cpu":
        for bad in (13, -1):
            with refuses(ValueError, bad, 13):
                model(ids.index_fill(1, torch.tensor([3]), bad))


@modes
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_dense(workers, tp, mode, seed, name):
    workers.run(check_models, tp, mode, seed, name)


@pytest.mark.parametrize("tp", [2], indirect=True)
def test_ranks_that_stand_apart(workers, tp, seed):
    workers.run(check_models, tp, "strided", seed, "llama-tied")


def test_masks(workers, tp, seed):
    workers.run(check_masks, tp, seed)


def test_float32_obeys_the_tolerance(workers, tp, seed):
    workers.run(check_float32, tp, seed)


@modes
def test_a_block_equals_dense(workers, tp, mode, seed):
    workers.run(check_block, tp, mode, seed)


@modes
def test_trains_as_one_rank_alone_does(workers, tp, mode, seed):
    workers.run(check_training, tp, mode, seed)


def test_dropout_is_alike_outside_tensor_parallel_regions(workers, tp, seed):
    workers.run(check_dropout_outside, tp, seed)


def test_dropout_differs_between_the_ranks_tokens(workers, tp, seed):
    workers.run(check_dropout_of_own_tokens, tp, seed)


@modes
def test_activation_checkpointing_changes_nothing(workers, tp, mode, seed):
    workers.run(check_recomputation, tp, mode, seed)


def test_a_block_makes_two_collectives_each_way(workers, tp):
    workers.run(check_counts, tp)


@modes
def test_copies_and_the_meta_device(workers, tp, mode, seed):
    workers.run(check_copies, tp, mode, seed)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_config_by_itself_refuses_what_cannot_be_built(config):
    """Before any parameter is made: on the meta device, say, or for ranks that are not there yet."""
    config.check()
    for field, value in (
        ("activation", "tanh"),
        ("norm", "batchnorm"),
        ("attention_dropout", 1.0),
        ("attention_dropout", -0.1),
        ("attention_dropout", float("nan")),
    ):
        with refuses(ValueError, field, value):
            replace(config, **{field: value}).check()
    replace(GPT, activation=None).check()
    with refuses(ValueError, "a gate's activation", None):
        replace(LLAMA, activation=None).check()
    with refuses(ValueError, "ffn_size", 5, 4):
        replace(LLAMA, ffn_size=5).check(4)


def test_parameter_counts_of_the_sequence_memorising_model():
    config = TransformerConfig.gpt(
        vocab_size=1024, hidden_size=512, num_layers=8, num_heads=8, ffn_size=2048, max_positions=1024, init="xavier"
    )

    def count(rank, ranks):
        model = ParallelTransformer(config, group=TPGroup(None, rank, ranks), device="meta")
        return sum(param.numel() for param in model.parameters())

    assert count(0, 1) == 26_793_984
    assert {count(rank, 4) for rank in range(4)} == {7_110_912}


def test_styles():
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_size": 8, "max_positions": 8}
    gpt, llama = TransformerConfig.gpt(**sizes), TransformerConfig.llama(**sizes)
    assert (gpt.positions, gpt.norm, gpt.activation, gpt.gated, gpt.bias) == (
        "learned",
        "layernorm",
        "gelu",
        False,
        True,
    )
    assert (llama.positions, llama.norm, llama.activation) == ("rotary", "rmsnorm", "silu")
    assert (llama.gated, llama.bias) == (True, False)
    assert TransformerConfig.llama(**sizes, bias=True).bias


def test_xavier_init_is_that_of_each_projection_by_itself(seed):
    torch.manual_seed(seed)
    config = replace(LLAMA, init="xavier", bias=True, num_layers=1)
    model = ParallelTransformer(config, group=TPGroup(None, 0, 1))
    found = unpacked(model, dict(model.named_parameters()))
    for name, param in found.items():
        if name.endswith("bias"):
            assert (param == 0).all(), name
        elif "norm" in name:
            assert (param == 1).all(), name
        elif name != "embedding.weight":
            bound = (6 / sum(param.shape)) ** 0.5
            assert 0.5 * bound < param.abs().max() <= bound, name
    assert abs(found["embedding.weight"].std() - 1) < 0.4
