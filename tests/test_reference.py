"""The dense reference against torch's own modules, in float64, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_close
from tpfused import TransformerConfig, reference


@pytest.fixture(autouse=True)
def _random(seed):
    torch.manual_seed(seed)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def assert_same(function, other, *inputs):
    """Both functions' values and gradients for one random gradient."""
    grad, found = None, []
    for f in (function, other):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = f(*leaves)
        grad = torch.randn_like(out) if grad is None else grad
        found.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    for actual, expected in zip(*found, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(
    "name, module",
    [
        (None, nn.Identity()),
        ("gelu", nn.GELU()),
        ("gelu_tanh", nn.GELU("tanh")),
        ("relu", nn.ReLU()),
        ("silu", nn.SiLU()),
    ],
)
def test_activations(name, module):
    assert_same(lambda x: reference.activate(x, name), module, randn(4, 6))
    gate, up = randn(4, 6), randn(4, 6)
    assert_same(
        lambda gate, up: reference.gated_act(torch.stack((gate, up), -1).flatten(-2), name),
        lambda gate, up: module(gate) * up,
        gate,
        up,
    )


def test_norms():
    weight, bias, x = randn(6), randn(6), randn(4, 6)
    assert_same(
        lambda x, w, b: reference.normalize(x, "layernorm", w, b, 1e-3),
        lambda x, w, b: (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt() * w + b,
        x,
        weight,
        bias,
    )
    assert_same(
        lambda x, w: reference.normalize(x, "rmsnorm", w, None, 1e-3),
        lambda x, w: x / (x.square().mean(-1, True) + 1e-3).sqrt() * w,
        x,
        weight,
    )


def test_rotary_turns_pairs_by_an_angle_that_grows_with_the_position():
    positions = torch.tensor([0, 1, 7, 1000])

    def turned(x):
        frequencies = 50.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
        angle = torch.polar(torch.ones(4, 3, dtype=torch.float64), positions[:, None] * frequencies)
        pairs = torch.complex(x[..., :3], x[..., 3:]) * angle
        return torch.cat((pairs.real, pairs.imag), -1)

    x = randn(2, 5, 4, 6)
    assert_same(lambda x: reference.rotary(x, positions, 50.0), turned, x)
    assert_close(reference.rotary(x, positions.expand(2, 1, 4), 50.0), turned(x))


def test_rotary_scores_depend_on_the_distance_only():
    q, k = randn(8).expand(30, 8), randn(8).expand(30, 8)
    q, k = (reference.rotary(x, torch.arange(30), 10000.0) for x in (q, k))
    scores = q @ k.T
    for distance in (0, 3, 12):
        diagonal = scores.diagonal(distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rotary_angles_are_not_rounded_to_the_inputs_dtype():
    x, positions = torch.randn(1000, 64), torch.arange(1000)
    exact = reference.rotary(x.bfloat16().double(), positions, 10000.0)
    rounded = reference.rotary(x.bfloat16(), positions, 10000.0)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.double() - exact).abs() <= exact.abs() * 2**-8 + 2e-4).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_attention_core(causal, kv_heads):
    q, k, v = randn(2, 6, 5, 4), randn(2, kv_heads, 5, 4), randn(2, kv_heads, 5, 4)
    assert_same(
        lambda q, k, v: reference.attention_core(q, k, v, causal=causal),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        q,
        k,
        v,
    )
    keep = torch.rand(2, 1, 5, 5) < 0.7
    keep |= torch.eye(5, dtype=torch.bool)
    both = keep & torch.ones(5, 5, dtype=torch.bool).tril() if causal else keep
    for mask in (keep, torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -torch.inf)):
        assert_same(
            lambda q, k, v, mask=mask: reference.attention_core(q, k, v, mask, causal, scale=0.3),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, both, scale=0.3, enable_gqa=True),
            q,
            k,
            v,
        )


def test_attention_core_gives_zeros_and_finite_gradients_where_nothing_is_attended_to():
    q, k, v = (randn(1, 2, 3, 4).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask[..., 1, :] = False
    out = reference.attention_core(q, k, v, mask)
    assert (out[:, :, 1] == 0).all() and (out[:, :, 0] != 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads) and (grads[0][:, :, 1] == 0).all()


def test_attention_equals_multihead_attention():
    module = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    nn.init.normal_(module.in_proj_bias)
    q, k, v = module.in_proj_weight.chunk(3)
    state = {"q.weight": q, "k.weight": k, "v.weight": v, "out.weight": module.out_proj.weight}
    state |= {f"{name}.bias": bias for name, bias in zip("qkv", module.in_proj_bias.chunk(3), strict=True)}
    state["out.bias"] = module.out_proj.bias
    assert_same(
        lambda x: reference.attention(x, reference.Weights(state), 3, 3, causal=False),
        lambda x: module(x, x, x, need_weights=False)[0],
        randn(2, 5, 12),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, smoothing):
    logits, target = randn(2, 4, 9), torch.randint(9, (2, 4))
    target[0, 1] = 7
    options = {"ignore_index": 7, "label_smoothing": smoothing, "reduction": reduction}
    assert_same(
        lambda logits: reference.cross_entropy(logits, target, **options),
        lambda logits: F.cross_entropy(logits.transpose(1, 2), target, **options),
        logits,
    )
    without, with_z = (reference.cross_entropy(logits, target, z_loss=z, **options) for z in (0.0, 0.5))
    extra = 0.5 * logits.exp().sum(-1).log().square() * (target != 7)
    extra = {"none": extra, "sum": extra.sum(), "mean": extra.sum() / (target != 7).sum()}[reduction]
    assert_close(with_z - without, extra)


def with_unpacked_attention(state):
    """A torch.nn.TransformerEncoder's state under the names of the reference's."""
    renamed = {}
    for name, value in state.items():
        for old, new in (
            ("layers.", "blocks."),
            ("norm1.", "attention_norm."),
            ("norm2.", "mlp_norm."),
            ("linear1.", "mlp.fc1."),
            ("linear2.", "mlp.fc2."),
            ("self_attn.out_proj.", "attention.out."),
            ("self_attn.in_proj_", "attention.qkv."),
        ):
            name = name.replace(old, new)
        if "qkv" in name:
            renamed |= {name.replace("qkv", part): x for part, x in zip("qkv", value.chunk(3), strict=True)}
        else:
            renamed[name] = value
    return renamed


@pytest.mark.parametrize("causal", [False, True])
def test_gpt_style_equals_a_transformer_encoder(causal):
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "ffn_size": 12, "max_positions": 9}
    config = TransformerConfig.gpt(**sizes, causal=causal)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    norm = nn.LayerNorm(8, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    with torch.no_grad():
        for param in encoder.parameters():
            param.add_(0.3 * torch.randn_like(param))
    state = with_unpacked_attention(dict(encoder.named_parameters()))
    state |= {"embedding.weight": randn(11, 8), "positions.weight": randn(9, 8), "head.weight": randn(11, 8)}
    state["head.bias"] = randn(11)
    ids = torch.randint(11, (3, 7))
    future = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1) if causal else None
    x = state["embedding.weight"][ids] + state["positions.weight"][:7]
    expected = encoder(x, future) @ state["head.weight"].T + state["head.bias"]
    assert_close(reference.transformer(ids, state, config), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_style_is_made_of_its_parts(tied):
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_layers": 1, "num_heads": 4, "ffn_size": 6, "max_positions": 9}
    config = TransformerConfig.llama(**sizes, num_kv_heads=2, tie_embeddings=tied, norm_eps=1e-3)
    rows = {"q": 8, "k": 4, "v": 4, "out": 8}
    state = {f"blocks.0.attention.{name}.weight": randn(n, 8) for name, n in rows.items()}
    state |= {f"blocks.0.mlp.{name}.weight": randn(6, 8) for name in ("gate", "up")}
    state |= {"blocks.0.mlp.down.weight": randn(8, 6), "embedding.weight": randn(11, 8)}
    state |= {f"{name}.weight": randn(8) for name in ("blocks.0.attention_norm", "blocks.0.mlp_norm", "norm")}
    if not tied:
        state["head.weight"] = randn(11, 8)
    ids = torch.randint(11, (3, 7))

    def norm(x, name):
        return F.rms_norm(x, (8,), state[f"{name}.weight"], 1e-3)

    def linear(x, name):
        return x @ state[f"blocks.0.{name}.weight"].T

    x = state["embedding.weight"][ids]
    h = norm(x, "blocks.0.attention_norm")
    q, k, v = (linear(h, f"attention.{n}").unflatten(-1, (-1, 2)).transpose(1, 2) for n in "qkv")
    q, k = (reference.rotary(t, torch.arange(7), 10000.0) for t in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + linear(out.transpose(1, 2).flatten(2), "attention.out")
    h = norm(x, "blocks.0.mlp_norm")
    x = x + linear(F.silu(linear(h, "mlp.gate")) * linear(h, "mlp.up"), "mlp.down")
    expected = norm(x, "norm") @ state["embedding.weight" if tied else "head.weight"].T
    assert_close(reference.transformer(ids, state, config), expected)
