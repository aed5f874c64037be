"""What stands for communicators and clocks where a choice of tiers is tested without a GPU."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tpfused.group import resolve_group
from tpfused.overlap import choice, measure, saved
from tpfused.overlap.choice import choose
from tpfused.overlap.communicator import Rehearsal

SHAPE = 1000, 64, 32
TIERS = "p2p", "nccl"
LAPS = 1 + measure.ROUNDS  # of each candidate


class FakeCommunicator:
    size, handle, workspaces, why_no_peers = 4, 1, {}, ""

    def __init__(self, *tiers):
        self.tiers = tiers
        self.module = SimpleNamespace(build_info=lambda: {"sources": "1234", "nccl_loaded": 22809})
        self.given_up = None

    def check_alive(self):
        if self.given_up:
            raise RuntimeError(self.given_up)


class Attempts:
    """An operation that takes `us` microseconds by each tier, or raises what is there instead."""

    def __init__(self, p2p=100.0, nccl=200.0, reference=300.0):
        self.us = {"p2p": p2p, "nccl": nccl, "reference": reference}
        self.ran = []

    def __call__(self, chosen):
        name = "reference" if chosen is None else chosen[1]
        if chosen is None or not isinstance(chosen[0], Rehearsal):
            self.ran.append(name)
        assert not torch.is_grad_enabled()
        if isinstance(self.us[name], Exception):
            raise self.us[name]
        return self.us[name] * 1e-6


def fake_lap(run, calls, device):
    try:
        return run()
    except Exception as error:
        return str(error)


@contextmanager
def fakes(folder, communicator=None, **replaced):
    """As on a GPU, in a process that has chosen nothing yet, and that has earlier ones' choices in `folder`."""
    made = communicator or FakeCommunicator(*TIERS)

    def communicator_of(group, device):
        if isinstance(made, Exception):
            raise made
        return made if made.tiers else None

    with pytest.MonkeyPatch.context() as patch:
        for table in ("_known", "_measured", "_listed", "_places"):
            patch.setattr(choice, table, {})
        patch.setattr(choice, "communicator_of", communicator_of)
        patch.setattr(choice, "_is_on_gpu", lambda x: True)
        patch.setattr(choice, "_is_capturing", lambda: False)
        patch.setattr(choice, "_card", lambda device: ("Fake GPU", "0:1b:00"))
        patch.setattr(measure, "_lap", fake_lap)
        patch.setattr(saved, "path", lambda: folder / "choices.json")
        for name, value in replaced.items():
            patch.setattr(choice, name, value)
        yield


def tier_of(ctx, attempts, shape=SHAPE, dtype=torch.bfloat16, operation="op"):
    chosen = choose(operation, resolve_group(ctx.group(ctx.world)), torch.zeros(1, dtype=dtype), shape, attempts)
    return "reference" if chosen is None else chosen[1]


def saved_in(folder):
    return json.loads((folder / "choices.json").read_text())
