"""One rank of the benchmark: builds each program, checks it, and times all of them in turn with the other ranks."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.bench.measure import GpuTimer, Timed, median_and_iqr
from tpfused.bench.model import decode
from tpfused.bench.model.accuracy import Deviation, deviations
from tpfused.bench.model.cases import Case, Degree, Size
from tpfused.bench.model.programs import Place, Program, build, build_all, place_of
from tpfused.bench.results import new_row, rounded
from tpfused.bench.runner import DTYPES
from tpfused.bench.sampling import Sampled, common_seed, interleave, join, slowest, together
from tpfused.overlap.communicator import kept_bytes
from tpfused.workers import Worker

MATMUL = "matmul"  # whose rate is the peak
PEAK_TOKENS = 8192
TOLERANCE = 5e-2  # relative, of the norm, between two ways to compute the same logits in 16 bits

# Decoding's variants, each with the tier that it is forced to: they differ in the all-reduces, and then in the kernels.
DECODED = {"ours_reference": "reference", "ours_sequential": "sequential", "ours": None}

Row = dict[str, Any]
Key = tuple[Degree, str]  # of a program: where, and its variant


@dataclass(frozen=True)
class Plan:
    """What a run measures, the same on every rank; `variants` are those of the programs' that are wanted at all."""

    device: str
    dtype: str
    size: Size
    layers: int
    cases: tuple[Case, ...]
    variants: tuple[str, ...]
    rounds: int
    seed: int


@dataclass
class Programs:
    """The programs of all degrees, and what is known of each: why it failed, whether its logits are right."""

    ready: dict[Key, Program] = field(default_factory=dict)
    known: dict[Key, Row] = field(default_factory=dict)


def run(plan: Plan, worker: Worker) -> None:
    """Measure the plan's cases and give their rows to ``worker.emit``, on the first rank."""
    device = join(plan.device, worker)
    plan = replace(plan, seed=common_seed(plan.seed))
    dtype = DTYPES[plan.dtype]
    degrees = list(dict.fromkeys(case.degree for case in plan.cases))
    places = {degree: place_of(degree, worker.world, device, dtype) for degree in degrees}
    emit = worker.emit if worker.rank == 0 else lambda name, payload: None
    train = [case for case in plan.cases if case.op == "train"]
    if train:
        emit("start", "accuracy")
        alone = places.get(Degree(1)) or place_of(Degree(1), worker.world, device, dtype)
        found = {}
        for tokens in dict.fromkeys(case.tokens for case in train):
            found[tokens] = deviations(plan.size, tokens, alone, list(places.values()), plan.variants, plan.seed)
            _free(device)
        programs = prepare(plan, {case.degree: places[case.degree] for case in train})
        for group in _in_groups(train):
            emit("start", group[0].label)
            for case, rows in zip(group, measure(group, programs, places, plan, found[group[0].tokens]), strict=True):
                emit("rows", (case.label, rows))
        del programs
        _free(device)
    timer = GpuTimer(capture_error_mode="thread_local") if device.type == "cuda" else None
    models: dict[Degree, Program] = {}
    for group in _in_groups([case for case in plan.cases if case.op == "decode"]):
        emit("start", group[0].label)
        for case in group:
            if case.degree not in models:
                place = places[case.degree]
                models[case.degree], _ = build(plan.size, plan.layers, plan.size.context, place, plan.seed)
        for case, rows in zip(group, measure_decoding(group, models, plan, device, timer), strict=True):
            emit("rows", (case.label, rows))
    dist.destroy_process_group()


def prepare(plan: Plan, places: Mapping[Degree, Place]) -> Programs:
    """Every variant's program at every degree, with the same weights; and whether they give the same logits."""
    tokens = max(case.tokens for case in plan.cases)
    shortest = min(case.tokens for case in plan.cases if case.op == "train")
    programs = Programs()
    for degree, place in places.items():
        ids, _ = _data(plan, shortest, place.device)
        right = None
        for name, program, error in build_all(plan.variants, plan.size, plan.layers, tokens, place, plan.seed):
            logits = None
            if program is not None:
                logits, error = together(partial(_logits, program, ids, training=degree.dp == 1))
            known = programs.known[degree, name] = {"error": error}
            if degree.tp == 1 and name.startswith("dtensor"):
                known["note"] = "plain PyTorch"
            if logits is None:
                continue
            programs.ready[degree, name] = program
            if right is None:
                right, first = logits, known
            else:
                known["correct"] = _agree(logits, right)
                if known["correct"]:
                    first["correct"] = True  # two ways that have little in common
    return programs


def measure(
    group: Sequence[Case],
    programs: Programs,
    places: Mapping[Degree, Place],
    plan: Plan,
    found: tuple[Deviation | None, Mapping[Key, Deviation]],
) -> list[list[Row]]:
    """The rows of cases that differ in their degree only: all programs of all of them take turns."""
    device, dtype = places[group[0].degree].device, DTYPES[plan.dtype]
    timed = {(None, MATMUL): Timed(_peak_matmul(plan.size, device, dtype), 1, False)}
    ids, labels = _data(plan, group[0].tokens, device)
    known = {key: dict(facts) for key, facts in programs.known.items() if key[0] in {case.degree for case in group}}
    for key in [key for key in known if key in programs.ready]:
        call = partial(_once, programs.ready[key], group[0].direction, ids, labels)
        used, error = together(partial(_peak_bytes, programs.ready[key], call, key[1], places[key[0]]))
        if error is None:
            timed[key] = Timed(call, 1, False)
            known[key]["peak_bytes"] = None if used is None else int(slowest([used])[0])
        else:
            known[key]["error"] = error
            programs.ready[key].forget_gradients()
    samples = interleave(timed, plan.rounds, device, ahead=False)
    peak = samples.pop((None, MATMUL))
    peak_rates = [2 * PEAK_TOKENS * plan.size.hidden * plan.size.ffn / us for us in peak.us]
    rows = []
    for case in group:
        facts = _figures(case, samples, peak_rates, plan)
        rows.append(
            [
                _row(case, plan, name, **of, **facts.get(name, {}), **_deviations(case, (degree, name), found))
                for (degree, name), of in known.items()
                if degree == case.degree
            ]
        )
    _compare_memory(rows)
    return rows


def measure_decoding(
    group: Sequence[Case], models: Mapping[Degree, Program], plan: Plan, device: torch.device, timer: GpuTimer | None
) -> list[list[Row]]:
    """The rows of decoding at several degrees, in turn: ours, ours with NCCL's all-reduces after the matmuls, and ours
    without the kernels either.

    What is right is an eager step's logits, with plain NCCL where there are several ranks.
    """
    timed: dict[Key, Timed] = {}
    known: dict[Key, Row] = {}
    for case in group:
        model, right = models[case.degree].module.model, None
        for name, forced in DECODED.items():
            if forced and case.degree.tp == 1:
                continue
            ready, error = together(partial(decode.prepare, model, case.batch, case.tokens, forced, timer))
            known[case.degree, name] = {"error": error}
            if ready is not None:
                timed[case.degree, name], eager, captured = ready
                right = eager if right is None else right
                known[case.degree, name]["correct"] = _agree(captured, right)
    samples = interleave(timed, plan.rounds, device) if timed else {}
    rows = []
    for case in group:
        facts = _decode_figures(case, samples, plan)
        rows.append(
            [
                _row(case, plan, name, **of, **facts.get(name, {}), graph=bool(timer) or None)
                for (degree, name), of in known.items()
                if degree == case.degree
            ]
        )
    timed.clear()
    _free(device)
    return rows


def _figures(case: Case, samples: Mapping[Key, Sampled], peak_rates: Sequence[float], plan: Plan) -> dict[str, Row]:
    """Variant -> what its times say, beside ours, beside its own on one rank, and beside the matmul's of each round."""
    degree = case.degree
    flops = plan.size.flops(plan.layers, case.tokens, case.direction) / degree.tp  # of a rank
    facts = {}
    for name, sampled in _of_degree(samples, degree).items():
        row = _times(case, name, sampled, samples) | {"amount": flops, "unit": "TFLOP/s"}
        row["rate"] = round(flops / row["us"] / 1e6, 1)
        shares = [flops / us / peak for us, peak in zip(sampled.us, peak_rates, strict=True)]
        row["peak_share"] = round(statistics.median(shares), 4)
        facts[name] = row | {"rounds": plan.rounds}
    return facts


def _decode_figures(case: Case, samples: Mapping[Key, Sampled], plan: Plan) -> dict[str, Row]:
    moved = plan.size.decode_bytes(plan.layers, case.batch, DTYPES[plan.dtype].itemsize) / case.degree.tp
    facts = {}
    for name, sampled in _of_degree(samples, case.degree).items():
        row = _times(case, name, sampled, samples) | {"amount": moved, "unit": "GB/s"}
        facts[name] = row | {"rate": round(moved / row["us"] / 1e3, 1), "rounds": plan.rounds}
    return facts


def _times(case: Case, name: str, sampled: Sampled, samples: Mapping[Key, Sampled]) -> Row:
    """`tokens_per_s` is of all ranks of the degree together."""
    median, iqr = rounded(*median_and_iqr(sampled.us))
    tokens = case.degree.dp * case.batch * (case.tokens if case.op == "train" else 1)
    row = {"us": median, "us_iqr": iqr, "host_us": round(sampled.host_us, 3), "calls": sampled.calls}
    row["tokens_per_s"] = round(tokens / median * 1e6, 3)
    ours, alone = samples.get((case.degree, "ours")), samples.get((Degree(1), name))
    if ours is not None and name != "ours":
        ratios = [one / other for one, other in zip(sampled.us, ours.us, strict=True)]
        row["times_ours"], row["times_ours_iqr"] = rounded(*median_and_iqr(ratios), digits=4)
    if alone is not None and case.degree != Degree(1):
        gains = [case.degree.dp * other / one for one, other in zip(sampled.us, alone.us, strict=True)]
        row["scaling"], row["scaling_iqr"] = rounded(*median_and_iqr(gains), digits=4)
    return row


def _of_degree(samples: Mapping[Key, Sampled], degree: Degree) -> dict[str, Sampled]:
    return {name: sampled for (place, name), sampled in samples.items() if place == degree}


def _deviations(case: Case, key: Key, found: tuple[Deviation | None, Mapping[Key, Deviation]]) -> Row:
    dense, of = found
    if key not in of:
        return {}
    what = "logits" if case.direction == "fwd" else "gradients"
    known = {"deviation": getattr(of[key], what), "dense_deviation": getattr(dense, what)}
    return known | {"deviation_tokens": case.tokens}


def _compare_memory(rows: Sequence[Sequence[Row]]) -> None:
    """Each peak as a share of the same variant's on one rank."""
    alone = {row["variant"]: row["peak_bytes"] for each in rows for row in each if (row["tp"], row["dp"]) == (1, 1)}
    for row in (row for each in rows for row in each):
        if (row["tp"], row["dp"]) != (1, 1) and row["peak_bytes"] and alone.get(row["variant"]):
            row["memory_share"] = round(row["peak_bytes"] / alone[row["variant"]], 4)


def _row(case: Case, plan: Plan, variant: str, **known: Any) -> Row:
    own = {"tp": case.degree.tp, "dp": case.degree.dp, "layers": plan.layers, "tokens": case.tokens}
    own |= {"batch": case.batch}
    own |= dict.fromkeys(
        "tokens_per_s times_ours times_ours_iqr scaling scaling_iqr peak_share peak_bytes memory_share host_us "
        "deviation dense_deviation deviation_tokens".split()
    )
    return new_row(case.op, case.name, case.direction, plan.dtype, variant, **own | known)


def _data(plan: Plan, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and labels ``[1, tokens]``, the same on every rank."""
    generator = torch.Generator(device).manual_seed(plan.seed)
    ids, labels = (
        torch.randint(plan.size.vocabulary, (1, tokens), device=device, generator=generator) for _ in range(2)
    )
    return ids, labels


def _logits(program: Program, ids: Tensor, training: bool) -> Tensor:
    """`training`: with gradients, without which a compiled program would be another one."""
    with torch.set_grad_enabled(training), program.inside():
        return program.logits(ids).detach()


def _once(program: Program, direction: str, ids: Tensor, labels: Tensor) -> None:
    if direction == "fwd":
        program.forward(ids, labels)
    else:
        program.step(ids, labels)
        program.forget_gradients()


def _peak_bytes(program: Program, call: Callable[[], None], variant: str, place: Place) -> int | None:
    """The most memory that the program holds in a call, its parameters included; None on a CPU. Others' models, which
    are there as well, are not counted. Our `_kept_bytes` are."""
    call()  # compiles and measures what there is
    call()
    if place.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before + program.resident_bytes()
    return used + _kept_bytes(variant, place)


def _kept_bytes(variant: str, place: Place) -> int:
    """What ours has kept from the calls before, which `used` does not count: workspaces and what peers write."""
    return kept_bytes(place.tp.get_group()) if variant == "ours" else 0


def _peak_matmul(size: Size, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Of random numbers, for a matmul of zeros is faster."""
    x = torch.randn(PEAK_TOKENS, size.hidden, device=device, dtype=dtype)
    return partial(F.linear, x, torch.randn(size.ffn, size.hidden, device=device, dtype=dtype))


def _agree(found: Tensor, right: Tensor) -> bool:
    """Whether these logits are the others, up to their rounding, on every rank."""
    error = ((found.float() - right.float()).norm() / right.float().norm()).item()
    return slowest([error if error == error else float("inf")])[0] < TOLERANCE


def _in_groups(cases: Sequence[Case]) -> Iterator[list[Case]]:
    for _, group in groupby(cases, key=lambda case: case.together):
        yield list(group)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
