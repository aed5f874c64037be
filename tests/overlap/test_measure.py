"""Timing the tiers: turns, laps, and which is the fastest; on GPUs with real clocks."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import gpu_world
from tests.distributed import Workers
from tpfused.explanation import explain
from tpfused.group import resolve_group
from tpfused.overlap import measure, saved
from tpfused.overlap.choice import choose
from tpfused.overlap.measure import fastest


def test_fastest():
    assert fastest({"p2p": 98.0, "nccl": 94.0, "reference": 100.0}) == "nccl"
    assert fastest({"p2p": 98.0, "nccl": 96.0, "reference": 100.0}) == "p2p"  # near, and the first
    assert fastest({"nccl": 96.0, "p2p": 95.0, "reference": 100.0}) == "nccl"
    assert fastest({"p2p": 99.5, "nccl": 97.5, "reference": 100.0}) == "nccl"  # the other gains no more than noise
    assert fastest({"p2p": 99.5, "nccl": 120.0, "reference": 100.0}) == "reference"  # within the noise
    assert fastest({"p2p": 200.0, "nccl": 120.0, "reference": 100.0}) == "reference"
    assert fastest({"p2p": 200.0, "nccl": 120.0}) == "nccl"
    assert fastest({}) == "reference"


def test_measuring_takes_turns(monkeypatch):
    order, seconds = [], {"p2p": iter([9.0] + [4e-4, 6e-4, 5e-4] * 3), "reference": iter([1e-4] * 10)}

    def lap(name, calls, device):
        order.append((name, calls))
        return next(seconds[name])

    monkeypatch.setattr(measure, "_lap", lap)
    monkeypatch.setattr(measure, "by_rank", lambda value, process_group, call: {0: value})
    us, failures = measure.measure({"p2p": "p2p", "reference": "reference"}, {}, torch.device("cpu"), None)
    assert us == {"p2p": 500.0, "reference": 100.0} and not failures  # the first lap does not count
    turns = [("p2p", 50), ("reference", 50)]
    assert order == [("p2p", 2), ("reference", 2)] + (turns[::-1] + turns) * (measure.ROUNDS // 2)


def test_a_lap_without_its_first_call(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.milliseconds = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    def run():
        clock[0] += 5.0 if clock[0] else 100.0

    def fail():
        raise MemoryError("too\nlarge")

    clock = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    assert measure._lap(run, 4, torch.device("cpu")) == pytest.approx(5e-3) and clock == [120.0]
    assert measure._lap(fail, 4, torch.device("cpu")) == "MemoryError: too"


def check_real_clocks(ctx, folder):
    x, y = (torch.randn(size, size, device=ctx.device).half() for size in (256, 4096))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved, "path", lambda: folder / "choices.json")

        def attempt(chosen):
            slow = ctx.rank == 0 or chosen is None  # nccl is slow on one rank only
            return y @ y if slow and (chosen is None or chosen[1] == "nccl") else x @ x

        communicator, name = choose("op", resolve_group(), x, (256, 256, 256), attempt)
        row = explain()[-1]
        assert name == row.tier == communicator.tiers[0] == "p2p" and row.why == "measured"
        assert row.us["p2p"] < 0.5 * row.us["nccl"] and row.us["nccl"] < 2 * row.us["reference"]
        return row


@pytest.mark.gpu
def test_on_gpus(tmp_path):
    if gpu_world() < 2:
        pytest.skip("needs two GPUs")
    with Workers("cuda", gpu_world()) as workers:
        rows = workers.run(check_real_clocks, tmp_path)
    assert all(row == rows[0] for row in rows)
