"""What the tests of fairscale's names share."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from tpfused.compat.fairscale import initialize
from tpfused.sharding import shard_range

THEIRS = "fairscale.nn.model_parallel"

# Kept until a worker ends: gloo's connections of a new group fail now and then where others are being closed.
_made: list[dist.ProcessGroup] = []


@contextmanager
def model_parallel(size, module=initialize, **options):
    """Blocks of `size` ranks, made by this package or by fairscale itself."""
    module.initialize_model_parallel(size, **options)
    _made.extend(getattr(module, f"get_{kind}_parallel_group")() for kind in ("model", "data", "pipeline"))
    try:
        yield
    finally:
        module.destroy_model_parallel()


@contextmanager
def float64_on(device):
    """What layers without `device` and `dtype` arguments go by."""
    torch.set_default_dtype(torch.float64)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_type(device, name="Float"):
    """What fairscale's own layers go by, and torch's default device does not change."""
    torch.set_default_tensor_type(f"torch.{'cuda.' if device.type == 'cuda' else ''}{name}Tensor")
    try:
        yield
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


def own(whole, dim):
    size, rank = initialize.get_model_parallel_world_size(), initialize.get_model_parallel_rank()
    start, stop = shard_range(whole.shape[dim], size, rank)
    return whole.narrow(dim, start, stop - start)
