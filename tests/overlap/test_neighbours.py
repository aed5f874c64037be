"""Overlapped operations beside what else uses the GPUs: FSDP2, DDP, collectives of torch's own; where peers can't be
reached; and process groups that come and go.

A CPU has the plain path alone: there it is these tests that are tried.
"""

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.overlap.cases import OPERATIONS, TOLERANCE, Case, Errors, largest, largest_error, perhaps_late, tiers_of
from tpfused import extension
from tpfused.collectives import all_gather_single
from tpfused.overlap import communicator
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter
from tpfused.overlap.tiers import tier
from tpfused.placement import local


class Block(nn.Module):
    """A linear layer for FSDP2 or DDP, and a tensor-parallel pair of weights, which are none of their business."""

    def __init__(self, width, device, rank_generator):
        super().__init__()
        self.linear = nn.Linear(width, width, device=device)
        self.pair = tuple(
            (torch.randn(width, width, device=device, generator=rank_generator) * width**-0.5).requires_grad_()
            for _ in range(2)
        )

    def forward(self, x):
        up, down = self.pair
        return x + matmul_reduce_scatter(all_gather_matmul(self.linear(x), up, activation="gelu_tanh"), down)


def beside(ctx, wrap, width, seed):
    """-> a model of four blocks, and its tensor-parallel weights on this rank."""
    torch.manual_seed(seed)
    generator = torch.Generator(ctx.device).manual_seed(seed + ctx.rank)
    blocks = [Block(width, ctx.device, generator) for _ in range(4)]
    model = nn.Sequential(*blocks)
    if wrap == "ddp":
        # A bucket a layer: each is all-reduced while the layers below go on.
        model = DistributedDataParallel(model, bucket_cap_mb=width**2 * 4 / 2**20)
    else:
        mesh = init_device_mesh(ctx.device.type, (ctx.world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return model, [weight for block in blocks for weight in block.pair]


def check_data_parallel(ctx, wrap, steps, few, seed):
    """A step's result and gradients are those that it has with plain collectives."""
    communicator.set_timeout(20)
    tokens, width = (128 if few else 1024, 1024) if ctx.device.type == "cuda" else (4, 8)
    model, weights = beside(ctx, wrap, width, seed)
    rng = random.Random(seed)
    torch.manual_seed(seed + ctx.rank)
    inputs = [torch.randn(tokens, width, device=ctx.device) for _ in range(3)]
    grad = torch.randn(tokens, width, device=ctx.device)

    def results(x):
        for param in (*model.parameters(), *weights):
            param.grad = None
        out = model(x)
        perhaps_late(ctx, rng, chance=0.2)
        out.backward(grad)
        return [out.detach(), *(local(param.grad) for param in model.parameters()), *(w.grad for w in weights)]

    with tier("reference"):
        expected = [[x.clone() for x in results(x)] for x in inputs]
    scales = [[largest(x) for x in each] for each in expected]
    errors = Errors(ctx, tiers_of(ctx))
    for step in range(steps):
        for index, name in enumerate(tiers_of(ctx)):
            which = step % len(inputs)
            with tier(name):
                # In float32, where only the order of sums differs.
                error = largest_error(results(inputs[which]), expected[which], scales[which])
            errors.add(index, error * 100)
    errors.check(f"{wrap}, after {steps} steps, a hundredfold")


def check_asynchronous_collectives(ctx, steps, seed):
    """Some are under way, on torch's own communicator, whenever an operation is."""
    communicator.set_timeout(20)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    on_gpu = ctx.device.type == "cuda"
    cases = [Case(ctx, name, *((2048, 1024, 1024) if on_gpu else (7, 4, 6))) for name in OPERATIONS]
    errors = Errors(ctx, [*(case.name for case in cases), "all-reduce", "all-gather"])
    entries = 2**20 if on_gpu else 2**8
    for step in range(steps):
        summed = torch.full((entries,), float(ctx.rank + step), device=ctx.device)
        mine = torch.full((entries,), float(ctx.rank - step), device=ctx.device)
        gathered = torch.full((ctx.world, entries), torch.nan, device=ctx.device)
        perhaps_late(ctx, rng)
        reducing = dist.all_reduce(summed, async_op=True)
        index, name, backward = rng.randrange(len(cases)), rng.choice(tiers_of(ctx)), rng.random() < 0.5
        with tier(name):
            errors.add(index, cases[index].error(cases[index].run(backward=backward)))
        gathering = all_gather_single(gathered.view(-1), mine, async_op=True)
        index = rng.randrange(len(cases))
        with tier(name):
            errors.add(index, cases[index].error(cases[index].run(backward=backward)))
        reducing.wait()
        gathering.wait()
        ranks = torch.arange(ctx.world, device=ctx.device, dtype=torch.float32)
        errors.add(len(cases), (summed - (ranks + step).sum()).abs().amax())
        errors.add(len(cases) + 1, (gathered - (ranks - step).unsqueeze(1)).abs().amax())
    errors.check(f"after {steps} steps")


def check_groups_made_again(ctx, folders, seed):
    torch.manual_seed(seed)
    for folder in folders:
        ctx.rejoin(folder)
        communicator.set_timeout(20)
        for operation in OPERATIONS:
            case = Case(ctx, operation, 300, 64, 130)
            for name in tiers_of(ctx):
                with tier(name):
                    error = case.error(case.run(backward=True)).item()
                assert error <= TOLERANCE, f"{name} {case.name}: {error}"


def lends_no_memory(module):
    """CUDA itself refuses, as it does where memory is short."""
    allocate = module.group_allocate
    return "group_allocate", lambda handle, slot_bytes: allocate(handle, 2**50)


def reaches_no_peer(module):
    """As where GPUs do not reach each other: CUDA refuses what the peers have told."""
    connect = module.group_connect
    return "group_connect", lambda handle, handles: connect(handle, [bytes(len(each)) for each in handles])


LACKS = {"no memory for peers on one rank": lends_no_memory, "no way to peers' memory from one rank": reaches_no_peer}


def check_peers_out_of_reach(ctx, why):
    """-> how often this rank said so."""
    torch.manual_seed(0)
    group = dist.new_group()
    cases = [Case(ctx, operation, 300, 64, 130) for operation in OPERATIONS]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if why == "another host":
            patch.setattr(communicator.Communicator, "_on_one_host", lambda self: False)
        elif ctx.rank == ctx.world - 1:
            module = extension.load()
            patch.setattr(module, *LACKS[why](module))
        for case in (*cases, *cases):
            with tier("nccl"):
                error = case.error(case.run(group, backward=True)).item()
            assert error <= TOLERANCE, f"{case.name}: {error}"
            with pytest.raises(ValueError, match="'p2p' is not to be had"), tier("p2p"):
                case.run(group)
    dist.destroy_process_group(group)
    return sum("travel by NCCL" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("few", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_beside_data_parallelism(ranks, wrap, few, seed):
    """Many rows travel by copy engines, few by kernels that wait for each other on the GPU."""
    ranks.run(check_data_parallel, wrap, ranks.times(50, 2), few, seed, timeout=60)


def test_beside_asynchronous_collectives(ranks, seed):
    ranks.run(check_asynchronous_collectives, ranks.times(500, 10), seed, timeout=60)


def test_process_groups_made_again(ranks, seed, tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    ranks.run(check_groups_made_again, [str(folder) for folder in folders], seed, timeout=90)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
@pytest.mark.parametrize("why", ["another host", *LACKS])
def test_peers_out_of_reach(ranks, why):
    assert sum(ranks.run(check_peers_out_of_reach, why, timeout=60)) == 1


def check_another_device_is_current(ctx):
    """From the group's first operation on, and where one needs more of the peers' memory than there was."""
    cases = [Case(ctx, "all_gather_matmul", tokens, 1024, 64) for tokens in (4096, 8192)]
    other = (ctx.device.index + 1) % torch.cuda.device_count()
    for name in tiers_of(ctx):
        group = dist.new_group()
        with tier(name):
            with torch.cuda.device(other):
                results = [(case, case.run(group)) for case in cases for _ in range(20)]
            results += [(case, case.run(group)) for case in cases]
        assert max(case.error(result).item() for case, result in results) <= TOLERANCE
        dist.destroy_process_group(group)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no other device")
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
def test_another_device_is_current(ranks):
    ranks.run(check_another_device_is_current)
