"""Times and layouts, against what can be worked out by hand."""

from dataclasses import replace

import pytest

from tpfused.planning.block import Setting, block
from tpfused.planning.communication import OPERATIONS, Fit
from tpfused.planning.layouts import Layout, Step, layouts, predict, why_none
from tpfused.planning.rates import Rates
from tpfused.planning.shape import PRESETS, Shape
from tpfused.planning.time import Time, bubble, optimizer_us, time_of
from tpfused.planning.work import CONTIGUOUS, JOINED, STRIDED, Attention, Collective, Matmul, Pair, Pass

SHAPE = Shape(hidden=64, ffn=160, layers=4, heads=4, kv_heads=2, vocab=100)
STEP = Step(8, 1, 128, 2, sequence_parallel=True, checkpointed=False, overlap=True)
FITS = tuple(Fit(op, "all", 2, 10.0, 1e-3) for op in OPERATIONS)
RATES = Rates(1.0, 0.5, 0.25, 100.0, {STRIDED: 10.0, JOINED: 5.0}, FITS)
HOST = replace(
    RATES,
    latency_us={"matmul": 2.0, "attention": 2.0, "attention_backward": 2.0, "memory": 1.1},
    host_us={"matmul": 4.0, "parallel_matmul": 9.0, "other": 1.0},
    hidden=1.0,
)
ONLY_MATMULS = Rates(1.0, float("inf"), float("inf"), float("inf"), {STRIDED: float("inf"), JOINED: float("inf")}, FITS)
MATMUL = Matmul("forward", 100, 100, 100)


def test_rates():
    assert RATES.us(MATMUL) == 2.0  # 2e6 operations at 1e12 a second
    assert replace(RATES, measured={MATMUL: 7.0}).us(MATMUL) == 7.0
    assert RATES.us(Attention(1, 1, 100, 100)) == 4.0 and RATES.us(Attention(1, 1, 100, 100, True)) == 20.0
    assert RATES.us(Pass("x", CONTIGUOUS, 1e6)) == 10.0
    assert RATES.us(Pass("x", STRIDED, 1e6, 1e5)) == 10.0 and RATES.us(Pass("x", STRIDED, 1e6, 1e6)) == 100.0
    assert RATES.us(Pass("x", JOINED, 1e6, 1e5)) == 20.0
    assert RATES.us(Collective("all_reduce", 1000), 2) == 11.0 and RATES.us(Collective("all_reduce", 1000), 1) == 0
    assert Rates.from_dict(RATES.as_dict()) == RATES


def test_latencies_and_the_host():
    """A narrow matmul runs at a lower rate; a layer's matmul on several ranks has a collective to launch, too."""
    slow = replace(RATES, latency_us={"matmul": 2.0, "attention": 3.0, "attention_backward": 5.0, "memory": 1.0})
    narrow = replace(MATMUL, n=25)
    assert slow.us(MATMUL) == 4.0 and slow.us(narrow) == 2.5
    assert slow.us(Attention(1, 1, 100, 100)) == 7.0 and slow.us(Attention(1, 1, 100, 100, True)) == 25.0
    assert slow.us(Pass("x", CONTIGUOUS, 1e6)) == 11.0 and slow.us(Pass("x", STRIDED, 1e6, 1e6)) == 100.0
    assert slow.us(Pass("x", STRIDED, 1e6, 1e5)) == 11.0
    assert slow.us(Collective("all_reduce", 1000), 2) == RATES.us(Collective("all_reduce", 1000), 2)
    assert replace(slow, measured={MATMUL: 7.0}).us(MATMUL) == 7.0

    assert RATES.host(MATMUL, 2) == 0 and RATES.unknown() and not HOST.unknown()
    pair, other = Pair(MATMUL, Collective("all_gather", 1)), Pass("x", CONTIGUOUS, 1)
    assert [HOST.host(work, 1) for work in (MATMUL, pair, other)] == [4.0, 4.0, 1.0]
    assert [HOST.host(work, 2) for work in (MATMUL, pair, other, pair.collective)] == [9.0, 9.0, 1.0, 1.0]
    assert Rates.from_dict(HOST.as_dict()) == HOST
    before = {name: value for name, value in HOST.as_dict().items() if name not in ("latency_us", "host_us", "hidden")}
    assert Rates.from_dict(before) == RATES


def test_the_longer_of_host_and_gpu():
    """Of all the work together: the host runs ahead through what takes the GPU long."""
    long, short = replace(MATMUL, m=1000), [Pass("x", CONTIGUOUS, 10)] * 12
    times = [time_of(works, HOST, 1, True) for works in ([long], short, [long, *short])]
    assert [time.host for time in times] == [4.0, 12.0, 16.0]
    assert [round(time.device, 3) for time in times] == [22.0, 13.201, 35.201]
    quick = replace(HOST, latency_us={})
    assert time_of(short, quick, 1, True).total == 12.0  # which the GPU would do in 0.0012 us
    both = time_of([long], quick, 1, True) + time_of(short, quick, 1, True)
    assert both.total == pytest.approx(20.0012) and (both * 2).host == 32.0


@pytest.mark.parametrize(
    "broken",
    [
        {"fits": 3}, {"matmul_tflops": "x"}, {"memory_gbps": 0}, {"pass_rates": {}}, {"latency_us": {"memory": -1}},
        {"host_us": {"other": float("inf")}}, {"host_us": None}, {"hidden": 1.5}, {"hidden": "all"},
    ],
)  # fmt: skip
def test_rates_refuse(broken):
    with pytest.raises(ValueError, match="no rates of a machine"):
        Rates.from_dict(RATES.as_dict() | broken)


def test_what_overlaps_counts_once():
    short, long = Collective("all_gather", 0), Collective("all_gather", 1e6)  # 10 and 1010 us, beside 2
    both = [Pair(MATMUL, long), Pair(MATMUL, short), short]
    overlapped, plain = (time_of(both, RATES, 2, overlap) for overlap in (True, False))
    assert plain == Time(matmul=4.0, communication=1030.0) and plain.total == 1034.0
    assert overlapped.hidden == 4.0 and overlapped.total == 1030.0 and overlapped.exposed == 1026.0
    assert time_of([Pair(replace(MATMUL, m=10_000), short)], RATES, 2, True).total == 200.0
    assert time_of([short], RATES, 1, True).total == 0
    # What hides each other slows each other down.
    partly, plain = (time_of(both, replace(RATES, hidden=0.75), 2, overlap) for overlap in (True, False))
    assert partly.hidden == 3.0 and partly.total == 1031.0 and plain.hidden == 0


def test_layouts():
    """4 heads and 2 kv heads on 4 ranks share them; on 8 there are too few heads; a stage has a block at least."""
    found = list(layouts(SHAPE, STEP, 8))
    assert {(each.tp, each.dp, each.pp) for each in found} == {
        (1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 4, 1), (2, 2, 2), (2, 1, 4), (4, 2, 1), (4, 1, 2),
    }  # fmt: skip
    assert all(each.dp <= 2 for each in layouts(SHAPE, replace(STEP, batch=2), 8))
    assert not list(layouts(SHAPE, replace(STEP, batch=7, micro_batch=2), 2))


def test_one_gpu():
    """Six operations a weight and token, and AdamW's 28 bytes a parameter."""
    plan = predict(SHAPE, STEP, Layout(1, 1, 1), ONLY_MATMULS)
    weights = SHAPE.layers * (SHAPE.block_parameters() - 128) + 64 * 100
    assert plan.step_us == pytest.approx(6 * weights * 8 * 128 / 1e6)
    assert plan.work.total == plan.work.matmul and plan.exposed_us == plan.bubble == 0
    assert plan.sent == {"tp": 0, "dp": 0, "pp": 0}
    with_memory = predict(SHAPE, STEP, Layout(1, 1, 1), replace(ONLY_MATMULS, memory_gbps=100.0))
    optimizer = 28 * SHAPE.parameters() / 100e3
    assert optimizer_us(SHAPE.parameters(), 2, RATES) == pytest.approx(optimizer)
    assert with_memory.step_us == pytest.approx(with_memory.work.total + optimizer)


def test_computed_again():
    once = predict(SHAPE, STEP, Layout(1, 1, 1), ONLY_MATMULS)
    again = predict(SHAPE, replace(STEP, checkpointed=True), Layout(1, 1, 1), ONLY_MATMULS)
    weights = SHAPE.layers * (SHAPE.block_parameters() - 128)
    assert again.step_us - once.step_us == pytest.approx(2 * weights * 8 * 128 / 1e6)
    assert again.memory.activations < once.memory.activations


def test_pipelines_idle():
    """Stages of two blocks, the second one with the head: (pp - 1) / micro-batches more of what the slowest does."""
    assert bubble(4, 8) == 3 / 8 and bubble(1, 8) == 0
    plan = predict(SHAPE, STEP, Layout(1, 1, 2), ONLY_MATMULS)
    head = 64 * 100
    stage = 6 * 128 * (2 * (SHAPE.block_parameters() - 128) + head) / 1e6  # of one micro-batch
    hops = 2 * (10.0 + 128 * 64 * 2 * 1e-3)
    assert plan.bubble == 1 / 8 and plan.step_us == pytest.approx((8 + 1) * (stage + hops))
    assert plan.sent["pp"] == 2 * 8 * 128 * 64 * 2 and plan.exposed_us == pytest.approx(8 * hops)
    whole = predict(SHAPE, STEP, Layout(1, 1, 1), ONLY_MATMULS)
    assert plan.memory.parameters == whole.memory.parameters / 2 - 2 * 64 / 2  # the first stage has no last norm


def test_data_parallel_gradients():
    """All-reduced beside the last backward; what is longer than that is exposed."""
    alone = predict(SHAPE, replace(STEP, batch=4), Layout(1, 1, 1), ONLY_MATMULS)
    plan = predict(SHAPE, STEP, Layout(1, 2, 1), ONLY_MATMULS)
    size = 2 * SHAPE.parameters()
    backward = alone.work.total / 4 * 2 / 3
    assert plan.sent["dp"] == size and plan.work == alone.work
    assert plan.exposed_us == pytest.approx(max(0.0, 10.0 + size * 1e-3 - backward)) and plan.exposed_us > 0
    assert plan.step_us == pytest.approx(alone.step_us + plan.exposed_us)
    quick = predict(SHAPE, STEP, Layout(1, 2, 1), replace(ONLY_MATMULS, fits=(Fit("all_reduce", "dp", 2, 1.0, 0.0),)))
    assert quick.exposed_us == 0


def test_tensor_parallel_traffic():
    """Sequence parallel: 4 gathers and 4 scatters a block, half of each on the wire; two more that overlap needs."""
    sent = {
        overlap: predict(SHAPE, replace(STEP, overlap=overlap), Layout(2, 1, 1), RATES).sent["tp"]
        for overlap in (False, True)
    }
    tokens = 128 * 64 * 2 / 2 * 8  # on the wire, of all micro-batches, for one collective
    assert sent[True] - sent[False] == (2 * 4 + 1) * tokens  # the head's column among them
    small = 8 * (2 * 64 * 2 * 4 + 64 * 2 + 12 * 128)  # norms, and what the loss gathers
    assert sent[False] == 8 * 4 * tokens + 2 * tokens + 2 * tokens + small


def test_presets_at_scale():
    """Llama 3 70B needs more than one H100, and fits on 64 of them."""
    rates = Rates(700.0, 400.0, 350.0, 3000.0, {STRIDED: 370.0, JOINED: 220.0}, FITS)
    fast = replace(rates, fits=tuple(Fit(op, "all", 2, 15.0, 1 / 330e3) for op in OPERATIONS))
    step = Step(64, 1, 8192, 2, sequence_parallel=True, checkpointed=True, overlap=True)
    shape = PRESETS["llama3-70b"]
    assert not predict(shape, step, Layout(8, 1, 1), fast).memory.fits(80 * 2**30)
    plan = predict(shape, step, Layout(8, 1, 8), fast)
    assert plan.memory.fits(80 * 2**30)
    tokens = 64 * 8192
    utilisation = 6 * shape.parameters() * tokens / (plan.step_us * 64 * 990e6)
    assert 0.2 < utilisation < 0.6


def test_block_on_more_ranks_does_less():
    work = [block(SHAPE, Setting(tp, 128, 1, 2, tp > 1, True)) for tp in (1, 2, 4)]
    times = [time_of(both.forward + both.backward, RATES, tp, True) for both, tp in zip(work, (1, 2, 4), strict=True)]
    for name in ("matmul", "attention", "elementwise"):
        first, second, third = (getattr(time, name) for time in times)
        assert first > second > third


@pytest.mark.parametrize(
    "gpus, asked, changed, told",
    [
        (4, {"tp": 3}, {}, ["tp 3 does not divide 4 GPUs"]),
        (8, {"tp": 8}, {"micro_batch": 3}, ["tp 8 does not divide 12 heads", "8 is not whole micro-batches of 3"]),
        (12, {"tp": 4, "pp": 6}, {}, ["tp 4 x pp 6 = 24 does not divide 12 GPUs"]),
        (12, {"tp": 2, "dp": 2, "pp": 1}, {}, ["tp 2 x dp 2 x pp 1 = 4 is not 12 GPUs"]),
        (13, {"pp": 13}, {"batch": 13}, ["pp 13 is more than 12 layers"]),
        (4, {"dp": 4}, {"batch": 6}, ["6 is not whole micro-batches of 1 on each of dp 4 ranks"]),
        (8, {"pp": 1, "dp": 1}, {}, ["no tp that splits the model and pp of at most 12 layers make up the 8 GPUs"]),
        (26, {"dp": 2}, {}, ["pp of at most 12 layers make up the 13 GPUs of each of dp 2 ranks"]),
        (4, {"tp": 1, "pp": 1}, {"batch": 6}, ["6 is not whole micro-batches of 1 on each rank of dp 4"]),
        (10**13, {}, {"batch": 3}, ["a batch of 3 is not whole micro-batches of 1 on each rank of dp 250000000000, 3"]),
    ],
)
def test_only_what_is_violated_is_named(gpus, asked, changed, told):
    step = replace(STEP, **changed)
    found = why_none(PRESETS["gpt2"], step, gpus, asked)
    assert len(found) == len(told) and all(each in reason for each, reason in zip(told, found, strict=True)), found
    wanted = (each for each in layouts(PRESETS["gpt2"], step, gpus) if vars(each).items() >= asked.items())
    assert not any(wanted)
