"""Each operation inside torch.compile(fullgraph=True): on the CPU without Inductor, around the interpreted kernels."""

import pytest
import torch

from tests.kernels.operations import NAMES, operations, results


@pytest.mark.parametrize("name", NAMES)
def test_compiles_into_one_graph(device, name):
    if device.type == "cpu" and name in ("large linear_act", "gated linear"):
        pytest.skip("too large for the interpreter")
    function, inputs = operations(device, torch.bfloat16 if device.type == "cuda" else torch.float32)[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    for actual, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
        if "dropout" in name:  # compiled code draws its seed otherwise
            assert actual.shape == expected.shape and actual.isfinite().all()
        else:
            torch.testing.assert_close(actual, expected)
