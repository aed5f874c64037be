"""What `tpfused bench comm` measures beside collectives: made-up times give back what they were made up from."""

import pytest
import torch
import torch.distributed as dist

from tpfused.bench import sampling
from tpfused.bench.comm import rates
from tpfused.bench.comm.job import rates_of
from tpfused.bench.comm.programs import LARGE_LAYERS, LINEAR_CALLS, OTHER_CALLS, Programs, hidden_share, parts_of_layers
from tpfused.bench.measure import Timed
from tpfused.bench.sampling import Sampled, interleave
from tpfused.planning.block import Setting, block
from tpfused.planning.rates import LATENCIES, MATMUL, OTHER, PARALLEL_MATMUL, Rates
from tpfused.planning.shape import PRESETS
from tpfused.planning.work import Matmul, Pair

# Passes that are not contiguous take long enough that their bytes do not count.
KNOWN = Rates(0.5, 0.25, 0.125, 50.0, {"strided": 0.5, "joined": 0.25}, latency_us=dict.fromkeys(LATENCIES, 3.0))
HOST = {MATMUL: 60.0, PARALLEL_MATMUL: 600.0, OTHER: 120.0}


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made_up(calls, rounds, device, dtype, waiting=()):
    """Each call once, as it is called; and times of a machine that is `KNOWN`."""
    for call in calls.values():
        call()
    times = {key: 1.0 if isinstance(key, str) else KNOWN.us(key) for key in calls}
    return {key: Sampled([us] * rounds, HOST.get(key, 1.0), 1) for key, us in times.items()}


def test_rates_are_found_by_the_times(monkeypatch, alone):
    monkeypatch.setattr(rates, "time_calls", made_up)
    measured = rates.measure_rates(torch.device("cpu"), torch.float32, 3, None)
    found, facts = rates_of(measured, ())
    for name in ("matmul_tflops", "attention_tflops", "attention_backward_tflops", "memory_gbps"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name)), name
    assert found.latency_us == pytest.approx(KNOWN.latency_us)
    assert found.pass_rates == pytest.approx(KNOWN.pass_rates)
    assert found.host_us == {MATMUL: 10.0, OTHER: 10.0} and found.hidden is None
    assert facts["memory_bytes"] > 2**20 and len(facts["measured_us"]) == 9 + 4 + 4 + 2
    assert Rates.from_dict(found.as_dict()) == found


def test_a_rate_where_the_size_makes_no_difference():
    assert rates._line("matmul", [(1e6, 20.0), (1e9, 10.0)]) == (0.0, 1e8)


def test_what_a_matmul_hides():
    """All, nothing, half of the shorter of each pair; more than all, or less than nothing, is noise."""
    parts = parts_of_layers(257, 32, 64, 2, 2)
    pairs = [part for part in parts if isinstance(part, Pair)]
    assert len(parts) == LINEAR_CALLS and len(pairs) == 5 and all(pair.collective.bytes == 256 * 64 for pair in pairs)
    us = {part.matmul if isinstance(part, Pair) else part: 10.0 for part in parts}
    us |= {pair.collective: 4.0 for pair in pairs}
    for ours, share in ((60.0, 1.0), (80.0, 0.0), (70.0, 0.5), (50.0, 1.0), (90.0, 0.0)):
        assert hidden_share(parts, us | {LARGE_LAYERS: ours}) == share


def launched(ctx):
    """What the calls by which the host's time is known give."""
    group = ctx.group(2)
    found = Programs(ctx.device, torch.float32, group)
    gradients = {key: call() for key, call in found.calls.items()}
    return sorted(found.calls), {key: [tuple(each.shape) for each in each] for key, each in gradients.items()}


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
def test_programs_on_two_ranks(workers):
    """Layers' gradients, with this rank's features, and no part alone where nothing overlaps."""
    names, shapes = workers.run(launched)[0]
    assert names == sorted([MATMUL, OTHER, PARALLEL_MATMUL, LARGE_LAYERS])
    assert shapes[MATMUL] == [(8, 32), (32, 32), (32, 32)] and shapes[PARALLEL_MATMUL] == [(4, 32), (32, 32), (32, 32)]
    assert shapes[OTHER] == [(8, 1, 32), (8, 1, 96), (8, 1, 64), (32,)]


def test_other_calls_are_those_of_a_block():
    """A block on a GPU has one norm more each way."""
    both = block(PRESETS["llama3-8b"], Setting(1, 64, 1, 2, False, True, kernels=True))
    others = [work for work in both.forward + both.backward if not isinstance(work, Matmul)]
    assert len(others) == OTHER_CALLS + 2


def test_host_us_is_of_a_call(alone):
    found = Programs(torch.device("cpu"), torch.float32, None)
    assert found.host_us(HOST) == {MATMUL: 10.0, PARALLEL_MATMUL: 100.0, OTHER: 10.0} and found.hidden({}) is None


def test_what_waits_for_its_host_has_no_lead(monkeypatch, alone):
    """And the others' lead is not that of a slow program."""
    leads = {}

    def sample(timed, runs, lead_us, device, load):
        leads.setdefault(timed.run, []).append((lead_us, load))
        return timed.calls, 1000.0 * timed.calls

    monkeypatch.setattr(sampling, "_sample", sample)
    timed = {"kernel": Timed("kernel", 1, False), "program": Timed("program", 50, False)}
    interleave(timed, 2, torch.device("cpu"), waiting={"program"}, load="load")
    assert leads["program"] == [(0, "load")] * 3
    assert leads["kernel"] == [(1000, "load")] + [(1.25 * 1000.0 * 10, "load")] * 2


def test_a_cpu_is_not_loaded():
    assert sampling.load_of(torch.device("cpu"), torch.float32) is None


@pytest.mark.gpu
def test_a_load_takes_as_long_as_it_is_asked_for():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    load = sampling.load_of(device, torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    load(20_000)
    end.record()
    torch.cuda.synchronize()
    assert 5 < begin.elapsed_time(end) < 80  # of 20 ms: others may have used the GPU while it was measured, or now
