"""Random streams: common outside tensor-parallel regions, each rank's own inside."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed import Context
from tpfused.collectives import all_gather
from tpfused.group import resolve_group
from tpfused.random import rank_rng


class Streams:
    """Draws from the device's default generator, and compares them between the ranks of a group."""

    def __init__(self, ctx: Context, size: int, seed: int):
        self.group, self.device = resolve_group(ctx.group(size)), ctx.device
        torch.manual_seed(seed)

    def draw(self, n: int = 32) -> torch.Tensor:
        return torch.rand(n, device=self.device)

    def draw_inside(self, n: int = 32) -> torch.Tensor:
        with rank_rng(self.group, self.device):
            return self.draw(n)

    def distinct(self, x: torch.Tensor) -> int:
        """How many different tensors the group's ranks hold."""
        every = all_gather(x.unsqueeze(0), 0, self.group.size, self.group)
        return len(every.unique(dim=0))


def check_inside_and_outside(ctx, size, seed):
    streams = Streams(ctx, size, seed)
    drawn = [streams.draw(), streams.draw_inside(), streams.draw(), streams.draw_inside(), streams.draw()]
    assert [streams.distinct(x) for x in drawn] == [1, size, 1, size, 1]
    values = torch.cat(drawn)
    assert len(values.unique()) > 0.99 * len(values)  # no stream repeats another

    again = Streams(ctx, size, seed)
    repeated = [again.draw(), again.draw_inside(), again.draw(), again.draw_inside(), again.draw()]
    assert torch.equal(torch.cat(repeated), values)
    other = Streams(ctx, size, seed + 1)
    assert not torch.equal(other.draw_inside(), drawn[1])
    return [x.cpu() for x in drawn]


def check_outside_forgets_what_was_drawn_inside(ctx, size, seed):
    ends = []
    for n in (0, 1, 1000 * (ctx.rank + 1)):
        streams = Streams(ctx, size, seed)
        streams.draw()
        streams.draw_inside(n)
        ends.append(streams.draw())
        assert streams.distinct(ends[-1]) == 1
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def check_an_error_inside(ctx, size, seed):
    streams = Streams(ctx, size, seed)
    streams.draw_inside()
    expected = streams.draw()
    streams = Streams(ctx, size, seed)
    with pytest.raises(KeyError), rank_rng(streams.group, streams.device):
        streams.draw(ctx.rank)
        raise KeyError
    assert torch.equal(streams.draw(), expected)


def check_recomputation(ctx, size, seed):
    streams = Streams(ctx, size, seed)
    x = torch.ones(64, device=ctx.device, requires_grad=True)
    seen = []

    def block(x):
        x = F.dropout(x, 0.5)
        with rank_rng(streams.group, streams.device):
            x = F.dropout(x, 0.5)
        seen.append((x.detach() != 0).cpu())
        return F.dropout(x, 0.5)

    out = checkpoint(block, x, use_reentrant=False)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert len(seen) == 2 and torch.equal(*seen)
    assert torch.equal(dx, out.detach())  # x is 1: both are the masks' product, so all three were drawn again
    assert streams.distinct(out.detach()) == size
    assert streams.distinct(streams.draw()) == 1


def check_one_rank_changes_nothing(ctx, seed):
    streams = Streams(ctx, 1, seed)
    inside = streams.draw_inside()
    torch.manual_seed(seed)
    assert torch.equal(inside, streams.draw())


def test_alike_outside_and_different_inside(workers, tp, seed):
    drawn = workers.run(check_inside_and_outside, tp, seed)
    for rank in range(tp, workers.world):  # blocks with one seed draw alike, rank for rank
        assert all(torch.equal(a, b) for a, b in zip(drawn[rank], drawn[rank % tp], strict=True))


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_outside_does_not_depend_on_how_much_was_drawn_inside(workers, tp, seed):
    workers.run(check_outside_forgets_what_was_drawn_inside, tp, seed)


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_an_error_inside_leaves_the_ranks_in_step(workers, tp, seed):
    workers.run(check_an_error_inside, tp, seed)


def test_activation_checkpointing_draws_again_what_it_drew(workers, tp, seed):
    workers.run(check_recomputation, tp, seed)


def test_a_group_of_one_draws_as_without(workers, seed):
    workers.run(check_one_rank_changes_nothing, seed)
