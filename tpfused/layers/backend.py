"""Which computation a layer runs."""

from __future__ import annotations

from torch import Tensor

from tpfused.kernels.launch import capability, is_floating
from tpfused.overlap.tiers import wanted


def runs_kernels(x: Tensor, backend: str | None = None) -> bool:
    """Whether a layer of this `backend` runs Triton's kernels on `x`: on CUDA from Ampere on, unless the plain path is
    asked for, by the layer's argument or by ``tier("reference")``. Triton's interpreter is for tests of the kernels.
    """
    return (
        backend is None
        and wanted[-1] != "reference"
        and x.is_cuda
        and capability(x.device) >= (8, 0)
        and is_floating(x)
    )
