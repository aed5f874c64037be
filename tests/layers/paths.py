"""The ways in which layers can run, for tests that ask the same of each: by torch alone, and by the overlapped
operations, for which a CPU has a stand-in."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.distributed import Context
from tests.overlap.test_operations import forced
from tpfused import ParallelTransformer
from tpfused.placement import local

TOLERANCE = 2e-4  # of float32 results, relative to the largest: of sums in other orders


def paths(ctx: Context, tp: int) -> Iterator[str]:
    """The name of each, within which it is the one that runs."""
    for name in ("reference", "p2p") if ctx.device.type == "cpu" else ("reference", "p2p", "nccl"):
        with forced(ctx, tp, name):
            yield name


def make_model(block, config, dtype: torch.dtype = torch.float32) -> ParallelTransformer:
    torch.manual_seed(block.seed)
    return ParallelTransformer(config, device=block.device, dtype=dtype, **block.place)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of all gradients that there are."""
    return {name: local(param.grad).clone() for name, param in module.named_parameters() if param.grad is not None}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str, tolerance: float = TOLERANCE):
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())
    for name, value in expected.items():
        assert actual[name].shape == value.shape and actual[name].dtype == value.dtype, (what, name, actual[name].dtype)
        if value.numel():
            scale = max(value.abs().max().item(), 1e-3)
            error = (actual[name] - value).abs().max().item() / scale
            assert error <= tolerance, f"{name} of {what}: relative error {error}"
