"""Compile kernels for Hopper (sm_90a) on a machine without a GPU, through their own launchers; run by test_build.

Triton compiles for whatever its active driver names, and a warm-up compiles without launching.
"""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tpfused.kernels import (
    act_backward,
    decode,
    dropout,
    embedding,
    gated_act,
    launch,
    matmul,
    matmul_hopper,
    rotary,
    softmax,
)
from tpfused.kernels.activations import ACTIVATIONS

SHARED_MEMORY = 232448  # bytes a program may have

built = []


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def build(kernel, *args, grid, warmup, run=JITFunction.run, **options):
    compiled = run(kernel, *args, grid=grid, warmup=True, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY, (kernel.fn.__name__, compiled.metadata.shared)
    built.append(kernel.fn.__name__)
    return compiled


class Forgetful(dict):
    """What is compiled here can't be launched a second time."""

    def get(self, key):
        return None


driver.set_active(Hopper())
JITFunction.run = build
torch.cuda.current_device = lambda: 0
torch.cuda.is_current_stream_capturing = lambda: False
launch._compiled = Forgetful()
matmul_hopper.multiprocessors = decode.multiprocessors = lambda device: 132
decode.needs_kernel_device = lambda *arguments: None


@triton.jit
def note(hook_ptr, row, ROWS: tl.constexpr):
    tl.atomic_add(hook_ptr + row // ROWS, 1)


def main() -> None:
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((256, 512), (512, 512), (512,)))
    y, sums = torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(2, 512)
    gelu, silu = ACTIVATIONS["gelu"], ACTIVATIONS["silu"]
    hopper = lambda *a, pre=None, sums=None: matmul_hopper.matmul_hopper(*a, pre, sums, None, None)  # noqa: E731
    hopper(x, weight.T, y, None, 0, False)
    hopper(x, weight.T, y, bias, gelu, False, pre=y.clone())
    hopper(x, weight.T, y[:, :256].contiguous(), bias, silu, True, pre=y.clone())
    hopper(x, weight, y, None, gelu, False, pre=y.clone(), sums=sums)
    tall = torch.zeros(4096, 2560, dtype=torch.bfloat16)  # 20 x 7 tiles: programs share the last ones
    matmul_hopper.matmul_hopper(x, weight.T, y, bias, 0, False, None, None, note, torch.zeros(2, dtype=torch.int32))
    hopper(tall.T, tall[:, :1792], torch.zeros(2560, 1792, dtype=torch.bfloat16), None, 0, False)
    by_tma = matmul.Tiling(128, 256, 64, 8, 2, 4, 8)
    matmul.matmul(x, weight.T, y, bias=bias, activation=gelu, pre=y.clone(), tiling=by_tma)
    matmul.matmul(x[:, 1:], weight[:, 1:].T, y, bias=bias, activation=silu)
    for with_sums in (True, False):
        act_backward.act_backward(y, y, 1, with_sums)
    scores, seed = torch.zeros(2, 2, 64, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    mask = torch.ones(2, 1, 64, 128, dtype=torch.bool)
    for rows_in_one_piece in (softmax.WHOLE_ROW, 16):
        softmax.WHOLE_ROW = rows_in_one_piece
        softmax._forward(scores, mask, seed, 0.5, 1, 0.1)
        softmax._backward(scores, mask, scores, seed, 0.5, 1, 0.1)
    dropout._forward(scores, seed, 0.1)
    ids = torch.zeros(64, dtype=torch.int64)
    embedding._forward(ids, weight, None, 0, 600, -1, True)
    embedding._backward(torch.zeros(64, 512, dtype=torch.bfloat16), ids, 512, 0, -1)
    grad = torch.zeros(64, 512, dtype=torch.bfloat16)
    embedding._sum_rows(torch.zeros(512, 512), ids, grad, 0, -1, accumulate=True)
    gated_act.gated_act_backward(y, None, y[:, :256], True, 1)
    qkv = torch.zeros(4096, 1, 6 * 128, dtype=torch.bfloat16)
    q, k, v = rotary.rotary_qkv_forward(qkv, None, 4, 128, 5e5, True)
    rotary.rotary_qkv_backward(q[:2], k[:2], v[:2], torch.zeros(1, 2, dtype=torch.int64), 5e5, True)
    query, key, cache = (torch.zeros(2, *size, 128, dtype=torch.bfloat16) for size in ((8, 1), (2, 1), (2, 200)))
    slot, first = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for padding in (None, first):
        decode.decode_attention(query, key, key, cache, cache.clone(), slot, 200, padding)
    print(*built)


main()
