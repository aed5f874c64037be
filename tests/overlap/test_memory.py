"""What overlapped operations keep: workspaces, and memory that peers write."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.compare import Block
from tests.distributed import connected
from tests.overlap.extension import Communicator
from tests.overlap.test_operations import forced
from tpfused import ParallelTransformer, TransformerConfig
from tpfused.explanation import Choice, Explanation, GroupMemory, explain
from tpfused.group import TPGroup, resolve_group
from tpfused.overlap import calls, communicator
from tpfused.overlap.tiers import tier
from tpfused.training.presets import PRESETS

MIB = 2**20


def check_told(ctx):
    """What each group keeps, also of groups that are gone, whose memory other ranks may have open."""
    group, other = resolve_group(ctx.group(ctx.world)), connected(dist.new_group(range(ctx.world)))
    device = torch.device("cuda", 99)
    made, gone = (
        SimpleNamespace(size=4, peer_bytes=20 * 2**20, workspace_bytes=10 * 2**20, device=device, process_group=each)
        for each in (group.process_group, other)
    )
    known = {(group.process_group, device): made, (other, device): gone, (group.process_group, ctx.device): None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_communicators", known)
        patch.setattr(communicator, "_left", [])
        row = GroupMemory("cuda:99", 4, 20 * 2**20, 10 * 2**20)
        assert explain().memory == (row, row)
        communicator._left.append(known.pop((other, device)))
        assert explain().memory == (row, row)
        communicator._left.clear()
        assert explain().memory == (row,)
        assert communicator.kept_bytes(group.process_group) == 30 * 2**20 and communicator.kept_bytes(other) == 0
        text = str(Explanation([Choice("op", 1, 1, 1, "float16", 4, "p2p", "forced")], explain().memory))
        assert text.splitlines()[-1] == "4 ranks on cuda:99: 20.0 MiB that peers write, 10.0 MiB of workspaces"
    dist.destroy_process_group(other)


def test_memory_is_told(workers):
    workers.run(check_told)


def test_sizes_leave_room_to_grow():
    sizes = {
        1: 1,
        7: 7,
        9: 10,
        1000: 1024,
        1025: 1280,
        MIB: MIB,
        MIB + 1: 1.25 * MIB,
        1.9 * MIB: 2 * MIB,
        70 * MIB: 80 * MIB,
    }
    assert {size: communicator.rounded_up(int(size)) for size in sizes} == sizes


def check_kept_workspaces(ctx, tp):
    """They grow with what is wanted, up to a limit, and are one a stream."""
    x, kept = torch.ones(1), {}
    with forced(ctx, tp, "p2p"):
        small = calls._workspace(kept, x, 0, 5000)
        assert calls._workspace(kept, x, 0, 4000) is small and small.numel() >= 5000
        assert calls._workspace(kept, x, 1, 100).numel() < 200
        calls._workspace(kept, x, 7, 100, stays=False)
        assert list(kept) == [0, 1]
        large = calls._workspace(kept, x, 0, 9000)
        assert large.numel() >= 9000 and calls._workspace(kept, x, 0, 100) is large
        assert calls._workspace(kept, x, 0, calls.KEPT_WORKSPACE).numel() == calls.KEPT_WORKSPACE
        largest = kept[0]
        assert calls._workspace(kept, x, 0, calls.KEPT_WORKSPACE + 1).numel() == calls.KEPT_WORKSPACE + 1
        assert kept[0] is largest
        for stream in range(10, 20):
            assert calls._workspace(kept, x, stream, 100) is kept[stream] and len(kept) <= calls.MOST_STREAMS
        assert list(kept) == [16, 17, 18, 19]


def check_workspaces_of_groups(ctx, tp):
    """Operations of two groups may run at the same time, though one stream has both."""
    plan = SimpleNamespace(tokens=1, each=1, batch=1, compiled=False)
    with forced(ctx, tp, "p2p"):
        made = [Communicator(resolve_group(ctx.group(tp))) for _ in range(2)]
        for group in made:
            group.module = Mock()
            for _ in range(2):
                calls._run((group, "p2p"), "operation", plan, torch.ones(1, 1), 1, 1, 1, calls.NOWHERE)
        first, second = ([call.args[3] for call in group.module.operation.call_args_list] for group in made)
    assert first[0] == first[1] != second[0] == second[1]


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
@pytest.mark.parametrize("tp", [2], indirect=True)
def test_a_group_has_workspaces_of_its_own(workers, tp):
    workers.run(check_workspaces_of_groups, tp)


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
@pytest.mark.parametrize("tp", [2], indirect=True)
def test_kept_workspaces(workers, tp):
    workers.run(check_kept_workspaces, tp)


def check_peak(ctx, seed):
    """A training step of the memory preset, as a rank of two and alone."""
    preset = PRESETS["memory"]
    ids = torch.randint(preset.model["vocab_size"], (preset.batch_size, preset.seq_len), device=ctx.device)
    block, peaks = Block(ctx, 2, "group", seed), {}
    for name, place, options in (
        ("dense", {"group": TPGroup(None, 0, 1)}, {}),
        ("whole tokens", block.place, {}),
        ("sequence parallel", block.place, {"sequence_parallel": True}),
    ):
        for made in communicator.all_made():
            made.workspaces.clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = ParallelTransformer(TransformerConfig.gpt(**preset.model, **options), device=ctx.device, **place)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        with tier("p2p" if name != "dense" else "measured"):
            for _ in range(3):
                model.loss(ids, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        beside = 0 if name == "dense" else sum(row.peers for row in explain().memory if row.ranks == 2)
        peaks[name] = torch.cuda.max_memory_allocated() - before + beside
        del model, optimizer
    ratios = {name: round(peak / peaks["dense"], 3) for name, peak in peaks.items()}
    assert ratios["sequence parallel"] <= 0.55 and ratios["whole tokens"] <= 0.62, (ratios, explain().memory)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_peak_of_training(ranks, seed):
    ranks.run(check_peak, seed)
