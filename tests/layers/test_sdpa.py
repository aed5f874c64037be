"""The order in which torch's attention asks its back ends."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.compare import assert_within_rule
from tpfused import KVCache, ParallelAttention, ParallelTransformer, TransformerConfig
from tpfused.group import TPGroup
from tpfused.layers import sdpa
from tpfused.layers.sdpa import LEAST_TOKENS, ORDER, cudnn_first
from tpfused.overlap.tiers import tier, wanted

order = torch._C._get_sdp_priority_order
CUDNN, FLASH = int(SDPBackend.CUDNN_ATTENTION), int(SDPBackend.FLASH_ATTENTION)


def test_the_order_is_set_and_put_back():
    usual = order()
    with sdpa._CUDNN_FIRST:
        assert order()[: len(ORDER)] == [int(backend) for backend in ORDER] and sorted(order()) == sorted(usual)
        with sdpa._CUDNN_FIRST:
            pass
    with pytest.raises(KeyError), sdpa._CUDNN_FIRST:
        raise KeyError
    assert order() == usual


def test_the_callers_order_and_switches_stay():
    usual = order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        own = order()
        with sdpa._CUDNN_FIRST:
            assert order() == own != usual
            assert set(sdpa._enabled()) == {SDPBackend.MATH, SDPBackend.FLASH_ATTENTION}
        assert order() == own


def test_an_order_that_is_the_wanted_one_already_stays():
    """As torch's own becomes on some GPUs, when attention first runs."""
    with sdpa_kernel(list(ORDER), set_priority=True):
        own = order()
        with sdpa._CUDNN_FIRST:
            assert order() == own == sdpa._CUDNN_FIRST.wanted
        assert order() == own


def test_what_is_not_for_cudnn_is_left_to_torch():
    q = torch.ones(1, 2, LEAST_TOKENS, 64, dtype=torch.bfloat16)
    usual = order()
    with cudnn_first(q, q, None):
        assert order() == usual


@pytest.mark.parametrize("plain", ["backend", "tier", None])
@pytest.mark.parametrize("cached", [False, True])
def test_the_plain_path_is_torchs_order_and_no_shared_heads(plain, cached, monkeypatch):
    """By the layer's backend as by the tier; as if the tensors were on a GPU."""

    def runs_kernels(x, backend=None, what=None):
        return backend is None and wanted[-1] != "reference"

    @contextmanager
    def cudnn():
        inside.append(True)
        yield
        inside.clear()

    def attend(q, k, v, **options):
        seen.append((options["enable_gqa"], bool(inside)))
        return torch.zeros_like(q)

    inside, seen = [], []

    monkeypatch.setattr(sdpa, "runs_kernels", runs_kernels)
    monkeypatch.setattr(sdpa, "_CUDNN_FIRST", cudnn())
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    config = TransformerConfig.llama(
        vocab_size=8, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=8, max_positions=LEAST_TOKENS,
        backend="reference" if plain == "backend" else None,
    )  # fmt: skip
    model = ParallelTransformer(config, group=TPGroup(None, 0, 1), dtype=torch.bfloat16).eval()
    cache = KVCache(model, 1, LEAST_TOKENS) if cached else None
    with torch.no_grad(), tier("reference" if plain == "tier" else "measured"):
        model(torch.zeros(1, LEAST_TOKENS, dtype=torch.int64), cache=cache)
    assert seen == [(plain is None, plain is None)]


def test_compiled(monkeypatch):
    """The order is in the graph, of the back ends that are on."""
    monkeypatch.setattr(sdpa, "cudnn_first", lambda q, k, backend: sdpa_kernel(sdpa._enabled(), set_priority=True))

    def attend(q):
        with sdpa.cudnn_first(q, q, None):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 8, 16)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(q), attend(q))


gpu = pytest.mark.gpu


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


def chosen(q, k, v):
    with cudnn_first(q, k, None):
        return torch._fused_sdp_choice(q, k, v, is_causal=q.shape[2] == k.shape[2])


@gpu
def test_which_back_end_runs(device):
    q, k, v = torch.randn(3, 2, 4, 2 * LEAST_TOKENS, 128, device=device, dtype=torch.bfloat16).unbind()
    usual = order()
    if torch.cuda.get_device_capability(device)[0] >= 9:
        assert chosen(q, k, v) == CUDNN
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            assert chosen(q, k, v) == FLASH
    few = q[:, :, : LEAST_TOKENS - 1], k[:, :, : LEAST_TOKENS - 1], v[:, :, : LEAST_TOKENS - 1]
    for other in (few, (q[:, :, :1], k, v), (q.float(), k.float(), v.float())):
        with torch.no_grad():
            assert chosen(*other) == torch._fused_sdp_choice(*other, is_causal=other[0].shape[2] == other[1].shape[2])
    wide = (x.repeat(1, 1, 1, 3) for x in (q, k, v))  # more features a head than cuDNN or flash take
    assert chosen(*wide) not in (CUDNN, FLASH)
    assert order() == usual


@gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_attention_by_cudnn(device, sequence_dim, kv_heads):
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

    actual = results(layer, x, grad)
    with sdpa_kernel(SDPBackend.MATH):
        eager = results(layer, x, grad)
        expected = results(layer.double(), x.double(), grad.double())
    for index, values in enumerate(zip(actual, expected, eager, strict=True)):
        assert_within_rule(*values, lambda whole: whole, f"result {index}", chain=True)
