"""A model of one's own, of which each module has a style, and what is asked of it in parts."""

import torch
import torch.nn.functional as F
from torch import nn

import tpfused
from tests.compare import assert_close
from tests.parallelize.models import whole

HEADS, KV_HEADS, WIDTH = 4, 2, 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, KV_HEADS
        self.q = nn.Linear(20, HEADS * WIDTH)
        self.k = nn.Linear(20, KV_HEADS * WIDTH)
        self.v = nn.Linear(20, KV_HEADS * WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 20)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (heads, WIDTH)).transpose(1, 2)
            for layer, heads in ((self.q, self.num_heads), (self.k, self.num_key_value_heads))
            + ((self.v, self.num_key_value_heads),)
        )
        out = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.qkv = nn.Linear(20, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 20, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, WIDTH)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(20, 2 * 28)
        self.down = nn.Linear(28, 20)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Model(nn.Module):
    """All styles, a bare parameter, a parameter that gets no gradient, and a tied table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 20, padding_idx=3)
        self.scale = nn.Parameter(torch.randn(20))
        self.layers = nn.ModuleList([Attention(), FusedAttention(), GatedMLP()])
        self.norm = nn.LayerNorm(20)
        self.extra = nn.Linear(20, 20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(self.extra(x) + self.frozen(x))


PLAN = {
    "embed": "vocab_embedding",
    "layers.0": "attention",
    "layers.1": "attention",
    "layers.*.q": "colwise",
    "layers.*.[kv]": "colwise_kv",
    "layers.0.norm": "replicate_sum",
    "layers.*.qkv": "fused_qkv",
    "*.out": "rowwise",
    "gate_up": "fused_gate_up",
    "layers.*.down": "rowwise",
    "extra": "colwise_gather",
    "head": "colwise_gather",
}


def dense_model(ctx, tp, seed) -> Model:
    torch.manual_seed(seed + ctx.rank // tp)
    return Model().to(ctx.device, torch.float64)


def check_equals(ctx, dense, model):
    ids = torch.randint(37, (2, 7), device=ctx.device)
    grad = torch.randn(2, 7, 37, dtype=torch.float64, device=ctx.device)
    expected, actual = dense(ids), model(ids)
    assert_close(actual, expected, "the output")
    expected.backward(grad)
    actual.backward(grad)
    found = dict(model.named_parameters())
    for name, param in dense.named_parameters():
        if param.grad is None:
            assert found[name].grad is None and not found[name].requires_grad
        else:
            assert_close(whole(found[name].grad, param), param.grad, f"the gradient of {name}")
    norms = [tpfused.clip_grad_norm_(m.parameters(), 1.0) for m in (dense, model)]
    assert_close(norms[1], norms[0], "the norm")


def on_four(ctx, check, seed):
    torch.manual_seed(seed)
    if ctx.world == 4:
        check(ctx, seed)
