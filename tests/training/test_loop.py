"""The training loop on every split of the workers: the dense twin's losses and gradient norms, and exact resumption."""

import math
from dataclasses import replace

import pytest

from tests.distributed import Context
from tests.training.runs import make_run, worker_of
from tpfused.training.loop import train_on
from tpfused.training.presets import RunConfig
from tpfused.training.saving import find
from tpfused.workers import Worker


def train(context: Context, run: RunConfig) -> dict:
    """Check for the pool: the result of a run on all workers, or on one alone. On rank 0; the others give {}."""
    result = {}

    def emit(name, payload):
        if name == "result":
            result.update(payload)

    if run.world == context.world:
        worker = Worker(context.rank, context.world, context.rank, context.world, None, emit)
        train_on(context.grid(run.tp) if run.world > 1 else None, run, worker, context.device)
    elif context.rank == 0:
        train_on(None, run, worker_of(run, emit), context.device)
    return result


def close(values, expected, tolerance) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(values, expected, strict=True))


PLAIN = dict()
EVERYTHING = dict(sequence_parallel=True, checkpoint_activations=True, accumulate=2, optimizer="sgd")
MEMORY = dict(preset="memory", steps=2, batch_size=4, seq_len=8)


@pytest.mark.parametrize(
    "mode, options",
    [("ddp", PLAIN), ("fsdp2", PLAIN), ("ddp", EVERYTHING), ("fsdp2", EVERYTHING), ("ddp", MEMORY)],
    ids=["ddp-plain", "fsdp2-plain", "ddp-everything", "fsdp2-everything", "ddp-memory"],
)
def test_every_split_agrees_with_the_dense_twin(workers, tp, mode, options):
    run = make_run(dtype="fp64", **options)
    run = replace(run, device=workers.device, tp=tp, dp=workers.world // tp, dp_mode=mode)
    if run.dp == 1 and mode == "fsdp2":
        pytest.skip("nothing to shard over one data-parallel rank")
    parallel = workers.run(train, run)[0]
    dense = workers.run(train, replace(run.dense_twin(), sample=run.sample))[0]
    assert close(parallel["loss"], dense["loss"], 1e-10)
    assert close(parallel["grad_norm"], dense["grad_norm"], 1e-9)
    if run.task == "text":
        assert close(parallel["validation"].values(), dense["validation"].values(), 1e-9)
        assert parallel["sample"] == dense["sample"]
    assert len(parallel["params_per_rank"]) == len(parallel["peak_bytes_per_rank"]) == workers.world


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_resumed_run_repeats_the_uninterrupted_one(workers, tmp_path, mode):
    if workers.world < 4:
        pytest.skip("needs 4 workers")
    run = replace(make_run(steps=4), device=workers.device, tp=2, dp=2, dp_mode=mode)
    whole = workers.run(train, run)[0]
    workers.run(train, replace(run, steps=2, save=str(tmp_path)))
    resumed = replace(run, resume=find(str(tmp_path))["path"], first_step=2)
    again = workers.run(train, resumed)[0]
    if workers.device == "cpu":
        assert again["loss"] == whole["loss"][2:]
        assert again["grad_norm"] == whole["grad_norm"][2:]
    for tp, dp, other_mode in ((4, 1, "ddp"), (1, 4, "fsdp2")):
        elsewhere = workers.run(train, replace(resumed, tp=tp, dp=dp, dp_mode=other_mode))[0]
        assert close(elsewhere["loss"], whole["loss"][2:], 1e-5)
