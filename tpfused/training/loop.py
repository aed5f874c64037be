"""What each worker does: build, train, validate. Rank 0 reports."""

import gc
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfused.collectives import observe
from tpfused.grad_norm import clip_grad_norm_
from tpfused.overlap.communicator import peer_bytes
from tpfused.parameter import local
from tpfused.training.data import make_data
from tpfused.training.evaluate import sample, validate
from tpfused.training.model import Trainable, build, connect, device_name, pick_device
from tpfused.training.presets import CLIP_NORM, RunConfig
from tpfused.training.timer import StepTimer
from tpfused.workers import Worker


def train(run: RunConfig, worker: Worker) -> None:
    """A worker's life: join the others, then `train_on` the mesh."""
    device = pick_device(run, worker)
    mesh = connect(run, worker, device)
    train_on(mesh, run, worker, device)
    if mesh is not None:
        dist.destroy_process_group()
    if device.type == "cuda":
        # Under torchrun this process lives on while the dense twin uses the same GPU.
        gc.collect()
        torch.cuda.empty_cache()


def train_on(mesh: DeviceMesh | None, run: RunConfig, worker: Worker, device: torch.device) -> None:
    """Run the steps on a (dp, tp) mesh, or alone. Collective.

    Rank 0 emits ("step", {...}) after each one, ("status", {...}) around them, ("saved", {...}), and at the end
    ("result", {...}).
    """
    _Training(mesh, run, worker, device).run_all()


def make_optimizer(run: RunConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused Adam needs no temporary copies of the parameters; DTensor has no fused SGD."""
    if run.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=run.lr, fused=True)
    return torch.optim.SGD(parameters, lr=run.lr)


class _Training:
    def __init__(self, mesh: DeviceMesh | None, run: RunConfig, worker: Worker, device: torch.device):
        self.run, self.worker, self.device = run, worker, device
        self.dp = mesh["dp"] if mesh is not None else None
        self.dp_rank = self.dp.get_local_rank() if mesh is not None else 0
        self.data = make_data(run)
        self.trainable: Trainable = build(run, device, mesh)
        self.model = self.trainable.model
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(run, self.parameters)
        self.timer = StepTimer(device)
        self.counted_bytes = 0
        if run.resume:
            self.emit("status", text="loading the checkpoint")
            from tpfused.training.saving import load

            load(run, worker, self.model, self.optimizer)

    def run_all(self) -> None:
        run, cuda = self.run, self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        losses, norms = [], []
        for step in range(run.first_step, run.steps):
            with self.timer.step(), observe(self.timer.observe_collective):
                loss, norm = self.step(step)
            losses.append(loss)
            norms.append(norm)
            self.emit("step", step=step + 1, loss=loss, grad_norm=norm, ms=self.timer.last())
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"step {step + 1}: the loss is {loss}, the gradient norm {norm}; a lower --lr may help"
                )
            self.save_if_due(step + 1)
        peak = torch.cuda.max_memory_allocated() + peer_bytes() if cuda else self.counted_bytes
        params = sum(local(parameter).numel() for parameter in self.parameters)
        result = dict(
            loss=losses,
            grad_norm=norms,
            params_per_rank=self.from_all_ranks(params),
            peak_bytes_per_rank=self.from_all_ranks(peak),
            milliseconds=self.timer.milliseconds(),
            device_name=device_name(self.device),
        )
        if run.task == "text":
            self.emit("status", text="validating")
            result["validation"] = validate(self.trainable, self.data, self.autocast(), self.dp)
            if run.sample:
                self.emit("status", text="writing a sample")
                result["sample"] = sample(self.trainable, self.data, self.autocast(), run.sample, run.seed)
        self.emit("result", **result)

    def step(self, step: int) -> tuple[float, float]:
        """One optimizer step: (mean loss over the global batch, gradient norm before clipping)."""
        run, timer = self.run, self.timer
        for group in self.optimizer.param_groups:
            group["lr"] = run.learning_rate(step)
        ids, labels = (part.chunk(run.dp)[self.dp_rank].to(self.device) for part in self.data.batch(step))
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        micro_batches = list(zip(ids.chunk(run.accumulate), labels.chunk(run.accumulate), strict=True))
        for number, (some_ids, some_labels) in enumerate(micro_batches, start=1):
            with self.trainable.micro_batch(number == run.accumulate):
                with timer.phase("forward"), self.autocast():
                    loss = self.trainable.loss(some_ids, some_labels) / run.accumulate
                with timer.phase("backward"):
                    loss.backward()
            total += loss.detach()
        with timer.phase("optimizer"):
            norm = clip_grad_norm_(self.parameters, CLIP_NORM)
            self.optimizer.step()
            if step == run.first_step and self.device.type == "cpu":
                self.counted_bytes = self.count_bytes()
            self.optimizer.zero_grad()
        if self.dp is not None:
            dist.all_reduce(total, group=self.dp.get_group())
            total /= run.dp
        return total.item(), float(norm)

    def autocast(self):
        """Parameters stay fp32 in bf16 runs; the computation is cast."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.run.dtype == "bf16" else nullcontext()

    def save_if_due(self, done: int) -> None:
        run = self.run
        if run.save and (done == run.steps or (run.save_every and done % run.save_every == 0)):
            from tpfused.training.saving import save

            self.emit("status", text="saving")
            self.emit("saved", path=save(run, self.worker, done, self.model, self.optimizer))

    def count_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what training holds at least, where no allocator counts."""
        tensors: list[Tensor] = []
        for parameter in self.parameters:
            state = self.optimizer.state[parameter].values()
            tensors += [parameter, parameter.grad, *(value for value in state if isinstance(value, Tensor))]
        return sum(local(tensor).nbytes for tensor in tensors)

    def from_all_ranks(self, value: int) -> list[int]:
        if self.run.world == 1:
            return [value]
        values = [None] * self.run.world
        dist.all_gather_object(values, value)
        return values

    def emit(self, name: str, **payload) -> None:
        if self.worker.rank == 0:
            self.worker.emit(name, payload)
