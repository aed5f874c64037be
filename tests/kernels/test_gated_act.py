"""gated_act against its twin, in its three layouts."""

import pytest
import torch

from tests.kernels.compare import assert_matches, assert_within
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
        halves = lambda x: gated_act(x, activation=activation, packed=False)  # noqa: E731
        assert_matches(halves, lambda x: twin(*x.chunk(2, dim=-1)), [both], "halves")
        assert_matches(lambda g, u: gated_act(g, u, activation=activation), twin, [gate, up], "separate")
        if dtype == torch.float64:  # the others only round otherwise
            assert_matches(lambda x: gated_act(x, activation=activation), packed, [both.transpose(0, 1)], "transposed")
            assert_matches(halves, lambda x: twin(*x.chunk(2, dim=-1)), [both.transpose(0, 1)], "halves, transposed")


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


def test_halves_that_lie_in_one_piece(device):
    """Their gradients do not."""
    for x in (torch.randn(2, 5, device=device).T, torch.randn(1, 5, 1, device=device).expand(1, 5, 2)):
        assert_matches(
            lambda x: gated_act(x, packed=False),
            lambda x: torch.nn.functional.silu(x[..., :1]) * x[..., 1:],
            [x],
        )


def test_far_out_in_the_tails(device):
    x = torch.tensor([[-12.0, 60000.0], [-40.0, 1000.0], [12.0, 2.0]], device=device, dtype=torch.float16)
    for activation in ("gelu", "gelu_tanh", "silu"):
        exact = reference.gated_act(x.double(), activation)
        assert_within(
            gated_act(x, activation=activation), exact, reference.gated_act(x, activation), activation, dim=-1
        )
        infinite = torch.tensor([-float("inf"), 1.0], device=device, dtype=torch.float16)
        assert not gated_act(infinite, activation=activation).isfinite()  # a gradient scaler must see it
