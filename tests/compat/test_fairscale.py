"""fairscale's groups, mappings, loss, random numbers and arithmetic."""

import sys
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compare import assert_close, refuses
from tests.compat.fairscale_groups import THEIRS, float64_on, model_parallel, own
from tpfused.collectives import all_gather
from tpfused.compat import fairscale as compat
from tpfused.compat.fairscale import initialize, layers, mappings, utils
from tpfused.compat.fairscale import random as streams


def check_groups(ctx, tp, length):
    copies = ctx.world // (tp * length)
    with model_parallel(tp, pipeline_length=length):
        assert initialize.model_parallel_is_initialized()
        rest, shard = divmod(ctx.rank, tp)
        number, stage = divmod(rest, length)
        members = dist.get_process_group_ranks
        first = ctx.rank - shard
        assert members(initialize.get_model_parallel_group()) == list(range(first, first + tp))
        assert initialize.get_model_parallel_src_rank() == first
        assert (initialize.get_model_parallel_rank(), initialize.get_model_parallel_world_size()) == (shard, tp)
        data = [(i * length + stage) * tp + shard for i in range(copies)]
        assert members(initialize.get_data_parallel_group()) == data
        assert (initialize.get_data_parallel_rank(), initialize.get_data_parallel_world_size()) == (number, copies)
        pipeline = [(number * length + i) * tp + shard for i in range(length)]
        assert members(initialize.get_pipeline_parallel_group()) == initialize.get_pipeline_parallel_ranks() == pipeline
        with refuses(ValueError, "exist already"):
            initialize.initialize_model_parallel(tp)
    assert not initialize.model_parallel_is_initialized()


def test_groups(workers, tp):
    for length in (1, 2):
        if tp * length <= workers.world:
            workers.run(check_groups, tp, length)


def check_uninitialised(ctx):
    for use in (
        initialize.get_model_parallel_group,
        initialize.get_data_parallel_rank,
        initialize.get_pipeline_parallel_ranks,
        lambda: layers.ColumnParallelLinear(4, 4),
        lambda: mappings.copy_to_model_parallel_region(torch.zeros(1)),
    ):
        with refuses(ValueError, "initialize_model_parallel"):
            use()
    with refuses(ValueError, ctx.world, 3 * ctx.world):
        initialize.initialize_model_parallel(ctx.world, 3)
    with refuses(TypeError, 2.0):
        initialize.initialize_model_parallel(2.0)
    with model_parallel(ctx.world + 1):  # as many as there are
        assert initialize.get_model_parallel_world_size() == ctx.world
    # A program may put these modules in fairscale's place: they must not ask themselves.
    with patch.dict(sys.modules, {f"{THEIRS}.initialize": initialize}):
        assert not initialize.model_parallel_is_initialized()


def test_what_needs_groups_says_so(workers):
    workers.run(check_uninitialised)


def check_mappings(ctx, tp, seed):
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        group, x = initialize.tp_group(), torch.randn(3, 8)
        rank = group.rank
        cases = (
            # mapping, argument, result, its gradient, the argument's
            (mappings.copy_to_model_parallel_region, x, x, (rank + 1) * x, x * (tp * (tp + 1) // 2)),
            (mappings.reduce_from_model_parallel_region, (rank + 1) * x, x * (tp * (tp + 1) // 2), x, x),
            (mappings.scatter_to_model_parallel_region, x, own(x, -1), own(2 * x, -1), 2 * x),
            (mappings.gather_from_model_parallel_region, own(x, -1), x, 2 * x, own(2 * x, -1)),
        )
        for mapping, given, result, grad, expected in cases:
            given = given.clone().requires_grad_()
            kept = given.detach().clone()
            out = mapping(given)
            assert_close(out, result, mapping.__name__)
            out.backward(grad)
            assert_close(given.grad, expected, mapping.__name__)
            assert torch.equal(given, kept)


def test_mappings(workers, tp, seed):
    workers.run(check_mappings, tp, seed)


def check_cross_entropy(ctx, tp, seed):
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        logits, target = torch.randn(5, 3, 12), torch.randint(12, (5, 3))
        mine = own(logits, -1).clone().requires_grad_()
        whole = logits.requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
        loss = compat.vocab_parallel_cross_entropy(mine, target)
        assert_close(loss, expected)
        grad = torch.randn(5, 3)
        loss.backward(grad)
        expected.backward(grad)
        assert_close(mine.grad, own(whole.grad, -1))


def test_cross_entropy(workers, tp, seed):
    workers.run(check_cross_entropy, tp, seed)


def check_streams(ctx, tp, seed):
    with model_parallel(tp):
        group, tracker = initialize.tp_group(), streams.get_cuda_rng_tracker()

        def draw():
            return torch.rand(4, device=ctx.device)

        def draw_own():
            with tracker.fork():
                return draw()

        torch.manual_seed(seed)
        streams.model_parallel_cuda_manual_seed(seed)
        common = [draw(), draw()]
        torch.manual_seed(seed)
        streams.model_parallel_cuda_manual_seed(seed)
        states = tracker.get_states()
        first = draw_own()
        assert torch.equal(draw(), common[0])  # a fork leaves the stream outside alone
        assert not torch.equal(draw_own(), first)
        assert torch.equal(draw(), common[1])
        assert len(all_gather(first[None], 0, tp, group).unique(dim=0)) == tp
        tracker.set_states(states)
        assert torch.equal(draw_own(), first)

        with refuses(ValueError, "unknown"), tracker.fork("unknown"):
            pass
        tracker.add("another", seed)
        for name, taken in (("another", seed + 1), ("a third", seed)):
            with refuses(ValueError, "already"):
                tracker.add(name, taken)
        tracker.reset()
        assert not tracker.get_states()


def test_random_streams(workers, tp, seed):
    workers.run(check_streams, tp, seed)


def check_checkpoint(ctx, tp, seed):
    with model_parallel(tp), float64_on(ctx.device):
        torch.manual_seed(seed)
        layer = layers.ColumnParallelLinear(8, 16 * tp, gather_output=False)
        x = torch.randn(6, 8)

        def forward(x, scale):
            hidden = F.dropout(layer(x), 0.5)
            with streams.get_cuda_rng_tracker().fork():
                return scale * F.dropout(hidden, 0.5).sin()

        def run(call):
            torch.manual_seed(seed)
            streams.model_parallel_cuda_manual_seed(seed)
            layer.zero_grad()
            given = x.clone().requires_grad_()
            out = call(given)
            with streams.get_cuda_rng_tracker().fork():
                later = torch.rand(2)
            out.sum().backward()
            with streams.get_cuda_rng_tracker().fork():  # the recomputation leaves the streams where they were
                later = torch.cat([later, torch.rand(2)])
            return [out.detach(), given.grad, layer.weight.grad, later, torch.rand(2)]

        for plain, again in zip(
            run(lambda x: forward(x, 3.0)), run(lambda x: streams.checkpoint(forward, x, 3.0)), strict=True
        ):
            assert torch.equal(plain, again)


def test_checkpoint_replays_random_numbers(workers, tp, seed):
    workers.run(check_checkpoint, tp, seed)


def test_utils():
    x = torch.arange(24).view(2, 12)
    for contiguous in (False, True):
        parts = utils.split_tensor_along_last_dim(x, 3, contiguous)
        assert torch.equal(torch.cat(parts, -1), x) and all(part.is_contiguous() == contiguous for part in parts)
    assert utils.divide(12, 3) == utils.divide_and_check_no_remainder(12, 3) == 4
    assert utils.VocabUtility.vocab_range_from_global_vocab_size(12, 2, 3) == (8, 12)
    assert utils.VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
