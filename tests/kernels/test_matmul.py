"""The plain product, and which steps of which tiles each program of a persistent matmul multiplies."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.compare import assert_within
from tpfused.kernels.last_wave import sharing, work_at, works
from tpfused.kernels.matmul import product


@triton.jit
def _count_kernel(counts_ptr, first_ptr, waves, helped, taken, tiles, steps, STEPS: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    for index in range(0, works(program, programs, waves, helped, tiles)):
        tile, start, stop = work_at(index, program, programs, waves, helped, taken, steps)
        step = tl.arange(0, STEPS)
        tl.atomic_add(counts_ptr + tile * steps + step, 1, mask=(step >= start) & (step < stop))
        tl.store(first_ptr + tile, program, mask=start == 0)


@pytest.mark.parametrize("tiles, steps", [(5, 8), (8, 40), (9, 64), (13, 128), (15, 128), (21, 300), (28, 32)])
def test_every_step_of_every_tile_once(device, tiles, steps):
    programs = 8
    helped, taken = sharing(tiles, programs, steps)
    counts = torch.zeros(tiles, steps, dtype=torch.int32, device=device)
    first = torch.full((tiles,), -1, dtype=torch.int32, device=device)
    _count_kernel[(programs,)](
        counts, first, tiles // programs, helped, taken, tiles, steps, triton.next_power_of_2(steps)
    )
    assert (counts == 1).all() and (first >= 0).all()


def test_tiles_are_shared_where_that_saves_time():
    assert sharing(8, 8, 1000) == (0, 0)  # nothing is left over
    assert sharing(9, 8, 4) == (0, 0)  # too short
    helped, taken = sharing(12, 8, 100)  # four left for eight programs: in twos
    assert helped == 1 and 40 < taken < 50
    assert sharing(15, 8, 1000)[0] == 7  # seven left for eight
    assert sharing(15, 8, 20) == (0, 0)


# On a Hopper GPU with 132 multiprocessors the first three share a last wave: 448, 140 and 168 tiles.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("m, k, n", [(3584, 2048, 4096), (2496, 1544, 1784), (1700, 2056, 2832), (130, 70, 24)])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
def test_product(m, k, n, layout):
    for dtype in (torch.bfloat16, torch.float16):
        x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        if layout == "columns":
            x, w = x.T.contiguous().T, w.T.contiguous().T
        if layout == "strided":
            x, w = torch.stack([x, x], 1)[:, 0], torch.nn.functional.pad(w, (3, 0))[:, 3:]
        torch.full((m, n), torch.nan, device="cuda", dtype=dtype)  # what the result's memory may hold
        assert_within(product(x, w), x.double() @ w.double(), x @ w, f"{layout} {m, k, n}")
