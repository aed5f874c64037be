"""FusedScaleMaskSoftmax against plain softmax in float64."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tpfused.compat.megatron import AttnMaskType, FusedScaleMaskSoftmax, softmax
from tpfused.kernels.softmax import scale_mask_softmax

SHAPE = 2, 3, 8, 8
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FLAGS = {torch.float16: (True, False), torch.bfloat16: (False, True), torch.float32: (False, False)}


def mask_func(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def make(dtype=torch.float32, kind=AttnMaskType.padding, fusion=True, scale=None, **options):
    return FusedScaleMaskSoftmax(*FLAGS[dtype], kind, fusion, mask_func, True, scale, **options)


def later_keys(device, queries=8, keys=8):
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)


def expected(scores, hidden, scale):
    """The probabilities and, for the gradient of ones at the even keys, the scores' gradient."""
    scores = scores.detach().double().requires_grad_()
    y = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    (grad,) = torch.autograd.grad(y[..., ::2].sum(), scores)
    return y.detach(), grad


@devices
@pytest.mark.parametrize("dtype", list(FLAGS), ids=str)
@pytest.mark.parametrize("fusion", [True, False])
def test_equals_plain_softmax(device, dtype, fusion, seed):
    torch.manual_seed(seed)
    padding = torch.rand(2, 1, 8, 8, device=device) > 0.6
    padding[..., 0] = False
    none, causal = torch.zeros_like(padding), later_keys(device)
    for scale, (kind, mask, hidden) in product(
        (None, 0.3),
        (
            (AttnMaskType.padding, padding, padding),
            (AttnMaskType.arbitrary, padding, padding),
            (AttnMaskType.padding, None, none),
            (AttnMaskType.no_mask, None, none),
            (AttnMaskType.causal, None, causal),
            (AttnMaskType.causal, padding | causal, padding | causal),
        ),
    ):
        scores = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True)
        y = make(dtype, kind, fusion, scale)(scores, mask)
        y[..., ::2].sum().backward()
        assert y.dtype == dtype
        for actual, wanted in zip((y, scores.grad), expected(scores, hidden, scale or 1.0), strict=True):
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


def test_the_kernel_interpreted(seed, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the kernel runs on the GPU")
    calls = []

    def kernel(*args):
        calls.append(args)
        return scale_mask_softmax(*args)

    monkeypatch.setattr(softmax, "scale_mask_softmax", kernel)
    monkeypatch.setattr(softmax, "runs_kernels", lambda scores, what: True)
    test_equals_plain_softmax("cpu", torch.float32, True, seed)
    assert len(calls) == 12


@devices
@pytest.mark.parametrize("fusion", [True, False])
def test_windows_and_cached_keys(device, fusion, seed):
    torch.manual_seed(seed)
    for queries in (1, 3, 8):
        scores = torch.randn(2, 3, queries, 8, device=device)
        place = torch.arange(8, device=device)
        distance = place - place[8 - queries :, None]
        outside = (distance < -2) | (distance > 0)
        y = make(kind=AttnMaskType.causal, fusion=fusion, window_size=(2, 0))(scores, None)
        torch.testing.assert_close(y.double(), expected(scores, outside, 1.0)[0], rtol=1e-5, atol=1e-6)
        # Of fewer queries than keys, one sees all; more need a mask.
        mask = None if queries == 1 else distance > 0
        y = make(kind=AttnMaskType.causal, fusion=fusion)(scores, mask)
        torch.testing.assert_close(y.double(), expected(scores, distance > 0, 1.0)[0], rtol=1e-5, atol=1e-6)


@devices
@pytest.mark.parametrize("fusion", [True, False])
def test_attention_sinks(device, fusion, seed):
    """One more key for each head, whose score is the offset and whose value is zero."""
    torch.manual_seed(seed)
    padding = torch.rand(2, 1, 8, 8, device=device) > 0.6
    causal = later_keys(device)
    for scale, (kind, mask, hidden) in product(
        (None, 0.3),
        (
            (AttnMaskType.no_mask, None, torch.zeros_like(causal)),
            (AttnMaskType.padding, padding, padding),
            (AttnMaskType.causal, None, causal),
            (AttnMaskType.causal, padding | causal, padding | causal),
        ),
    ):
        scores = torch.randn(SHAPE, device=device, requires_grad=True)
        offset = torch.randn(3, device=device, requires_grad=True)
        y = make(kind=kind, fusion=fusion, scale=scale)(scores, mask, offset)
        wide = torch.cat((scores.double() * (scale or 1.0), offset.double()[:, None, None].expand(2, 3, 8, 1)), -1)
        wanted = wide.masked_fill(F.pad(hidden.expand(SHAPE), (0, 1)), -torch.inf).softmax(-1)[..., :-1]
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)
        weights = torch.randn_like(y)
        inputs = scores, offset
        grads = (torch.autograd.grad((out * weights).sum(), inputs) for out in (y, wanted))
        for actual, expected_grad in zip(*grads, strict=True):
            torch.testing.assert_close(actual, expected_grad, rtol=1e-4, atol=1e-5)


def test_kernels_are_there_whatever_the_sizes():
    assert make(fusion=True).is_kernel_available(None, 1, 3, 5, 7) is torch.cuda.is_available()
    assert make(fusion=False).is_kernel_available(None, 4, 8, 32, 32) is False


def test_queries_that_see_nothing():
    scores, mask = torch.randn(1, 1, 2, 4), torch.tensor([[[[True] * 4, [False] * 4]]])
    assert not make()(scores, mask)[0, 0, 0].any()
    assert (make(fusion=False)(scores, mask)[0, 0, 0] == 0.25).all()  # as mask_func says


def test_mask_func_is_called_without_fusion():
    layer = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, False, torch.add, True, None)
    scores, bias = torch.randn(1, 2, 3, 4), torch.randn(3, 4)
    torch.testing.assert_close(layer(scores, bias), (scores + bias).softmax(-1))


def test_refusals():
    with pytest.raises(ValueError, match="exclude"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.causal, True, None, True, None)
    with pytest.raises(ValueError, match="0.5"):
        FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, True, None, False, 0.5)
    with pytest.raises(ValueError, match="mask_func"):
        FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, False, None, True, None)
    with pytest.raises(ValueError, match=r"\(3, 4, 4\)"):
        make()(torch.randn(3, 4, 4), None)
    with pytest.raises(ValueError, match="3 and 4"):
        make(kind=AttnMaskType.causal)(torch.randn(1, 1, 3, 4), None)
    with pytest.raises(ValueError, match="3 heads"):
        make()(torch.randn(1, 3, 4, 4), None, torch.zeros(2))
    for shape in ((1, 1, 4, 5), (3, 4), (1, 1, 1, 4, 4)):
        with pytest.raises(ValueError, match=re.escape(f"{shape}, is not broadcastable")):
            make()(torch.randn(2, 2, 4, 4), torch.zeros(shape, dtype=torch.bool))
    for fusion in (True, False):
        layer, scores = make(fusion=fusion), torch.randn(1, 1, 2, 2)
        with pytest.raises(TypeError, match="the scores must be a tensor, not int"):
            layer(3, None)
        with pytest.raises(TypeError, match="the mask must be a tensor, not list"):
            layer(scores, [[True]])
        with pytest.raises(TypeError, match="softmax_offset must be a tensor, not float"):
            layer(scores, None, 1.0)
    for told, options in (
        ("attn_mask_type .* not 'causal'", {"kind": "causal"}),
        ("scale must be a number, not '2'", {"scale": "2"}),
        ("window_size must be .* not 3", {"window_size": 3}),
        ("window_size's right must be an integer, not float", {"window_size": (1, 0.5)}),
    ):
        with pytest.raises(TypeError, match=told):
            make(**options)
    with pytest.raises(TypeError, match="mask_func must be a function .* not 'add'"):
        FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, False, "add", True, None)
    with pytest.raises(TypeError, match="float32"):
        make()(torch.randn(1, 1, 4, 4), torch.zeros(4, 4))
