"""gated_act against its twin, in its three layouts."""

import pytest
import torch

from tests.kernels.compare import assert_matches
from tpfused import reference
from tpfused.kernels import gated_act as module
from tpfused.kernels.gated_act import gated_act

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("features", [1, 37])
def test_equals_its_twin_in_every_layout(device, dtypes, activation, features, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 32)
    for dtype in dtypes:
        both = torch.randn(3, 4, 2 * features, device=device, dtype=dtype)
        gate, up = both.chunk(2, dim=-1)

        def twin(gate, up):
            return reference.activate(gate, activation) * up

        packed = lambda x: reference.gated_act(x, activation)  # noqa: E731
        assert_matches(lambda x: gated_act(x, activation=activation), packed, [both], "packed")
        assert_matches(lambda x: gated_act(x, activation=activation), packed, [both.transpose(0, 1)], "transposed")
        halves = lambda x: gated_act(x, activation=activation, packed=False)  # noqa: E731
        assert_matches(halves, lambda x: twin(*x.chunk(2, dim=-1)), [both], "halves")
        assert_matches(halves, lambda x: twin(*x.chunk(2, dim=-1)), [both.transpose(0, 1)], "halves, transposed")
        assert_matches(lambda g, u: gated_act(g, u, activation=activation), twin, [gate, up], "separate")


def test_gradcheck_operator_and_nothing_to_do(device):
    x = torch.randn(2, 6, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gated_act(x, activation="gelu"), x)
    torch.library.opcheck(torch.ops.tpfused.gated_act.default, (x, None, True, 4))
    torch.library.opcheck(torch.ops.tpfused.gated_act.default, (x, x.detach().clone().requires_grad_(), True, 1))
    torch.library.opcheck(torch.ops.tpfused.gated_act.default, (x, None, False, 2))
    assert gated_act(x[:0]).shape == (0, 3)


def test_bad_input_is_refused(device):
    x = torch.randn(2, 6, device=device)
    for error, told, arguments in (
        (ValueError, "tanh", {"activation": "tanh"}),
        (ValueError, r"\(2, 5\)", {"gate_up": x[:, :5]}),
        (TypeError, "int64", {"gate_up": x.long()}),
        (TypeError, "float64", {"up": x.double()}),
        (ValueError, r"\(2, 5\)", {"up": x[:, :5]}),
        (ValueError, "meta", {"up": x.to("meta")}),
    ):
        with pytest.raises(error, match=told):
            gated_act(**{"gate_up": x} | arguments)
