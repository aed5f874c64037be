"""One rank of `tpfused plan --check`: the rates that a plan is made of, whole blocks, and their parts alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpfused.bench.comm.cases import blocks
from tpfused.bench.comm.programs import overlaps
from tpfused.bench.comm.rates import calls_of, pass_calls, time_calls
from tpfused.bench.comm.worker import measure_all, report_rates
from tpfused.bench.measure import median_and_iqr
from tpfused.bench.runner import DTYPES
from tpfused.bench.sampling import join, together
from tpfused.cli.errors import UserError
from tpfused.layers.transformer import ParallelTransformerBlock, TransformerConfig
from tpfused.planning.block import Setting, block
from tpfused.planning.shape import Shape
from tpfused.planning.work import Attention, Matmul, Pair
from tpfused.sharding import shard_size
from tpfused.workers import Worker

BLOCKS = "blocks"  # no piece of work


def check(argument: dict[str, Any], worker: Worker) -> None:
    """The first rank emits the "rates" of `tpfused bench comm`, of layers that ``argument["split"]`` splits. Then, for
    each of ``argument["settings"]``, which differ in tp, "rows" of the collectives on such groups, as that has them,
    and "checked": microseconds of the blocks, as a program waits for them, and of their parts, taken in turn, the
    blocks' interquartile range, and whether they overlapped their collectives.
    """
    device, dtype = join(argument["device"], worker), DTYPES[argument["dtype"]]
    torch.manual_seed(argument["seed"])
    report_rates(argument, worker, device, dtype)
    for setting in argument["settings"]:
        torch.manual_seed(argument["seed"])  # the same on all ranks, which hold shards of one weight
        groups = blocks(worker.world, setting.tp)
        if setting.tp > 1:
            measure_all(argument | {"groups": {"tp": groups}}, worker, device, dtype)
        if worker.rank == 0:
            worker.emit("start", f"blocks, tp {setting.tp}")
        group = dist.new_subgroups_by_enumeration(groups)[0]
        calls, error = together(partial(_calls, argument, setting, group, device, dtype))
        if calls is None:
            raise UserError(f"a block at tp {setting.tp}: {error}")
        samples = time_calls(calls, argument["rounds"], device, dtype, waiting={BLOCKS})
        us = {part: median_and_iqr(sampled.us)[0] for part, sampled in samples.items()}
        if worker.rank == 0:
            iqr = median_and_iqr(samples[BLOCKS].us)[1]
            worker.emit("checked", (setting, us, iqr, setting.tp > 1 and overlaps(setting.tp)))
        del calls
        gc.collect()
    dist.destroy_process_group()


def config_of(shape: Shape, tokens: int, **fields: Any) -> TransformerConfig:
    """The model of that shape, for sequences of so many tokens."""
    make = TransformerConfig.llama if shape.style == "llama" else TransformerConfig.gpt
    return make(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        ffn_size=shape.ffn,
        max_positions=shape.positions or tokens,
        tie_embeddings=shape.tied,
        **fields,
    )


def parts_of(shape: Shape, setting: Setting) -> list[Matmul | Attention]:
    """The matmuls and the attention of a block, each once."""
    both = block(shape, setting)
    works = (work.matmul if isinstance(work, Pair) else work for work in both.forward + both.backward)
    return list(dict.fromkeys(work for work in works if isinstance(work, Matmul | Attention)))


def _calls(
    argument: dict[str, Any], setting: Setting, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> dict[Any, Callable]:
    shape: Shape = argument["shape"]
    calls: dict[Any, Callable] = {BLOCKS: _blocks(shape, argument["layers"], setting, group, device, dtype)}
    calls[BLOCKS]()  # the overlapped operations measure their ways
    calls |= calls_of(parts_of(shape, setting), device, dtype)
    return calls | pass_calls((setting.rows, shape.hidden), device, dtype)


def _blocks(
    shape: Shape, layers: int, setting: Setting, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> Callable:
    """Forward and backward of `layers` blocks, one after the other, with every gradient."""
    config = config_of(shape, setting.tokens, sequence_parallel=setting.sequence_parallel)
    place = {"group": group, "device": device, "dtype": dtype}
    stack = torch.nn.ModuleList(ParallelTransformerBlock(config, **place) for _ in range(layers))
    total_len = setting.tokens if setting.sequence_parallel else None
    rank, ranks = (dist.get_rank(group), setting.tp) if setting.sequence_parallel else (0, 1)
    tokens = shard_size(setting.tokens, ranks, rank)
    x, grad = (torch.randn(tokens, setting.batch, shape.hidden, device=device, dtype=dtype) for _ in range(2))
    leaves = [x.requires_grad_(), *stack.parameters()]

    def run() -> tuple[torch.Tensor, ...]:
        y = x
        for each in stack:
            y = each(y, total_len=total_len)
        return torch.autograd.grad(y, leaves, grad)

    return run
