"""Which kernels an operation of the p2p tier runs: those of its size, and not slower ones that give the same."""

import struct

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.compare import Block, assert_within_rule
from tests.overlap.cases import OPERATIONS, TOLERANCE, Case
from tests.overlap.test_all_reduce_norm import Data
from tpfused import extension
from tpfused.group import resolve_group
from tpfused.overlap import communicator
from tpfused.overlap.matmul_all_reduce import MOST_TOKENS
from tpfused.overlap.tiers import deterministic, tier

OURS = "multiply_and_push", "tiny_sum", "one_shot", "two_shot", "gather", "scatter", "add_parts"
# Operation, all ranks' tokens, in and out features -> the kernels of csrc that its forward runs on two ranks.
CASES = [
    ("matmul_all_reduce", (1, 512, 1024), {"multiply_and_push", "tiny_sum"}),
    ("matmul_all_reduce", (4, 512, 1024), {"tiny_sum"}),
    ("matmul_all_reduce", (128, 512, 1024), {"one_shot"}),
    ("matmul_all_reduce", (4064, 512, 1032), {"one_shot"}),  # the most of two ranks
    ("matmul_all_reduce", (4065, 512, 1032), {"two_shot"}),
    ("matmul_all_reduce", (16384, 512, 1024), {"add_parts"}),
    ("all_gather_matmul", (128, 512, 1024), {"gather"}),
    ("all_gather_matmul", (8192, 512, 1024), set()),
    ("matmul_reduce_scatter", (128, 512, 1024), {"scatter"}),
    ("matmul_reduce_scatter", (8192, 512, 1024), {"add_parts"}),
    ("matmul_all_gather", (128, 512, 1024), {"gather"}),
    ("matmul_all_gather", (16384, 512, 1024), set()),
]


def kernels_of(case: Case) -> set[str]:
    case.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        result = case.run()
        torch.cuda.synchronize()
    assert case.error(result).item() <= TOLERANCE, case.name
    names = [event.key for event in profiled.key_averages() if "tpfused::" in event.key]
    return {ours for ours in OURS for name in names if ours in name}


def check_kernels(ctx):
    torch.manual_seed(0)
    for name, sizes, expected in CASES:
        if "one_shot" in expected and ctx.world > 2:
            continue  # two-shot takes its place, where there is more to write
        case = Case(ctx, name, *sizes)
        with tier("p2p"):
            assert kernels_of(case) == expected, case.name
            with deterministic():
                cut = kernels_of(case)
        assert cut <= {"add_parts"}, f"deterministic {case.name}: {cut}"


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_each_size_has_its_kernels(ranks):
    ranks.run(check_kernels, timeout=90)


def check_few_blocks(ctx, seed):
    """As beside cards of few multiprocessors, which the memory's handles tell of: each block has several rows."""
    block = Block(ctx, ctx.world, "group", seed)
    torch.manual_seed(block.seed)
    with pytest.MonkeyPatch.context() as patch, tier("p2p"):
        module = extension.load()
        allocate = module.group_allocate
        most = min(64, (torch.cuda.get_device_properties(ctx.device).multi_processor_count - 4) // 2)

        def allocate_and_tell_of_three(*place):
            *memory, blocks = struct.unpack("64si", allocate(*place))
            assert blocks == most
            return struct.pack("64si", *memory, 3)

        patch.setattr(module, "group_allocate", allocate_and_tell_of_three)
        group = dist.new_group(range(ctx.world))
        for name in OPERATIONS:
            for sizes in ((28, 264, 1024), (128, 512, 1024), (301, 264, 1040)):
                case = Case(ctx, name, *sizes)
                assert case.error(case.run(group, backward=True)).item() <= TOLERANCE, case.name
        block.place = {"group": group}
        for kind in ("rmsnorm", "layernorm"):
            data = Data(block, (MOST_TOKENS,), 64, 136, torch.bfloat16, with_bias=True)
            expected, eager = data.dense(kind, torch.float64), data.dense(kind, torch.bfloat16)
            with torch.no_grad():
                for index, actual in enumerate(data.run(kind)):
                    assert_within_rule(actual, expected[index], eager[index], lambda whole: whole, kind, chain=True)
        assert communicator.communicator_of(resolve_group(group), ctx.device).tiers[0] == "p2p"
    torch.cuda.synchronize()
    dist.destroy_process_group(group)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_few_blocks(ranks, seed):
    ranks.run(check_few_blocks, seed, timeout=90)
