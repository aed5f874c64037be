"""Ten steps of a language model, dense or laid out over the ranks, for tests that composition changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tpfused
from tests.distributed import Context
from tests.parallelize.models import VOCAB, build, dense_loss
from tpfused.group import TPGroup

STEPS, TEXTS, TOKENS = 10, 8, 10
MAX_NORM = 0.5  # some steps' norms are larger, so that they are clipped

_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 56, "max_positions": 32}
OWN = {
    "own-gpt": tpfused.TransformerConfig.gpt(**_SIZES, sequence_parallel=True),
    "own-llama": tpfused.TransformerConfig.llama(**_SIZES, num_kv_heads=2),
}
_without_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="there is no transformers")
PARALLELIZED = [pytest.param(name, marks=_without_transformers) for name in ("llama", "gpt2")]
MODELS = [*PARALLELIZED, *OWN]
# Transformers' RMSNorm computes in float32 whatever its input is.
TOLERANCE = {"llama": 1e-6, "gpt2": 1e-10, "own-gpt": 1e-10, "own-llama": 1e-10}

Losses = list[tuple[float, float]]  # the loss of the whole batch and the gradients' norm before clipping, of each step


class Causal(nn.Module):
    """From ids to the loss of predicting them, for wrappers that act around forward."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.model, tpfused.ParallelTransformer):
            return self.model.loss(ids[:, :-1], ids[:, 1:])
        if any(isinstance(param, DTensor) for param in self.model.parameters()):
            return self.model(ids, labels=ids).loss
        return dense_loss(self.model, self.model(ids).logits, ids)  # transformers computes it in float32


def dense(name: str, seed: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Causal:
    torch.manual_seed(seed)
    if name in OWN:
        return Causal(tpfused.ParallelTransformer(OWN[name], group=TPGroup(None, 0, 1), device=device, dtype=dtype))
    return Causal(build(name).to(device, dtype).train())


def parallel(mesh: DeviceMesh, name: str, seed: int, *, plain: bool = False, dtype=torch.float64) -> Causal:
    """The same model over the ranks of `mesh`; `plain`: an own one with plain parameters, not DTensors."""
    device = torch.device(mesh.device_type)
    if name not in OWN:
        return Causal(tpfused.parallelize(dense(name, seed, device, dtype).model, mesh))
    torch.manual_seed(seed)
    place = {"group": mesh.get_group()} if plain else {"mesh": mesh}
    return Causal(tpfused.ParallelTransformer(OWN[name], **place, device=device, dtype=dtype))


def batches(seed: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randint(2, VOCAB, (TEXTS, TOKENS), generator=generator).to(device)


def blocks(module: Causal) -> nn.ModuleList:
    """The Transformer blocks, whatever the model calls them."""
    return next(part for part in module.modules() if isinstance(part, nn.ModuleList))


def laid_out(
    ctx: Context,
    name: str,
    seed: int,
    how: str,
    *,
    tp: int = 2,
    prepare: Callable[[Causal], None] = lambda module: None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[nn.Module, DeviceMesh | None]:
    """The model over blocks of `tp` ranks, and the mesh over which each sees other data.

    `how`: "tp" for no such mesh, "fsdp2", "hsdp" (whole on each data-parallel rank, by FSDP2) or "ddp" (plain
    parameters). `prepare` is called on the module before it is wrapped; FSDP2 takes `options`.
    """
    if how == "hsdp":
        shape, names = (ctx.world // tp, 1, tp), ("replicate", "shard", "tp")
        grid = init_device_mesh(ctx.device.type, shape, mesh_dim_names=names)
        dp, wrapped_over = grid["replicate"], grid["replicate", "shard"]
    else:
        grid = ctx.grid(tp)
        dp = wrapped_over = grid["dp"]
    module = parallel(grid["tp"], name, seed, plain=how == "ddp", dtype=dtype)
    prepare(module)
    if how == "tp":
        return module, None
    if how == "ddp":
        return DistributedDataParallel(module, process_group=dp.get_group()), dp
    for part in (*blocks(module), module):
        fully_shard(part, mesh=wrapped_over, **options)
    return module, dp


def backward(
    module: nn.Module, dp: DeviceMesh | None = None, *, accumulate: int = 1, autocast: bool = False
) -> Callable[[Tensor], Tensor]:
    """For `train`: a batch's gradients and loss, from this rank's slice along `dp`, in `accumulate` parts.

    The data-parallel ranks exchange gradients in the last part only.
    """

    def run(ids: Tensor) -> Tensor:
        own = ids if dp is None else ids.chunk(dp.size())[dp.get_local_rank()]
        total = torch.zeros((), dtype=torch.float64, device=ids.device)
        for number, some in enumerate(own.chunk(accumulate), 1):
            last = number == accumulate
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
            with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
                with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
                    loss = module(some) / accumulate
                loss.backward()
            total += loss.detach()
        if dp is not None:
            dist.all_reduce(total, group=dp.get_group())
            total /= dp.size()
        return total

    return run


def train(
    module: nn.Module,
    step: Callable[[Tensor], Tensor],
    data: Iterator[Tensor],
    clip: Callable[..., Tensor] = tpfused.clip_grad_norm_,
    **options,
) -> Losses:
    """AdamW with `options`; `step(ids)` leaves the gradients and returns the loss of the whole batch."""
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, **options)
    found = []
    for ids in data:
        loss = step(ids)
        norm = clip(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
    return found


def dense_losses(ctx: Context, name: str, seed: int, *, bfloat16: bool = False) -> Losses:
    """The dense model's, computed on one rank for all; `bfloat16`: a float32 model's under autocast."""
    found = [None]
    if ctx.rank == 0:
        module = dense(name, seed, ctx.device, torch.float32 if bfloat16 else torch.float64)
        found = [train(module, backward(module, autocast=bfloat16), batches(seed, ctx.device))]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def assert_same(found: Losses, expected: Losses, tolerance: float) -> None:
    assert len(found) == len(expected) == STEPS
    assert any(norm > MAX_NORM for _, norm in expected), "nothing was clipped"
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), 1):
        for what, a, b in zip(("loss", "norm"), mine, theirs, strict=True):
            assert abs(a - b) <= tolerance * abs(b), f"{what} {a} of step {step}, not {b}: {found}, {expected}"
