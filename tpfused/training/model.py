"""The process group, and the model as each data-parallel mode wants it."""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpfused import ParallelTransformer
from tpfused.group import TPGroup
from tpfused.training.presets import RunConfig
from tpfused.workers import Worker, join_group


def pick_device(run: RunConfig, worker: Worker) -> torch.device:
    """This worker's device, made current."""
    if run.device == "cuda":
        if run.dtype != "bf16":
            # cuBLAS keeps 32 MiB a handle on Hopper by default, and there are two handles, the backward thread's being
            # the second. The fp32 and fp64 matmuls are no faster for it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":2048:2")
        torch.cuda.set_device(worker.local_rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        return torch.device("cuda", worker.local_rank)
    torch.set_num_threads(run.threads)
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """For the report: the GPU's name, or the processor's architecture and how many of its cores are ours."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def connect(run: RunConfig, worker: Worker, device: torch.device) -> DeviceMesh | None:
    """Join the run's process group: its (dp, tp) mesh, or None where one process is all."""
    if run.world == 1:
        return None
    join_group(worker, device)
    return init_device_mesh(device.type, (run.dp, run.tp), mesh_dim_names=("dp", "tp"))


@dataclass(frozen=True)
class Trainable:
    """A model ready to train.

    `loss(ids, labels)` is this rank's mean loss; `micro_batch(last)` surrounds it and its backward: gradients are
    averaged over the data-parallel ranks in the last one of a step. `logits(ids)` is for evaluation.
    """

    model: ParallelTransformer
    loss: Callable[[Tensor, Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    micro_batch: Callable[[bool], AbstractContextManager]


def build(run: RunConfig, device: torch.device, mesh: DeviceMesh | None) -> Trainable:
    """The run's model, with the same weights at every degree of parallelism."""
    torch.manual_seed(run.seed)
    fully_sharded = run.dp > 1 and run.dp_mode == "fsdp2"
    if mesh is None:
        place = {"group": TPGroup(None, rank=0, size=1)}
    elif fully_sharded:
        place = {"mesh": mesh["tp"]}
    else:
        place = {"group": mesh.get_group("tp")}
    dtype = torch.float64 if run.dtype == "fp64" else torch.float32
    model = ParallelTransformer(run.transformer_config(), device=device, dtype=dtype, **place)
    if run.dp == 1:
        return Trainable(model, model.loss, model, lambda last: nullcontext())
    return (_fully_sharded if fully_sharded else _replicated)(model, mesh["dp"])


class WithLoss(nn.Module):
    """What DDP and FSDP2 wrap: they act around `forward`, and training needs no other output than the loss.

    `options`: of the model's `loss`.
    """

    def __init__(self, model: ParallelTransformer, **options: object):
        super().__init__()
        self.model = model
        self.options = options

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.blocks

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model.loss(ids, labels, **self.options)

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 over `mesh` of a module that has `blocks`, block by block; its `forward` and `logits` gather the rest."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(module, "logits")


def _replicated(model: ParallelTransformer, dp: DeviceMesh) -> Trainable:
    from torch.nn.parallel import DistributedDataParallel

    # Every replica drew the same weights: no broadcast. Gradients live in the buckets, not twice.
    ddp = DistributedDataParallel(
        WithLoss(model), process_group=dp.get_group(), init_sync=False, gradient_as_bucket_view=True
    )
    return Trainable(model, ddp, model, lambda last: nullcontext() if last else ddp.no_sync())


def _fully_sharded(model: ParallelTransformer, dp: DeviceMesh) -> Trainable:
    root = WithLoss(model)
    shard_blocks(root, dp)

    def micro_batch(last: bool) -> AbstractContextManager:
        root.set_requires_gradient_sync(last)
        return nullcontext()

    return Trainable(model, root, root.logits, micro_batch)
