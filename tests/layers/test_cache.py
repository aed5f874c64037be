"""Incremental decoding with a cache against the dense model that computes all tokens anew."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.compare import Block, assert_close, assert_within_rule, refuses
from tests.layers.cached import CONFIGS, GPT, LLAMA, TOKENS, configs, in_parts, make, modes
from tests.layers.test_transformer import draw_ids
from tpfused import KVCache, ParallelTransformer, reference


@torch.no_grad()
def check_logits(ctx, tp, mode, seed, name):
    """Every position's, however the tokens come: prompts, several tokens, single ones, after going back, over again."""
    block, config = Block(ctx, tp, mode, seed), CONFIGS[name]
    model, whole = make(block, config)
    ids = draw_ids(block, config, TOKENS)
    expected = block.own(reference.transformer(ids, whole, config), -1)
    cache = KVCache(model, 2, TOKENS)
    assert cache.keys.shape == (2, 2, max(1, (config.num_kv_heads or 4) // tp), TOKENS, 2)
    for sizes in ([1] * TOKENS, [4, 3, 1, 1], [TOKENS]):
        cache.length = 0
        assert_close(in_parts(model, cache, ids, sizes), expected, f"{name} in parts {sizes}")
        assert cache.length == TOKENS
    cache.length = 3
    assert_close(model(ids[:, 3:7], cache=cache, last_only=True), expected[:, 6:7], name)
    cache.length, cache.fixed = 0, True  # under a mask, as in a graph
    assert_close(in_parts(model, cache, ids, [4, 3, 1, 1]), expected, f"{name}, fixed")
    assert cache.length == TOKENS


def check_inference_mode(ctx, tp, seed):
    """What is made under inference mode serves outside, and the other way round, and gives the same."""
    block = Block(ctx, tp, "group", seed)
    for name in ("llama", "gpt"):
        model, _ = make(block, CONFIGS[name])
        ids, found = draw_ids(block, CONFIGS[name], TOKENS), []
        for made, called in product((torch.no_grad, torch.inference_mode), repeat=2):
            with made():
                cache = KVCache(model, 2, TOKENS, padding=torch.tensor([0, 1], device=block.device))
                model(ids[:, :4], cache=cache)
            assert not any(kept.is_inference() for kept in (cache.keys, cache.values, cache.padding))
            cache.length = 3
            cache.length += 1
            with called():
                found.append(in_parts(model, cache, ids[:, 4:], [1, 3, 1]).clone())
            assert cache.length == cache._device_length.item() == TOKENS
        assert all(torch.equal(out, found[0]) for out in found)


@torch.no_grad()
def check_float32(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    for config in (GPT, LLAMA):
        config = replace(config, hidden_size=32, head_dim=8, ffn_size=64)
        model, whole = make(block, config, torch.float32)
        ids = draw_ids(block, config, TOKENS)
        exact = {key: value.double() for key, value in whole.items()}
        expected, eager = (reference.transformer(ids, state, config) for state in (exact, whole))
        out = in_parts(model, KVCache(model, 2, TOKENS), ids, [4, 3, 1, 1])
        assert_within_rule(out, expected, eager, lambda value: block.own(value, -1), str(config), chain=True)
        out = in_parts(model, KVCache(model, 2, TOKENS, dtype=torch.bfloat16), ids, [4, 3, 1, 1])
        torch.testing.assert_close(out.double(), block.own(expected, -1), atol=0.05, rtol=0.05)


@torch.no_grad()
def check_graph(ctx, tp, seed, name, with_padding):
    """One step's graph, replayed for all tokens. Without a GPU: the step as it would be captured."""
    block, config = Block(ctx, tp, "group", seed), CONFIGS[name]
    model, whole = make(block, config)
    ids = draw_ids(block, config, TOKENS)
    padding = torch.tensor([0, 2], device=ctx.device) if with_padding else None
    cache = KVCache(model, 2, TOKENS + 2, padding=padding)
    expected = in_parts(model, cache, ids, [TOKENS])
    if padding is None:
        assert_close(expected, block.own(reference.transformer(ids, whole, config), -1))

    cache.length = 0
    model(ids[:, :4], cache=cache)
    token = ids[:, 3:4].clone()
    if ctx.device.type == "cuda":
        cache.fixed = True
        for _ in range(2):
            model(token, cache=cache)
        cache.length, graph = 4, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(token, cache=cache)
        assert cache.length == 4
    for index in range(4, TOKENS):
        token.copy_(ids[:, index : index + 1])
        if ctx.device.type == "cuda":
            graph.replay()
        else:
            with patch.object(KVCache, "captured", lambda self: True):
                logits = model(token, cache=cache)
        cache.length += 1
        assert_close(logits[:, 0], expected[:, index], f"{name}, token {index}")


@torch.no_grad()
def check_refusals(ctx, tp, mode):
    block = Block(ctx, tp, mode, 0)
    place = {"device": ctx.device, **block.place}
    model = ParallelTransformer(GPT, **place).eval()
    ids = draw_ids(block, GPT, 5)
    for other in (torch.nn.Linear(2, 2), None, GPT, model.blocks[0]):
        with refuses(TypeError, "KVCache", "ParallelTransformer", type(other).__name__):
            KVCache(other, 2, 8)
    KVCache(torch.compile(model), 2, 8)
    for args, told in (((2, 17), (17, 16)), ((0, 8), ("batch", 0)), ((2, -1), ("max_tokens", -1))):
        with refuses(ValueError, *told):
            KVCache(model, *args)
    with refuses(TypeError, "batch", "float"):
        KVCache(model, 2.0, 8)
    with refuses(ValueError, "causal"):
        KVCache(ParallelTransformer(replace(GPT, causal=False), **place), 2, 8)
    with refuses(TypeError, "padding", torch.bool):
        KVCache(model, 2, 8, padding=torch.ones(2, dtype=torch.bool))
    with refuses(ValueError, "padding", (3,)):
        KVCache(model, 2, 8, padding=ids.new_zeros(3))
    for wrong in (-3, 8):
        with refuses(ValueError, "padding", wrong, "max_tokens 8"):
            KVCache(model, 2, 8, padding=ids.new_tensor([0, wrong]))
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with refuses(TypeError, dtype):
            KVCache(model, 2, 8, dtype=dtype)
    with refuses(TypeError, "padding", "sparse"):
        KVCache(model, 2, 8, padding=ids.new_zeros(2).to_sparse())
    with refuses(ValueError, "padding", "meta"):
        KVCache(model, 2, 8, padding=ids.new_zeros(2, device="meta"))
    with refuses(TypeError, "padding", "ndarray"):
        KVCache(model, 2, 8, padding=np.zeros(2, dtype=np.int64))
    for odd in ("x", 3, ids):
        with refuses(TypeError, "dtype", repr(odd)):
            KVCache(model, 2, 8, dtype=odd)

    cache = KVCache(model, 2, 8)
    hidden, part = torch.zeros(1, 2, 8, device=ctx.device), cache.extend(1)[0]
    for odd in ("x", 3, [part], part, ids):
        with refuses(TypeError, "cache", "KVCache", type(odd).__name__):
            model(ids, cache=odd)
    for odd in ("x", 3, [part], cache, ids):
        for layer in (model.blocks[0], model.blocks[0].attention):
            with refuses(TypeError, "cache", "LayerCache", type(odd).__name__):
                layer(hidden, cache=odd)
    model(ids, cache=cache)
    with refuses(ValueError, 5, 4, 8):
        model(ids[:, :4], cache=cache)
    with refuses(ValueError, 0):
        model(ids[:, :0], cache=cache)
    with refuses(ValueError, (1, 1), 2):
        model(ids[:1, :1], cache=cache)
    with refuses(ValueError, "padding"):
        model(ids[:, :1], ids[:, :1] > 0, cache=cache)
    with refuses(TypeError, "last_only", "no"):
        model(ids, last_only="no")
    with refuses(ValueError, "last_only"):
        model(ids, last_only=True)
    with refuses(TypeError, "length", 1.0):
        cache.length = 1.0
    for length in (-1, 9):
        with refuses(ValueError, length, 8):
            cache.length = length
    with refuses(ValueError, "num_layers=2", "num_layers=1"):
        ParallelTransformer(replace(GPT, num_layers=1), **place).eval()(ids[:, :1], cache=cache)
    with torch.enable_grad(), refuses(ValueError, "inference_mode"):
        model(ids[:, :1], cache=cache)
    with refuses(ValueError, "eval"):
        model.train()(ids[:, :1], cache=cache)
    assert cache.length == 5
    model.eval()
    with refuses(ValueError, (2, 1), (2, 2)):
        model.blocks[0](torch.zeros(2, 2, 8, device=ctx.device), cache=cache.extend(1)[0])
    for options in ({"sequence_parallel": True}, {"causal": False}):
        other = ParallelTransformer(replace(GPT, **options), **place).blocks[0].attention
        with refuses(ValueError, "causal", "sequence_parallel"):
            other(torch.zeros(1, 2, 8, device=ctx.device), cache=cache.extend(1)[0])


@modes
@configs
def test_logits_equal_those_of_all_tokens_at_once(workers, tp, mode, seed, name):
    workers.run(check_logits, tp, mode, seed, name)


def test_a_cache_of_inference_mode_serves_outside(workers, tp, seed):
    workers.run(check_inference_mode, tp, seed)


def test_float32_obeys_the_tolerance(workers, tp, seed):
    workers.run(check_float32, tp, seed)


@pytest.mark.parametrize("with_padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["gpt", "llama", "llama-one-kv-head", "llama-sequence-parallel"])
def test_a_step_can_be_a_graph(workers, tp, seed, name, with_padding):
    workers.run(check_graph, tp, seed, name, with_padding)


@modes
def test_bad_input_is_refused_before_any_collective(workers, tp, mode):
    workers.run(check_refusals, tp, mode)
