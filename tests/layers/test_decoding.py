"""A decoding step: its token's residuals and norms go into all-reduces, and its attention is a kernel."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.compare import Block, assert_within_rule, unpacked
from tests.layers.cached import GPT, LLAMA, TOKENS, in_parts, make
from tests.layers.test_transformer import draw_ids
from tests.overlap.test_operations import forced
from tpfused import ParallelTransformer, reference
from tpfused.group import TPGroup
from tpfused.layers import cache as cache_module
from tpfused.layers.cache import KVCache
from tpfused.layers.norm import Norm
from tpfused.overlap import calls
from tpfused.overlap.tiers import deterministic


class Joined:
    """A model in float32 whose steps are to be right, and how many of their sums are joined with a norm."""

    def __init__(self, ctx, tp, block, config):
        self.ctx, self.tp, self.block, self.config = ctx, tp, block, config
        self.model, whole = make(block, config, torch.float32)
        self.ids = draw_ids(block, config, TOKENS)
        exact = {key: value.double() for key, value in whole.items()}
        self.expected, self.eager = (reference.transformer(self.ids, state, config) for state in (exact, whole))

    def check(self, joined, model=None):
        model, call = model or self.model, calls.matmul_all_reduce_norm
        with forced(self.ctx, self.tp, "p2p"), patch.object(calls, "matmul_all_reduce_norm", side_effect=call) as fused:
            out = in_parts(model, KVCache(model, 2, TOKENS), self.ids, [4, 3, 1, 1])
        assert fused.call_count == (2 * 2 * self.config.num_layers if joined and self.tp > 1 else 0)
        own = self.block.own
        assert_within_rule(out, self.expected, self.eager, lambda value: own(value, -1), str(self.config), chain=True)


@torch.no_grad()
def check_joined_sums(ctx, tp, seed):
    """A single token's residuals and norms go into its all-reduces, unless somebody listens to what that leaves out."""
    block, heard = Block(ctx, tp, "group", seed), []
    for config in (GPT, LLAMA, replace(GPT, sequence_parallel=True), replace(LLAMA, sequence_dim=1)):
        config = replace(config, hidden_size=32, head_dim=8, ffn_size=64)
        case = Joined(ctx, tp, block, config)
        model, last = case.model, case.model.blocks[1]
        case.check(joined=True)
        with deterministic():
            case.check(joined=False)
        for module in (model.norm, last, last.attention, last.attention.out, last.mlp, last.mlp_norm):
            handle = module.register_forward_hook(lambda module, args, out: heard.append(out))
            case.check(joined=False)
            handle.remove()
            assert len(heard) == 4 and all(isinstance(out, torch.Tensor) for out in heard)
            heard.clear()
        for register in (register_module_forward_hook, register_module_forward_pre_hook):
            handle = register(lambda module, *passed: heard.append(module) if isinstance(module, Norm) else None)
            case.check(joined=False)
            handle.remove()
            assert heard.count(model.norm) == heard.count(last.mlp_norm) == 4
            heard.clear()
        own = last.mlp_norm.forward
        last.mlp_norm.forward = lambda x, own=own: heard.append(x) or own(x)
        case.check(joined=False)
        assert len(heard) == 4
        heard.clear()
        del last.mlp_norm.forward
        case.check(joined=True)
        plain = ParallelTransformer(replace(config, backend="reference"), device=ctx.device, **block.place).eval()
        plain.load_state_dict(model.state_dict())
        case.check(joined=False, model=plain)
        assert {part.backend for part in plain.modules() if hasattr(part, "backend")} == {"reference"}


def test_sums_joined_with_norms(workers, tp, seed):
    workers.run(check_joined_sums, tp, seed)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def half(request):
    """A device, and a dtype of 16 bits that kernels take there: the interpreter, on the CPU, knows no bfloat16."""
    on_gpu = request.param == "cuda"
    if on_gpu != torch.cuda.is_available():
        pytest.skip("no GPU" if on_gpu else "the interpreter is for machines without a GPU")
    return torch.device(request.param), torch.bfloat16 if on_gpu else torch.float16


@pytest.mark.parametrize("with_padding", [False, True])
@torch.no_grad()
def test_the_kernel_for_one_token(half, seed, monkeypatch, with_padding):
    """What a GPU decodes by, eagerly and in a graph, against the dense model in float64 and attention of torch's."""
    device, dtype = half
    tolerance = 20 * torch.finfo(dtype).eps
    torch.manual_seed(seed)
    config = replace(LLAMA, hidden_size=32, head_dim=16, ffn_size=64, max_positions=96)
    model = ParallelTransformer(config, group=TPGroup(None, 0, 1), device=device, dtype=dtype).eval()
    for block in model.blocks:
        for param in block.attention.parameters():
            param.mul_(3)  # as drawn, what attention does to the logits is hardly more than rounding
    ids, prompt = torch.randint(13, (2, 90), device=device), 80  # more than the kernel reads at a time
    padding = torch.tensor([0, 3], device=device) if with_padding else None

    def steps(backend, fixed):
        """The logits of the tokens behind the prompt, each of a step of its own."""
        cache = KVCache(model, 2, 96, padding=padding)
        for block in model.blocks:
            block.attention.backend = backend
        model(ids[:, :prompt], cache=cache)
        cache.fixed, graph, logits = fixed, None, []
        token = ids[:, :1].clone()
        for index in range(prompt, ids.shape[1]):
            token.copy_(ids[:, index : index + 1])
            if fixed and device.type == "cuda" and index == prompt + 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = model(token, cache=cache)
            if graph is None:
                out = model(token, cache=cache)
            else:
                graph.replay()
                cache.length += 1
            logits.append(out.clone())
        return torch.cat(logits, dim=1)

    plain = steps("reference", False)
    used, kernel = [], cache_module.decode_attention
    monkeypatch.setattr(cache_module, "decode_attention", lambda *args: used.append(1) or kernel(*args))
    if device.type == "cpu":
        monkeypatch.setattr(cache_module, "why_plain", lambda x, backend: backend or "")
    for fixed in (False, True):
        found = steps(None, fixed)
        assert used and found.dtype == dtype
        torch.testing.assert_close(found, plain, atol=tolerance, rtol=tolerance)
    used.clear()
    monkeypatch.setattr(cache_module, "MOST_HEADS", 3)  # of four: torch's attention
    torch.testing.assert_close(steps(None, True), plain, atol=tolerance, rtol=tolerance)
    assert not used
    if padding is None:
        state = {name: value.double() for name, value in model.named_parameters()}
        exact = reference.transformer(ids, unpacked(model, state), config)[:, prompt:]
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)
