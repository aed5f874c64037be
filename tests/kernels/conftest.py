"""Kernels run on the GPU, or on the CPU in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned():
    """What a kernel forgets to write is NaN: torch fills new memory with it in this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


@pytest.fixture
def dtypes(device):
    """What to test in: the interpreter has no bfloat16."""
    half = [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]
    return [torch.float64, torch.float32, *half]
