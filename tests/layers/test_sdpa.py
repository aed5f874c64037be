"""What torch's attention is asked for: shared heads where a back end has them, whichever that is."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.compare import assert_within_rule
from tpfused import KVCache, ParallelAttention, ParallelTransformer, TransformerConfig, explain
from tpfused.group import TPGroup
from tpfused.layers import sdpa
from tpfused.overlap.tiers import tier, wanted

TOKENS = 16
BACK_ENDS = None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION


@pytest.mark.parametrize("plain", ["backend", "tier", None])
@pytest.mark.parametrize("cached", [False, True])
def test_the_plain_path_shares_no_heads(plain, cached, monkeypatch):
    """By the layer's backend as by the tier; as if the tensors were on a GPU."""

    def runs_kernels(x, backend=None, what=None):
        return backend is None and wanted[-1] != "reference"

    def attend(q, k, v, **options):
        seen.append(options["enable_gqa"])
        return torch.zeros_like(q)

    seen = []
    monkeypatch.setattr(sdpa, "runs_kernels", runs_kernels)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    config = TransformerConfig.llama(
        vocab_size=8, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=8, max_positions=TOKENS,
        backend="reference" if plain == "backend" else None,
    )  # fmt: skip
    model = ParallelTransformer(config, group=TPGroup(None, 0, 1), dtype=torch.bfloat16).eval()
    cache = KVCache(model, 1, TOKENS) if cached else None
    with torch.no_grad(), tier("reference" if plain == "tier" else "measured"):
        model(torch.zeros(1, TOKENS, dtype=torch.int64), cache=cache)
    assert seen == [plain is None]


gpu = pytest.mark.gpu


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("by", BACK_ENDS, ids=lambda by: "torch" if by is None else by.name)
def test_attention_by_each_back_end(device, by, sequence_dim, kv_heads):
    """Output and gradients, in both layouts, beside the one that keeps all scores."""
    options = {"causal": True, "sequence_dim": sequence_dim, "group": TPGroup(None, 0, 1), "device": device}
    torch.manual_seed(0)
    layer = ParallelAttention(256, 4, kv_heads, **options, dtype=torch.bfloat16)
    x = torch.randn(*((1024, 2) if sequence_dim == 0 else (2, 1024)), 256, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)

    def results(module, x, grad):
        x = x.detach().requires_grad_()
        out = module(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad)]

    with nullcontext() if by is None else sdpa_kernel(by):
        actual = results(layer, x, grad)
    with sdpa_kernel(SDPBackend.MATH):
        eager = results(layer, x, grad)
        expected = results(layer.double(), x.double(), grad.double())
    for index, values in enumerate(zip(actual, expected, eager, strict=True)):
        assert_within_rule(*values, lambda whole: whole, f"result {index}", chain=True)


@gpu
def test_hopper_takes_the_faster_back_end(device):
    """The order is torch's own, which may change; cuDNN's takes half of what flash attention does."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("measured on Hopper")
    q, k, v = (torch.randn(1, 8, 8192, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    sdpa.scaled_dot_product_attention(q, k, v, None, True, 0.0).sum().backward()
    told = {row.why: row.runs_by for row in explain().computations if row.what == "attention"}
    assert told["8 heads of 128, 8,192 tokens on 8,192, causal"] == "cudnn (torch)", told
