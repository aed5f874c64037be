"""Thousands of operations in a row: of all kinds, sizes and tiers, on two groups and two streams, by late ranks.

A CPU has the plain path alone: there it is these tests that are tried.
"""

import random
from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.overlap.cases import ACTIVATIONS, OPERATIONS, Case, Errors, perhaps_late, poisoned, tiers_of
from tpfused.overlap import communicator
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.tiers import tier

PARTS = 10  # after each of which the errors are looked at
GROWTH = 32 * 2**20  # bytes that the second half may take: the driver's own


def some_sizes(ctx, rng):
    """Tokens, in and out features: random, of which some ranks may have none; on GPUs also two of several blocks."""
    if ctx.device.type == "cpu":
        return [[rng.choice((1, 2, 7, 12)), rng.choice((1, 4, 10)), rng.choice((1, 3, 8))] for _ in range(3)]
    small = [
        [rng.choice((1, 2, 7, 300, 1025)), rng.choice((1, 40, 130, 512)), rng.choice((1, 3, 66, 520))] for _ in range(5)
    ]
    return [*small, [8192, 2304, 256], [8200, 256, 2304 * ctx.world]]


def memory_in_use(ctx):
    """Bytes that torch has given out, and bytes that the device has not, while no rank is at work."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    found = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    dist.barrier()
    return found


def check_mixed(ctx, steps, seed):
    communicator.set_timeout(20)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    on_gpu = ctx.device.type == "cuda"
    groups = dist.group.WORLD, dist.new_group()
    cases = [Case(ctx, name, *size, rng.choice(ACTIVATIONS)) for name in OPERATIONS for size in some_sizes(ctx, rng)]
    lanes = [(torch.cuda.Stream() if on_gpu else None, Errors(ctx, [case.name for case in cases])) for _ in range(2)]
    if on_gpu:
        torch.cuda.synchronize()

    def step():
        index, (stream, errors), group = rng.randrange(len(cases)), rng.choice(lanes), rng.choice(groups)
        name, backward = rng.choice(tiers_of(ctx)), rng.random() < 0.25
        with torch.cuda.stream(stream) if on_gpu else nullcontext(), tier(name):
            perhaps_late(ctx, rng)
            errors.add(index, cases[index].error(cases[index].run(group, backward)))

    with poisoned():
        for part in range(PARTS):
            for _ in range(steps // PARTS):
                step()
            for stream, errors in lanes:
                if on_gpu:
                    stream.synchronize()
                errors.check(f"after {(part + 1) * steps // PARTS} operations")
            if part == PARTS // 2 - 1 and on_gpu:
                given_out, free = memory_in_use(ctx)
    if on_gpu:
        given_out_later, free_later = memory_in_use(ctx)
        assert given_out_later <= given_out, f"{given_out_later - given_out} more bytes of torch's memory in use"
        assert free - free_later <= GROWTH, f"{free - free_later} bytes less of the device's memory are free"
    dist.destroy_process_group(groups[1])


def test_mixed_operations(ranks, seed):
    ranks.run(check_mixed, ranks.times(10_000, 100), seed, timeout=100)


def check_rows_of_another_stream(ctx, seed):
    """A weight's gradient is computed from rows in the group's memory, on a rank that is slow, while later operations
    put rows there from other streams, as they may for all that the other ranks know. Each has a stream of its own:
    after another on the same one, it would wait for that one's end, which comes after the slow operation's."""
    torch.manual_seed(seed)
    on_gpu = ctx.device.type == "cuda"
    tokens, k, n = (8192, 7168 * ctx.world, 4096) if on_gpu else (8, 4, 4)
    case, errors = Case(ctx, "matmul_reduce_scatter", tokens, k, n), Errors(ctx, ["beside another stream's"])
    x = torch.full((tokens // ctx.world, n), 100.0, device=ctx.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(8, n, device=ctx.device, dtype=torch.bfloat16, requires_grad=True)
    busy = torch.randn(tokens, tokens, device=ctx.device)
    slots = 3
    lanes = [torch.cuda.Stream() if on_gpu else None for _ in range(2 + slots)]

    def on(lane):
        return torch.cuda.stream(lanes[lane]) if on_gpu else nullcontext()

    with tier(tiers_of(ctx)[0]):
        for _ in range(3):
            if on_gpu:
                torch.cuda.synchronize()
            dist.barrier()
            with on(1):
                for _ in range(8 if on_gpu and ctx.rank == 0 else 0):
                    busy @ busy
            with on(0):
                results = case.run(backward=True)
            for slot in range(slots):
                with on(2 + slot):
                    all_gather_matmul(x, weight, save_gathered=True)
            with on(0):
                errors.add(0, case.error(results))
    if on_gpu:
        torch.cuda.synchronize()
    errors.check(f"with {slots} operations more")


def test_rows_of_another_stream(ranks, seed):
    ranks.run(check_rows_of_another_stream, seed, timeout=60)
