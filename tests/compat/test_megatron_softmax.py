"""FusedScaleMaskSoftmax against plain softmax in float64."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tpfused.checks import AssertedError
from tpfused.compat.megatron import AttnMaskType, FusedScaleMaskSoftmax, softmax
from tpfused.kernels.softmax import scale_mask_softmax
from tpfused.layers import softmax as implementation

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
            (AttnMaskType.causal, padding, padding | causal if fusion else padding),
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

    monkeypatch.setattr(implementation, "scale_mask_softmax", kernel)
    monkeypatch.setattr(implementation, "runs_kernels", lambda scores, what: True)
    monkeypatch.setattr(implementation, "has_kernels", lambda device: True)
    test_equals_plain_softmax("cpu", torch.float32, True, seed)
    assert len(calls) == 14


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


@devices
@pytest.mark.parametrize("fusion", [True, False])
def test_only_causal_masks_by_itself(device, fusion, seed):
    """Beside a mask, too, under fusion."""
    torch.manual_seed(seed)
    scores, padding = torch.randn(SHAPE, device=device), torch.rand(2, 1, 8, 8, device=device) > 0.6
    padding[..., 0] = False
    for kind in AttnMaskType:
        for mask in (None, padding):
            hidden = padding if mask is not None else torch.zeros_like(padding)
            if kind is AttnMaskType.causal and (fusion or mask is None):
                hidden = hidden | later_keys(device)
            y = make(kind=kind, fusion=fusion)(scores, mask)
            torch.testing.assert_close(y.double(), expected(scores, hidden, 1.0)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", [True, False])
def test_equals_megatrons_plain_way(fusion, seed, monkeypatch):
    theirs = pytest.importorskip("megatron.core.fusions.fused_softmax")
    monkeypatch.setattr(theirs, "get_default_causal_mask", lambda queries: later_keys("cpu", queries, queries))
    torch.manual_seed(seed)
    padding = torch.rand(2, 1, 8, 8) > 0.6
    padding[..., 0] = False
    for kind, mask, scale, offset in product(
        theirs.AttnMaskType, (None, padding, padding | later_keys("cpu")), (None, 0.3), (None, torch.randn(3))
    ):
        settings = False, False, kind, fusion, mask_func, True, scale
        scores = torch.randn(SHAPE)
        hides_both = fusion and kind is theirs.AttnMaskType.causal and mask is not None
        their_mask = mask | later_keys("cpu") if hides_both else mask
        wanted = theirs.FusedScaleMaskSoftmax(*settings)(scores, their_mask, offset)
        torch.testing.assert_close(FusedScaleMaskSoftmax(*settings)(scores, mask, offset), wanted)


def test_a_subclass_may_compute_otherwise():
    scores, mask = torch.randn(2, 3, 4, 4), torch.zeros(4, 4, dtype=torch.bool)

    class Own(FusedScaleMaskSoftmax):
        def forward_torch_softmax(self, input, mask, softmax_offset=None):
            probabilities = super().forward_torch_softmax(input, mask, softmax_offset)
            return probabilities if softmax_offset is None else (input, mask, softmax_offset)

    class OwnFused(Own):
        def is_kernel_available(self, mask, b, np, sq, sk):
            return self.get_batch_per_block(sq, sk, b, np) == 1 and (b, np, sq, sk) == (2, 3, 4, 4)

        def forward_fused_softmax(self, input, mask):
            return input, mask

    settings = False, False, AttnMaskType.padding, True, mask_func, True, None
    offset = torch.zeros(3)
    for kind in (Own, OwnFused):
        assert kind(*settings)(scores, mask, offset) == (scores, mask, offset)
    assert OwnFused(*settings)(scores, mask) == (scores, mask)
    torch.testing.assert_close(Own(*settings)(scores, mask), scores.softmax(-1))
    torch.testing.assert_close(Own(*settings).forward_fused_softmax(scores, mask), scores.softmax(-1))


def test_masks_of_bytes():
    """Megatron's kernels take them."""
    scores, mask = torch.randn(2, 3, 4, 4), later_keys("cpu", 4, 4)
    assert torch.equal(make()(scores, mask.byte()), make()(scores, mask))
    offset = torch.randn(3)
    assert torch.equal(make()(scores, mask.byte(), offset), make()(scores, mask, offset))


def test_what_megatron_has_beside_it():
    theirs = pytest.importorskip("megatron.core.fusions.fused_softmax")
    for name in ("SoftmaxOne", "ScaledSoftmax", "ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax"):
        assert getattr(softmax, name) is getattr(theirs, name)
    with pytest.raises(AttributeError, match="tpfused.compat.megatron.softmax.*no_such_name"):
        _ = softmax.no_such_name
    for flags in ((True, False), (False, True), (False, False)):
        settings = *flags, AttnMaskType.causal, True, mask_func, True, None
        ours, their = FusedScaleMaskSoftmax(*settings), theirs.FusedScaleMaskSoftmax(*settings)
        assert ours.input_in_float16 == their.input_in_float16 == any(flags)


def test_mask_func_is_called_without_fusion():
    layer = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, False, torch.add, True, None)
    scores, bias = torch.randn(1, 2, 3, 4), torch.randn(3, 4)
    torch.testing.assert_close(layer(scores, bias), (scores + bias).softmax(-1))


def test_refusals():
    with pytest.raises(AssertedError, match="exclude"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.causal, True, None, True, None)
    with pytest.raises(TypeError, match="softmax_in_fp32 must be True or False, not 'no'"):
        FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, "no", None)
    with pytest.raises(AssertedError, match="0.5"):
        FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, True, None, False, 0.5)
    without = FusedScaleMaskSoftmax(False, False, AttnMaskType.padding, False, None, True, None)
    assert torch.equal(without(torch.zeros(1, 1, 2, 4), None), torch.full((1, 1, 2, 4), 0.25))
    with pytest.raises(ValueError, match="mask_func"):
        without(torch.zeros(1, 1, 2, 4), torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(AssertedError, match=r"\(3, 4, 4\)"):
        make()(torch.randn(3, 4, 4), None)
    with pytest.raises(AssertedError, match="3 and 4"):
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
