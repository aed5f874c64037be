"""Every operation's cases at toy sizes, on the CPU: variants are right, and the bytes are counted right."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from tests.bench.fakes import FakeTimer
from tpfused.bench import OPERATIONS
from tpfused.bench.case import OPTIONAL, Setting
from tpfused.bench.operations import (
    cases,
    cross_entropy,
    decode,
    embedding,
    gated_act,
    linear_act,
    rotary,
    softmax,
    summary,
)
from tpfused.bench.runner import run_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
CPU = Setting(torch.device("cpu"), torch.float32, lambda function: function)


def built(case, setting=CPU):
    """The case's work, whose variants are those that it names: all but the optional ones."""
    work = case.build(setting)
    missing = set(case.variants) - set(work.variants)
    assert set(work.variants) <= set(case.variants) and missing <= set(OPTIONAL)
    return work


def check(case, setting=CPU, unchecked=()):
    built(case, setting)
    for row in run_case(case, setting, FakeTimer(), rounds=3):
        assert row["error"] is None, row
        assert row["correct"] is True or row["variant"] in unchecked, row


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_describes_itself(operation):
    found = cases(operation)
    assert summary(operation)
    assert len({case.label for case in found}) == len(found)
    assert any(case.quick for case in found)
    for case in found:
        assert case.op == operation and case.variants[0] == "ours" and "eager" in case.variants


@pytest.mark.parametrize("direction, values", [("fwd", 3), ("bwd", 5)])
@pytest.mark.parametrize("layout", ["packed", "halves", "separate"])
def test_gated_act(direction, values, layout):
    for activation in ("silu", "gelu_tanh"):
        check(gated_act.case(5, 12, activation, layout, direction))
    work = built(gated_act.case(5, 12, "silu", layout, direction))
    assert work.amount == values * 60 * 4
    if direction == "bwd":
        ours = work.variants["ours"]
        torch.testing.assert_close(list(ours.call()), list(ours.fallback()))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("mode", ["masked", "causal"])
def test_softmax(direction, mode):
    check(softmax.case((2, 3, 8, 8), mode, direction))
    check(softmax.case((2, 4, 40, 40), mode, direction, dropout=0.1))
    work = built(softmax.case((2, 3, 8, 8), mode, direction))
    assert not work.variants["torch.softmax"].comparable
    if direction == "bwd":
        ours = work.variants["ours"]
        torch.testing.assert_close(ours.call()[0], ours.fallback())


def test_softmax_bytes():
    shape = (2, 3, 8, 8)
    scores, triangles, mask = 2 * 2 * 3 * 64, 2 * 2 * 3 * 36, 2 * 64
    expected = {
        ("masked", "fwd", 0.0): 2 * scores + mask,
        ("causal", "fwd", 0.0): triangles + scores,
        ("masked", "bwd", 0.0): 3 * scores,
        ("causal", "bwd", 0.0): 2 * triangles + scores,
        ("masked", "bwd", 0.1): 3 * scores + mask,
    }
    for (mode, direction, dropout), moved in expected.items():
        assert softmax.bytes_of(shape, mode, direction, dropout, size=2) == moved, (mode, direction)


def test_dropout_that_drops_too_much_is_wrong():
    """A kernel may not pass by dropping everything."""
    x, hidden = torch.randn(2, 2, 32, 32), torch.zeros(32, 32, dtype=torch.bool)
    variant = softmax._with_dropout("fwd", torch.zeros_like, lambda x: x.softmax(-1), x, x, 0.1, hidden)
    (right,) = variant.exact([variant.call()])
    assert right.isnan().all()


@pytest.mark.parametrize("kind", ["inside", "spread", "zipf"])
def test_embedding(kind):
    for direction in ("fwd", "bwd"):
        check(embedding.case(20, kind, direction, rows=10, features=6))
    ids = embedding.draw(kind, 5000, 10, torch.device("cpu"))
    counts = ids.bincount(minlength=40)
    if kind == "spread":
        assert counts.gt(0).all()
    else:
        assert counts[:10].sum() == counts[20:].sum() == 0
    if kind == "zipf":
        assert counts[10] > counts[12] > counts[19] > 0
    ours = built(embedding.case(20, kind, "bwd", rows=10, features=6)).variants["ours"]
    torch.testing.assert_close(ours.call()[0], ours.fallback())


def test_embedding_bytes():
    torch.manual_seed(0)
    ids = embedding.draw("spread", 20, 10, torch.device("cpu"))
    owned = ids[(ids >= 10) & (ids < 20)]
    forward, backward = ("fwd", owned.numel() + 20), ("bwd", owned.numel() + 10)
    for direction, rows in (forward, backward):
        torch.manual_seed(0)
        work = built(embedding.case(20, "spread", direction, rows=10, features=6))
        assert work.amount == rows * 6 * 4 + 20 * 8


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_rotary(direction):
    case = rotary.case(5, 4, 2, direction, head_dim=8)
    check(case)
    work = built(case)
    assert work.amount == 2 * 5 * (4 + 2 + 2) * 8 * 4
    if direction == "bwd":
        ours = work.variants["ours"]
        torch.testing.assert_close(ours.call()[0], ours.fallback())


def test_decode():
    case = decode.case(2, 70, 6, 3, head_dim=16)
    check(case)
    assert built(case).amount == 2 * (2 * 3 * 70 * 16) * 4


def test_cross_entropy():
    case = cross_entropy.case(6, 50)
    check(case)
    assert built(case).amount == 3 * 6 * 50 * 4


@pytest.fixture
def kernels(monkeypatch):
    """A `tpfused.kernels.linear_act` of plain PyTorch: the real one needs a GPU."""
    module = ModuleType("tpfused.kernels.linear_act")
    used = []

    def linear_act(x, weight, bias=None, activation=None, *, backend=None, recompute=False, main_grad=None):
        used.append(backend)
        return F.gelu(F.linear(x, weight, bias), approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])

    def dgrad_act(dy, weight, pre, activation):
        approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
        dpre = torch.ops.aten.gelu_backward(dy @ weight, pre, approximate=approximate)
        return dpre, dpre.sum(0)

    module.linear_act, module.dgrad_act = linear_act, dgrad_act
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return used


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_linear_act(kernels, activation):
    for mode, matmuls in (("fwd", 1), ("training", 1), ("fwd+bwd", 3)):
        case = linear_act.case(5, 7, 6, activation, mode)
        # torch's epilogue is tanh-GELU on a GPU and erf-GELU on a CPU.
        check(case, unchecked=("cublaslt",))
        assert built(case).amount == matmuls * 2 * 5 * 7 * 6
    assert set(kernels) == {None, "triton"}
    case = linear_act.dgrad_case(5, 7, 6, activation)
    check(case)
    work = built(case)
    assert work.floor.call().shape == (5, 6) and work.unit == "TFLOP/s"


def test_training_keeps_a_graph_and_inference_none(kernels):
    for mode, differentiable in (("fwd", False), ("training", True)):
        work = built(linear_act.case(5, 7, 6, "gelu", mode))
        assert work.variants["ours"].call().requires_grad is differentiable
