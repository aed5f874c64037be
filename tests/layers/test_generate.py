"""Generation against the dense model that computes all tokens anew."""

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.compare import Block, assert_close, collectives_made, packed, refuses
from tests.layers.cached import CONFIGS, GPT, LLAMA, configs, in_parts, make, modes
from tests.layers.test_transformer import draw_ids
from tests.overlap.test_operations import forced
from tpfused import KVCache, ParallelTransformer, reference
from tpfused.collectives import all_gather
from tpfused.generation import sample
from tpfused.group import TPGroup, resolve_group
from tpfused.layers import cache as cache_module
from tpfused.overlap import calls

LENGTHS = (5, 2, 1)  # of three prompts


def dense_greedy(ids, whole, config, new_tokens):
    for _ in range(new_tokens):
        logits = reference.transformer(ids, whole, config)[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids


def padded(prompts, tokens):
    """Prompts of different lengths on the right of ``[prompts, tokens]``, and the mask that says where they are."""
    ids = torch.stack([torch.cat((prompt.new_zeros(tokens - len(prompt)), prompt)) for prompt in prompts])
    first = torch.tensor([tokens - len(prompt) for prompt in prompts], device=ids.device)
    return ids, torch.arange(tokens, device=ids.device) >= first[:, None]


@torch.no_grad()
def check_padding(ctx, tp, seed, name):
    """Prompts side by side give each one's own logits and tokens."""
    block, config = Block(ctx, tp, "group", seed), CONFIGS[name]
    model, whole = make(block, config)
    prompts = [draw_ids(block, config, length, 1)[0] for length in LENGTHS]
    ids, mask = padded(prompts, max(LENGTHS))
    out = model.generate(ids, 4, mask=mask)
    cache = KVCache(model, len(prompts), max(LENGTHS) + 4, padding=(~mask).sum(-1))
    logits = in_parts(model, cache, out, [4, 1, 2, 1, 1])
    for prompt, tokens, got in zip(prompts, out, logits, strict=True):
        alone = dense_greedy(prompt[None], whole, config, 4)
        assert torch.equal(tokens[-alone.shape[1] :], alone[0])
        assert_close(got[-alone.shape[1] :], block.own(reference.transformer(alone, whole, config), -1)[0])


def check_greedy(ctx, tp, mode, seed, name):
    block, config = Block(ctx, tp, mode, seed), CONFIGS[name]
    model, whole = make(block, config)
    model.train()
    model.blocks[0].mlp.eval()
    ids = draw_ids(block, config, 5)
    out = model.generate(ids, 6)
    assert torch.equal(out, dense_greedy(ids, whole, config, 6))
    assert torch.equal(model.generate(ids.int(), 6), out.int())
    assert [part.training for part in (model, model.norm, model.blocks[0].mlp)] == [True, True, False]
    assert model.blocks[1].attention.out.sequence_parallel == config.sequence_parallel
    model.loss(out, out.long()).backward()  # what came out can be trained on


@torch.no_grad()
def check_fused_greedy(ctx, tp, seed, name, dtype):
    """Where the dense model's best logits differ by more than rounding does, the fused kernels take its token too."""
    block = Block(ctx, tp, "group", seed)
    config = replace(CONFIGS[name], hidden_size=32, head_dim=16, ffn_size=64)
    model, whole = make(block, config, dtype)
    ids, join, attend = draw_ids(block, config, 5), calls.matmul_all_reduce_norm, cache_module.decode_attention
    with (
        forced(ctx, tp, "p2p") if tp > 1 else nullcontext(),  # one rank has no tier, but the kernel for one token
        patch.object(calls, "matmul_all_reduce_norm", side_effect=join) as joined,
        patch.object(cache_module, "decode_attention", side_effect=attend) as attended,
    ):
        out = model.generate(ids, 6)
    blocks = config.num_layers * 5  # of all steps but the prompt's
    assert joined.call_count == (2 * blocks if tp > 1 else 0)
    assert attended.call_count == (blocks if ctx.device.type == "cuda" and dtype.itemsize == 2 else 0)
    assert torch.equal(out[:, :5], ids)
    # Each token after those that were taken, not after the dense model's: one tie would change all that follow.
    exact = {key: value.double() for key, value in whole.items()}
    logits = reference.transformer(out[:, :-1], exact, config)[:, 4:]
    behind = logits.amax(-1) - logits.gather(-1, out[:, 5:, None]).squeeze(-1)
    assert behind.max() <= 20 * torch.finfo(dtype).eps * logits.abs().max()


def check_sampling(ctx, tp, seed):
    """One seed gives one result, which is the dense model's; ranks that were seeded apart still agree."""
    block = Block(ctx, tp, "group", seed)
    for config in (replace(GPT, vocab_size=50257), replace(LLAMA, sequence_parallel=True)):
        model, whole = make(block, config)
        alone = ParallelTransformer(config, group=TPGroup(None, 0, 1), device=ctx.device, dtype=torch.float64)
        alone.load_state_dict(packed(alone, whole))
        ids = draw_ids(block, config, 3)
        for options in ({}, {"top_p": 0.6}):

            def draw(model, ids=ids, options=options):
                generator = torch.Generator(ctx.device).manual_seed(block.seed)
                return model.generate(ids, 8, temperature=0.7, generator=generator, **options)

            out = draw(model)
            assert torch.equal(out, draw(model)) and torch.equal(out, draw(alone))
            torch.manual_seed(block.seed + ctx.rank)
            out = model.generate(ids, 8, temperature=2.0, **options)
            assert len(all_gather(out[None], 0, tp, resolve_group(block.group)).unique(dim=0)) == 1
        assert not torch.equal(model.generate(ids, 8, temperature=100.0), model.generate(ids, 8))
        assert torch.equal(model.generate(ids, 8, temperature=1e-30), model.generate(ids, 8))
        assert torch.equal(model.generate(ids, 8, temperature=None, top_p=None), model.generate(ids, 8))
        assert torch.equal(model.generate(ids, 8, temperature=5.0, top_p=1e-9), model.generate(ids, 8))


def check_eos(ctx, tp, seed):
    """An ended sequence repeats it, and all end together once the last one has."""
    block = Block(ctx, tp, "group", seed)
    model, _ = make(block, GPT)
    ids = draw_ids(block, GPT, 3, batch=4)
    free = model.generate(ids, 10)
    for eos_id in range(GPT.vocab_size):
        out = model.generate(ids, 10, eos_id=eos_id)
        expected = free.clone()
        for row in expected:
            ends = (row[3:] == eos_id).nonzero()
            if len(ends):
                row[3 + ends[0] :] = eos_id
        longest = max([3 + int((row[3:] != eos_id).sum()) for row in expected])
        assert torch.equal(out, expected[:, : min(longest + 1, 13)]), eos_id


def check_counts(ctx, tp):
    """A greedy step: the embedding's all-reduce, two a block, and one small all-gather for the token."""
    block = Block(ctx, tp, "group", 0)
    place = {"device": ctx.device, "dtype": torch.float64, **block.place}  # which no operation overlaps
    model = ParallelTransformer(replace(LLAMA, sequence_parallel=True), **place)
    with collectives_made() as names:
        model.generate(draw_ids(block, LLAMA, 3), 2)
    assert names == (["all_reduce"] * 5 + ["all_gather"]) * 2 * (tp > 1)


@torch.no_grad()
def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)
    model = ParallelTransformer(GPT, device=ctx.device, **block.place).eval()
    ids = draw_ids(block, GPT, 5)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with refuses(TypeError, "mask", "sparse"):
        model.generate(ids, 2, mask=mask.to_sparse())
    for error, told, args, options in (
        (ValueError, (5, 12, 16), (ids, 12), {}),
        (ValueError, ("max_new_tokens", 0), (ids, 0), {}),
        (TypeError, ("max_new_tokens", "float"), (ids, 2.0), {}),
        (TypeError, (torch.float32,), (ids.float(), 2), {}),
        (ValueError, ((5,),), (ids[0], 2), {}),
        (ValueError, ((2, 0),), (ids[:, :0], 2), {}),
        (ValueError, (13, "[0, 13)"), (ids.clone().fill_(13), 2), {}),
        (ValueError, ("meta",), (ids, 2), {"mask": mask.to("meta")}),
        (ValueError, ((2, 4), (2, 5)), (ids, 2), {"mask": mask[:, 1:]}),
        (TypeError, (torch.int64,), (ids, 2), {"mask": mask.long()}),
        (ValueError, ("left",), (ids, 2), {"mask": mask.tril(3)}),
        (ValueError, ("left",), (ids, 2), {"mask": torch.zeros_like(mask)}),
        (ValueError, ("temperature", -1.0), (ids, 2), {"temperature": -1.0}),
        (ValueError, ("temperature", "nan"), (ids, 2), {"temperature": float("nan")}),
        (ValueError, ("top_p", 0.0), (ids, 2), {"temperature": 1.0, "top_p": 0.0}),
        (ValueError, ("top_p", 1.5), (ids, 2), {"temperature": 1.0, "top_p": 1.5}),
        (ValueError, ("top_p 0.9", "temperature above 0"), (ids, 2), {"top_p": 0.9}),
        (ValueError, ("eos_id", 13, 13), (ids, 2), {"eos_id": 13}),
        (TypeError, ("generator", "str"), (ids, 2), {"generator": "x"}),
        (TypeError, ("generator", "int"), (ids, 2), {"generator": 0, "temperature": 1.0}),
        (TypeError, ("ids", "ndarray"), (np.zeros((2, 5), dtype=np.int64), 2), {}),
        (TypeError, ("mask", "ndarray"), (ids, 2), {"mask": np.ones((2, 5), dtype=bool)}),
    ):
        with refuses(error, *told):
            model.generate(*args, **options)
    if ctx.device.type != "cpu":
        with refuses(ValueError, "generator", "cpu", ctx.device):
            model.generate(ids, 2, temperature=1.0, generator=torch.Generator())


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt-sequence-parallel", "llama-one-kv-head"])
def test_prompts_of_different_lengths(workers, tp, seed, name):
    workers.run(check_padding, tp, seed, name)


@modes
@configs
def test_greedy_tokens_are_the_dense_models(workers, tp, mode, seed, name):
    workers.run(check_greedy, tp, mode, seed, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@configs
def test_greedy_tokens_of_fused_kernels(workers, tp, seed, name, dtype):
    workers.run(check_fused_greedy, tp, seed, name, dtype)


def test_sampling_repeats_and_agrees(workers, tp, seed):
    workers.run(check_sampling, tp, seed)


def test_ended_sequences(workers, tp, seed):
    workers.run(check_eos, tp, seed)


def test_collectives_of_a_step(workers, tp):
    workers.run(check_counts, tp)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)


def test_draws_follow_the_probabilities(seed):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(40_000, -1)
    generator = torch.Generator().manual_seed(seed)
    for temperature, top_p, weights in (
        (1.0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (0.5, 1.0, [0.01, 0.16, 0.04, 0.09]),
        (1.0, 0.65, [0.0, 0.4, 0.0, 0.3]),
        (1.0, 0.75, [0.0, 0.4, 0.2, 0.3]),
        (1.0, 0.3, [0.0, 1.0, 0.0, 0.0]),
    ):
        counts = sample(logits, temperature, top_p, generator).bincount(minlength=4)
        expected = torch.tensor(weights) / sum(weights)
        assert ((counts / len(logits)) - expected).abs().max() < 0.02  # six standard deviations and more
        assert (counts[expected == 0] == 0).all()


def test_a_layer_in_a_wrapper_has_its_own_switches_afterwards():
    """Which the wrapper gives for its own, but keeps what it is given itself."""
    model = ParallelTransformer(CONFIGS["llama-sequence-parallel"])
    attention = model.blocks[0].attention
    model.blocks[0].attention = wrapper = checkpoint_wrapper(attention)
    model.generate(torch.zeros(1, 2, dtype=torch.int64), 2)
    assert attention.sequence_parallel and "sequence_parallel" not in vars(wrapper)
