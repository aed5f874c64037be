"""Small runs for the tests of `tpfused train`."""

from collections.abc import Callable

from tpfused.training.options import REMEMBERED, resolve
from tpfused.training.presets import RunConfig
from tpfused.workers import Worker

SMALL = dict(preset="quick", device="cpu", tp=1, sample=4, steps=3, batch_size=16, seq_len=24, lr=0.01)


def make_run(**options) -> RunConfig:
    """What the command line would make of these options."""
    ungiven = dict.fromkeys((*REMEMBERED, "preset", "device", "tp", "dp", "dp_mode", "save", "save_every"))
    return resolve(ungiven | SMALL | options)


def worker_of(run: RunConfig, emit: Callable = lambda name, payload: None) -> Worker:
    """The one worker of a run that needs no other."""
    return Worker(rank=0, world=1, local_rank=0, local_world=1, port=None, emit=emit)
