"""What a block does: its matmuls and collectives, and its other kernels counted as autograd runs them."""

import math
from collections import Counter as Counted
from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpfused import ParallelTransformerBlock
from tpfused.collectives import observe
from tpfused.group import TPGroup
from tpfused.planning.block import Setting, block
from tpfused.planning.shape import Shape
from tpfused.planning.work import Attention, Collective, Matmul, Pair, Pass
from tpfused.planning.worker import config_of, parts_of

GPT = Shape(hidden=64, ffn=192, layers=1, heads=8, kv_heads=8, vocab=64, style="gpt", positions=256)
LLAMA = Shape(hidden=64, ffn=160, layers=1, heads=8, kv_heads=4, vocab=64)


class Counter(TorchDispatchMode):
    """Bytes that kernels read and write, but for matmuls, attention and norms, of tensors of `least` numbers or more:
    not of biases, angles and their like.
    """

    def __init__(self, least: int):
        super().__init__()
        self.least, self.bytes = least, 0
        self.matmuls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(of) if isinstance(x, torch.Tensor)] for of in (args, out))
        name = function.name()
        if name.startswith(("aten::mm", "aten::addmm")):
            self.matmuls.append((*inputs[-2].shape, inputs[-1].shape[1]))
        elif name.startswith(("aten::select_backward", "aten::slice_backward")):
            self.bytes += touched(outputs[0]) + 2 * touched(inputs[0])  # zeros, and a copy into them
        elif not function.is_view and not any(
            part in name for part in ("norm", "attention", "sdp_choice", "_unsafe_view", "empty")
        ):
            self.bytes += sum(touched(x) for x in inputs + outputs if x.numel() >= self.least)
        return out


def touched(x: torch.Tensor) -> int:
    """Bytes of memory that are read for `x`: of every second element those between as well, of what is repeated one."""
    extents = [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    closest = min((stride for size, stride in extents if size > 1), default=1)
    return math.prod(size for size, _ in extents) * closest * x.element_size()


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2])
def test_kernels_of_a_block(shape, batch, dtype):
    tokens = 256
    config = config_of(shape, tokens, norm="layernorm")  # a CPU composes RMSNorm of many
    layer = ParallelTransformerBlock(config, group=TPGroup(None, rank=0, size=1), dtype=dtype)
    x, grad = (torch.randn(tokens, batch, shape.hidden, dtype=dtype) for _ in range(2))
    setting = Setting(1, tokens, batch, dtype.itemsize, False, False)
    work = block(shape, setting)
    for both in ("forward", "backward"):
        with Counter(tokens * batch * shape.head_dim) as counter:
            if both == "forward":
                out = layer(x.requires_grad_())
            else:
                torch.autograd.grad(out, [x, *layer.parameters()], grad)
        works = getattr(work, both)
        counted = sum(each.bytes for each in works if isinstance(each, Pass) and each.name != "norm")
        assert counted == pytest.approx(counter.bytes, rel=0.002), both
        flops = sum(2 * m * k * n for m, k, n in counter.matmuls)
        assert flops == sum(each.flops for each in works if isinstance(each, Matmul))


def test_this_packages_kernels_touch_each_value_once():
    rows, size = 2 * 256, 2
    values = rows * (LLAMA.heads + 2 * LLAMA.kv_heads) * LLAMA.head_dim
    activated = rows * LLAMA.ffn
    work = block(LLAMA, Setting(1, 256, 2, size, False, False, kernels=True))
    for works, expected in ((work.forward, 3 * activated), (work.backward, 5 * activated)):
        moved = defaultdict(float)
        for each in works:
            if isinstance(each, Pass):
                moved[each.name] += each.bytes
        assert moved["rotary"] == 2 * size * values and moved["activation"] == size * expected
        assert moved["heads"] == 2 * size * rows * LLAMA.heads * LLAMA.head_dim  # two sequences, laid tokens first
        (attention,) = (each for each in works if isinstance(each, Attention))
        assert (attention.heads, attention.kv_heads) == (LLAMA.heads, LLAMA.kv_heads)


def test_matmuls_take_six_flops_a_weight():
    weights = LLAMA.block_parameters() - 2 * LLAMA.norm_parameters
    for tp in (1, 2, 4):
        parts = parts_of(LLAMA, Setting(tp, 256, 2, 2, tp > 1, True))
        assert tp * sum(part.flops for part in parts if isinstance(part, Matmul)) == 6 * 512 * weights
        assert len(parts) == 14


def test_attention_flops():
    assert Attention(2, 3, 5, 7).flops == 2 * 2 * 3 * 25 * 7 and Attention(2, 3, 5, 7, True).flops == 5 * 2 * 3 * 25 * 7


def test_attention_is_called_by_its_heads():
    """Those of keys and values too where they are fewer, which is another kernel of other times."""
    assert Attention(1, 8, 16, 4).label == Attention(1, 8, 16, 4, kv_heads=8).label == "attention forward [1, 8, 16, 4]"
    assert Attention(1, 8, 16, 4, True, kv_heads=2).label == "attention backward [1, 8, 16, 4], 2 kv heads"


def collectives(works):
    found = defaultdict(list)
    for work in works:
        work = work.collective if isinstance(work, Pair) else work
        if isinstance(work, Collective):
            found[work.op].append(work.bytes)
    return {op: sorted(sizes) for op, sizes in found.items()}


def run_block(context, shape: Shape, tp: int, sequence_parallel: bool):
    """The size of every collective of a block, forward and backward, as `bus_factor` counts it."""
    found = ({}, {})
    at = 0

    def note(op, tensor):
        size = tensor.numel() * tensor.element_size() * (tp if op == "all_gather" else 1)
        found[at].setdefault(op, []).append(size)
        return lambda: None

    config = config_of(shape, 16, sequence_parallel=sequence_parallel)
    layer = ParallelTransformerBlock(config, group=context.group(tp))
    x = torch.randn(16 // tp if sequence_parallel else 16, 2, shape.hidden, requires_grad=True)
    with observe(note):
        out = layer(x, total_len=16 if sequence_parallel else None)
        at = 1
        out.sum().backward()
    return [{op: sorted(sizes) for op, sizes in each.items()} for each in found]


@pytest.mark.parametrize("workers", ["cpu"], indirect=True)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(
    "shape, tp", [(GPT, 2), (LLAMA, 2), (Shape(64, 160, 1, 8, 2, 64), 4)], ids=["gpt", "llama", "shared"]
)
def test_collectives_of_a_block(workers, shape, tp, sequence_parallel):
    """On the plain path, those that the layers call, kv heads shared by two ranks included."""
    work = block(shape, Setting(tp, 16, 2, 4, sequence_parallel, False))
    expected = [collectives(work.forward), collectives(work.backward)]
    assert workers.run(run_block, shape, tp, sequence_parallel)[0] == expected


def test_overlapped_columns_gather_again():
    plain, overlapped = (block(LLAMA, Setting(2, 16, 2, 2, True, overlap)) for overlap in (False, True))
    assert collectives(plain.forward) == collectives(overlapped.forward)
    (gathered,) = {*collectives(plain.backward)["all_gather"]}
    assert collectives(overlapped.backward)["all_gather"] == [gathered] * 4
    assert len(collectives(plain.backward)["all_gather"]) == 2


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_what_the_sum_of_the_ranks_parts_takes(sequence_parallel, overlap):
    """An overlapped reduce-scatter adds residual and bias; an overlapped all-reduce the bias. Backward has the sums of
    the two branches' gradients in any case."""
    work = block(GPT, Setting(2, 16, 2, 2, sequence_parallel, overlap))
    forward, backward = (
        Counted(each.name for each in works if isinstance(each, Pass)) for works in vars(work).values()
    )
    assert forward["residual"] == (0 if overlap and sequence_parallel else 2) and backward["residual"] == 2
    assert forward["bias"] == (0 if overlap else 2) and backward["bias"] == 4
    alone = block(GPT, Setting(1, 16, 2, 2, sequence_parallel, overlap)).forward
    assert sum(isinstance(each, Pass) and each.name == "residual" for each in alone) == 2


def test_one_rank_needs_none():
    assert not collectives(block(LLAMA, Setting(1, 16, 2, 2, False, True)).backward)
