"""fairscale's groups, mappings, loss, random numbers and arithmetic."""

import subprocess
import sys
from datetime import timedelta
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compare import assert_close, refuses
from tests.compat.fairscale_groups import THEIRS, float64_on, model_parallel, own
from tpfused.checks import AssertedError
from tpfused.collectives import all_gather
from tpfused.compat import fairscale as compat
from tpfused.compat.fairscale import initialize, layers, mappings, utils
from tpfused.compat.fairscale import random as streams


def check_groups(ctx, tp, length, context):
    copies = ctx.world // (tp * length * context)
    with model_parallel(tp, pipeline_length=length, context_parallel_size=context, timeout=timedelta(seconds=60)):
        assert initialize.model_parallel_is_initialized()
        rest, shard = divmod(ctx.rank, tp)
        rest, part = divmod(rest, context)
        number, stage = divmod(rest, length)

        def rank_of(number=number, stage=stage, part=part, shard=shard):
            return ((number * length + stage) * context + part) * tp + shard

        members = dist.get_process_group_ranks
        model = [rank_of(shard=i) for i in range(tp)]
        assert members(initialize.get_model_parallel_group()) == model
        assert initialize.get_model_parallel_src_rank() == model[0]
        assert (initialize.get_model_parallel_rank(), initialize.get_model_parallel_world_size()) == (shard, tp)
        data = [rank_of(number=i) for i in range(copies)]
        assert members(initialize.get_data_parallel_group()) == initialize.get_data_parallel_ranks() == data
        assert (initialize.get_data_parallel_rank(), initialize.get_data_parallel_world_size()) == (number, copies)
        pipeline = [rank_of(stage=i) for i in range(length)]
        assert members(initialize.get_pipeline_parallel_group()) == initialize.get_pipeline_parallel_ranks() == pipeline
        sequence = [rank_of(part=i) for i in range(context)]
        assert members(initialize.get_context_parallel_group()) == initialize.get_context_parallel_ranks() == sequence
        assert (initialize.get_context_parallel_rank(), initialize.get_context_parallel_world_size()) == (part, context)
        with refuses(AssertedError, "exist already"):
            initialize.initialize_model_parallel(tp)
    assert not initialize.model_parallel_is_initialized()


def test_groups(workers, tp):
    for length, context in ((1, 1), (2, 1), (1, 2), (2, 2)):
        if tp * length * context <= workers.world:
            workers.run(check_groups, tp, length, context)


class ManyRanks:
    """Stands in for torch.distributed in programs' tests, which know new_group as it was long ago."""

    def __init__(self, world):
        self.world, self.made = world, []

    def is_initialized(self):
        return True

    def get_world_size(self):
        return self.world

    def get_rank(self):
        return 0

    def new_group(self, ranks, backend=None):
        self.made.append(ranks)
        return ()


def test_groups_of_more_ranks_than_there_are():
    with patch.object(torch, "distributed", ManyRanks(24)) as made_by:
        initialize.initialize_model_parallel(2, 3)
        assert initialize.model_parallel_is_initialized()
        initialize.destroy_model_parallel()
        assert not initialize.model_parallel_is_initialized()
    models = [[2 * i, 2 * i + 1] for i in range(12)]
    pipelines = [[6 * i + k, 6 * i + k + 2, 6 * i + k + 4] for i in range(4) for k in (0, 1)]
    copies = [list(range(i, 24, 6)) for i in range(6)]
    assert sorted(made_by.made) == sorted(models + pipelines + copies)


def check_other_places(ctx):
    # A program may put these modules in fairscale's place, or others that take the functions from here.
    theirs = ModuleType("initialize")
    vars(theirs).update({name: value for name, value in vars(initialize).items() if not name.startswith("_")})
    for module in (initialize, theirs):
        with patch.dict(sys.modules, {f"{THEIRS}.initialize": module}):
            assert not module.model_parallel_is_initialized()
            with model_parallel(ctx.world):
                assert module.model_parallel_is_initialized()
                assert module.get_model_parallel_group() is initialize.get_model_parallel_group()
            assert not module.model_parallel_is_initialized()
    # Or set a group itself, which is all that layers need.
    with patch.object(initialize, "_MODEL_PARALLEL_GROUP", ctx.group(ctx.world)):
        assert initialize.get_model_parallel_world_size() == ctx.world
        assert layers.ColumnParallelLinear(3, ctx.world).weight.shape == (1, 3)
        assert not initialize.model_parallel_is_initialized()
        with refuses(AssertedError, "data"):
            initialize.get_data_parallel_group()


def test_groups_found_in_other_places(workers):
    workers.run(check_other_places)


def test_submodules_need_no_import_of_their_own():
    code = (
        "from tpfused.compat import fairscale\n"
        "names = 'cross_entropy', 'initialize', 'layers', 'mappings', 'random', 'utils'\n"
        "print(*(getattr(fairscale, name).__name__ for name in names))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.count("tpfused.compat.fairscale.") == 6


def check_uninitialised(ctx):
    for use in (
        initialize.get_model_parallel_group,
        initialize.get_data_parallel_rank,
        initialize.get_pipeline_parallel_ranks,
        initialize.get_context_parallel_group,
        lambda: layers.ColumnParallelLinear(4, 4),
        lambda: mappings.copy_to_model_parallel_region(torch.zeros(1)),
    ):
        with refuses(AssertedError, "initialize_model_parallel"):
            use()
    with refuses(AssertedError, ctx.world, 3 * ctx.world):
        initialize.initialize_model_parallel(ctx.world, 3)
    with refuses(TypeError, 2.0):
        initialize.initialize_model_parallel(2.0)
    with model_parallel(ctx.world + 1):  # as many as there are
        assert initialize.get_model_parallel_world_size() == ctx.world


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


def check_compiled(ctx, tp, seed):
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        x = torch.randn(3, 8)
        for name in ("copy_to", "reduce_from", "scatter_to", "gather_from"):
            torch.compiler.reset()
            mapping = getattr(mappings, f"{name}_model_parallel_region")
            compiled = torch.compile(lambda x, mapping=mapping: mapping(x * 2), fullgraph=True, backend="eager")
            assert torch.equal(compiled(x), mapping(x * 2))


def test_mappings_compile(workers, tp, seed):
    workers.run(check_compiled, tp, seed)


def check_cross_entropy(ctx, tp, seed):
    torch.manual_seed(seed)
    with model_parallel(tp), float64_on(ctx.device):
        logits, target = torch.randn(5, 3, 12), torch.randint(12, (5, 3))
        mine = own(logits, -1).clone().requires_grad_()
        whole = logits.requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
        loss = compat.vocab_parallel_cross_entropy(mine, target)
        assert_close(loss, expected)
        for dtype in (torch.int32, torch.int16, torch.uint8):
            assert torch.equal(compat.vocab_parallel_cross_entropy(mine, target.to(dtype)), loss)
        for odd in (target.double(), target > 0, target.tolist()):
            with refuses(TypeError, getattr(odd, "dtype", "list")):
                compat.vocab_parallel_cross_entropy(mine, odd)
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
        kept = states[streams._MODEL_PARALLEL_RNG_TRACKER_NAME].clone()
        for _ in range(2):  # the state given stays as it is
            streams._set_cuda_rng_state(states[streams._MODEL_PARALLEL_RNG_TRACKER_NAME])
            assert torch.equal(draw(), first)
            assert torch.equal(states[streams._MODEL_PARALLEL_RNG_TRACKER_NAME], kept)

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

        expected = run(lambda x: forward(x, 3.0))
        for checkpoint in (streams.checkpoint, streams.CheckpointFunction.apply):
            found = run(lambda x, checkpoint=checkpoint: checkpoint(forward, x, 3.0))
            for plain, again in zip(expected, found, strict=True):
                assert torch.equal(plain, again)


def test_checkpoint_replays_random_numbers(workers, tp, seed):
    workers.run(check_checkpoint, tp, seed)


def check_compiled_checkpoint(ctx, tp, seed):
    """As one graph, and with the tracker's stream, which breaks it."""
    with model_parallel(tp), float64_on(ctx.device):
        torch.manual_seed(seed)
        column = layers.ColumnParallelLinear(8, 4 * tp, gather_output=False)
        row = layers.RowParallelLinear(4 * tp, 8, input_is_parallel=True)
        x = torch.randn(6, 8)

        def block(x):
            return row(column(x).tanh())

        def forking(x):
            with streams.get_cuda_rng_tracker().fork():
                return block(F.dropout(x, 0.5))

        def gradients(call):
            given = x.clone().requires_grad_()
            column.zero_grad()
            torch.manual_seed(seed)
            streams.model_parallel_cuda_manual_seed(seed)
            call(given).backward()
            return given.grad, column.weight.grad

        for function, fullgraph in ((block, True), (block, False), (forking, False)):

            def forward(x, function=function):
                return streams.checkpoint(function, x).sum()

            torch.compiler.reset()
            compiled = gradients(torch.compile(forward, fullgraph=fullgraph, backend="aot_eager"))
            for expected, found in zip(gradients(lambda x, f=function: f(x).sum()), compiled, strict=True):
                torch.testing.assert_close(found, expected)


def test_checkpoint_compiles(workers, tp, seed):
    workers.run(check_compiled_checkpoint, tp, seed)


def test_utils():
    x = torch.arange(24).view(2, 12)
    for contiguous in (False, True):
        parts = utils.split_tensor_along_last_dim(x, 3, contiguous)
        assert torch.equal(torch.cat(parts, -1), x) and all(part.is_contiguous() == contiguous for part in parts)
    assert utils.divide(12, 3) == utils.divide_and_check_no_remainder(12, 3) == 4
    assert utils.VocabUtility.vocab_range_from_global_vocab_size(12, 2, 3) == (8, 12)
    assert utils.VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
