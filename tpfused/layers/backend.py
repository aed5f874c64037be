"""Which computation a layer runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tpfused.explanation import KERNEL, PLAIN, tell
from tpfused.kernels.launch import capability, is_floating
from tpfused.overlap.tiers import wanted


def runs_kernels(x: Tensor, backend: str | None = None, what: str | None = None, why_none: str = "") -> bool:
    """Whether a layer of this `backend` runs Triton's kernels on `x`: on CUDA from Ampere on, unless the plain path is
    asked for, by the layer's argument or by ``tier("reference")``. Triton's interpreter is for tests of the kernels.

    `what` is computed, for `explain`. `why_none`: why the layer has no kernel for it, if so.
    """
    why = why_plain(x, backend) or why_none
    if what is not None:
        tell(what, x, PLAIN if why else KERNEL, why)
    return not why


def why_plain(x: Tensor, backend: str | None) -> str:
    """Empty: nothing speaks against the kernels."""
    if backend is not None:
        return f"backend={backend!r}"
    if wanted[-1] == "reference":
        return "forced by the tier"
    if not x.is_cuda:
        return f"the tensors are on the {x.device.type.upper()}"
    if not has_kernels(x.device):
        return "the GPU is older than Ampere"
    return "" if is_floating(x) else f"no kernel for {str(x.dtype).removeprefix('torch.')}"


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels are for this device: CUDA from Ampere on."""
    return capability(device) >= (8, 0)
