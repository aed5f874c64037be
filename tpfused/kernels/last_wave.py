"""Which tiles, and which steps along K of them, each program of a persistent matmul multiplies.

After the waves in which each program has a whole tile, some tiles are left: fewer than there are programs, and they
would take as long as a full wave. So `helped` of them at a time are shared by one program more: each of the `helped`
programs leaves its tile's last steps to the helper, and adds the sums that the helper has left in memory, in the same
order at each run.

Rejected: one equal share of all steps a program ("stream-K", Osama et al., 2023). Programs that are at different steps
no longer ask for the same operands at the same time, of which the L2 cache then has to serve more than it can: 8 % to
25 % slower than whole tiles on an H200.

The helper has the lower number: it is running when the others wait for it.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl

from tpfused.kernels.launch import cdiv

# Of steps (64 deep, about 0.7 us on an H100):
HANDOVER = 4  # that it takes a helper to leave a tile's sums
LEAST_SAVED = 8


@triton.jit
def work_at(index, program, programs, waves, helped, taken, steps):
    """Number `index` of a program's pieces of work -> tile, and its steps ``[start, stop)`` there.

    `waves` are those of whole tiles. `helped` is 0 where none is shared; the helper takes `taken` steps of a tile.
    """
    place = program % (helped + 1)
    shared = (index >= waves) & (helped > 0)
    first = waves * programs + program // (helped + 1) * helped  # of the tiles that share a helper
    tile = tl.where(shared, first + tl.where(place == 0, index - waves, place - 1), program + index * programs)
    start = tl.where(shared & (place == 0), steps - taken, 0)
    return tile, start, tl.where(shared & (place > 0), steps - taken, steps)


@triton.jit
def works(program, programs, waves, helped, tiles):
    """How many pieces of work a program has."""
    place = program % (helped + 1)
    left = tiles - waves * programs
    if helped > 0:
        left = left - program // (helped + 1) * helped
        mine = tl.where(place == 0, tl.maximum(tl.minimum(left, helped), 0), (place <= left).to(tl.int32))
    else:
        mine = (program < left).to(tl.int32)
    return waves + mine


@lru_cache(maxsize=4096)
def sharing(tiles: int, programs: int, steps: int) -> tuple[int, int]:
    """-> how many of the last tiles share a helper, and the steps it takes of each; (0, 0): that saves too little."""
    left = tiles % programs
    if left == 0:
        return 0, 0
    helped = 1
    while cdiv(left, helped) * (helped + 1) > programs:
        helped += 1
        if helped > steps:
            return 0, 0
    taken = (steps - helped * HANDOVER) // (helped + 1)
    return (helped, taken) if taken - helped * HANDOVER >= LEAST_SAVED else (0, 0)
