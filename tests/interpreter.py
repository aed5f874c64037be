"""Triton's interpreter, for kernels on machines without a GPU."""

import pytest
import torch


def use_where_there_is_no_gpu() -> None:
    """To be called before a kernel is defined. Child processes of other tests do not inherit it: it is slow."""
    if torch.cuda.is_available():
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True  # it reads the environment again at the first launch
