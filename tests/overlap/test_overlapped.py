"""Rows travel while the GPU multiplies, forward and backward, and NCCL takes no more of it than it may."""

import json
import math
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.overlap.cases import OPERATIONS, Case
from tpfused.overlap.communicator import NCCL_PROCESSORS
from tpfused.overlap.tiers import tier

SIZES = 8192, 4096, 16384  # tokens, in and out features: several blocks of each operation that has them
NOTHING_TRAVELS = ("column_matmul", "forward"), ("matmul_all_reduce", "backward")
MOVES = {"p2p": "PtoP", "nccl": "nccl"}
MATMUL = "nvjet", "gemm"  # cuBLAS's names for them
AHEAD = 20_000_000  # cycles, about 10 ms: that the GPU is kept busy for until all is launched, since tracing slows that
LEAST = 0.2  # of the shorter of all that travels and all that is multiplied: what runs one after the other has none


def traced(step) -> tuple[object, list[dict]]:
    """Its result, and what the GPU did in it: kernels and copies."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        dist.barrier()
        torch.cuda._sleep(AHEAD)
        result = step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    done = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    [start] = (event["ts"] + event["dur"] for event in done if "spin_kernel" in event["name"])
    return result, [event for event in done if event["ts"] >= start]


def share_beside(moves: list[dict], matmuls: list[dict]) -> float:
    """Of the shorter of the two, the share that runs beside the other."""

    def beside(one: dict, other: dict) -> float:
        ends = (event["ts"] + event["dur"] for event in (one, other))
        return max(0.0, min(ends) - max(one["ts"], other["ts"]))

    shorter = min(sum(event["dur"] for event in events) for events in (moves, matmuls))
    return sum(beside(move, matmul) for move in moves for matmul in matmuls) / shorter


def check_overlap(ctx):
    torch.manual_seed(0)
    for operation in OPERATIONS:
        case = Case(ctx, operation, *SIZES)
        for name, move in MOVES.items():
            with tier(name):
                case.run(backward=True)
                out, forward = traced(case.forward)
                _, backward = traced(partial(case.gradients, out))
            for which, events in (("forward", forward), ("backward", backward)):
                if (operation, which) in NOTHING_TRAVELS:
                    continue
                moves = [event for event in events if move in event["name"]]
                matmuls = [event for event in events if any(word in event["name"] for word in MATMUL)]
                told = f"{operation} by {name}, {which}"
                assert moves and matmuls, f"{told}: {sorted({event['name'] for event in events})}"
                assert share_beside(moves, matmuls) >= LEAST, f"{told}: {share_beside(moves, matmuls):.2f}"
                if name == "nccl":
                    assert max(event["args"]["grid"][0] for event in moves) <= NCCL_PROCESSORS, told


def check_spared(ctx):
    """A matmul beside NCCL is for fewer multiprocessors, whose grid cuBLAS makes as large as those; by copy engines it
    is for all of them, as is one beside which nothing comes any more."""
    torch.manual_seed(0)
    case, all_of_card = Case(ctx, "all_gather_matmul", *SIZES), torch.cuda.get_device_properties().multi_processor_count
    left = all_of_card - min(NCCL_PROCESSORS, all_of_card // 4)
    for name in MOVES:
        with tier(name):
            case.run()
            _, done = traced(case.run)
        matmuls = [event for event in done if any(word in event["name"] for word in MATMUL)]
        blocks = [math.prod(event["args"]["grid"]) for event in sorted(matmuls, key=lambda event: event["ts"])]
        assert len(blocks) == ctx.world, blocks
        assert (blocks[0] <= left) == (name == "nccl") and blocks[-1] > left, f"{name}: {blocks} of {all_of_card}"


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_matmuls_leave_nccl_its_multiprocessors(ranks):
    ranks.run(check_spared, timeout=60)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_rows_travel_beside_matmuls(ranks):
    if ranks.turns > 1:
        pytest.skip("needs a GPU for each rank: they take turns on one")
    ranks.run(check_overlap, timeout=90)
