"""Small models, and all the ways to lay one out over the workers, for tests of what must not matter."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import Context
from tpfused import ParallelTransformer, TransformerConfig
from tpfused.group import TPGroup

SIZES = {"vocab_size": 13, "num_layers": 1, "num_heads": 4, "max_positions": 6}
CONFIGS = {
    # 13 rows divide by neither 2 nor 4, 10 not by 4; vocabulary 5 leaves the last of 4 ranks empty.
    "gpt": TransformerConfig.gpt(hidden_size=12, ffn_size=10, **{**SIZES, "num_layers": 2}),
    "llama": TransformerConfig.llama(hidden_size=8, ffn_size=16, num_kv_heads=2, **SIZES),
    "tied": TransformerConfig.llama(
        hidden_size=8, ffn_size=16, num_kv_heads=1, tie_embeddings=True, **{**SIZES, "vocab_size": 5}
    ),
}

CASES = [(config, layout) for config in CONFIGS for layout in ("plain", "mesh", "fsdp2")] + [("gpt", "ddp")]

every_case = pytest.mark.parametrize("config, layout", CASES)


def skip_impossible(config: str, layout: str, tp: int) -> None:
    if (config, layout, tp) == ("tied", "fsdp2", 4):
        pytest.skip("FSDP2 cannot reduce the gradient of an empty shard")


def dense(config: str, seed: int, device: torch.device | str = "cpu") -> ParallelTransformer:
    torch.manual_seed(seed)
    alone = TPGroup(None, 0, 1)
    return ParallelTransformer(CONFIGS[config], group=alone, device=device, dtype=torch.float64)


def laid_out(ctx: Context, config: str, layout: str, tp: int, seed: int) -> nn.Module:
    """The same model over `tp` ranks and, under "ddp" and "fsdp2", over world / tp such blocks."""
    torch.manual_seed(seed)
    where = {"mesh": ctx.mesh(tp)} if layout in ("mesh", "fsdp2") else {"group": ctx.group(tp)}
    model = ParallelTransformer(CONFIGS[config], **where, device=ctx.device, dtype=torch.float64)
    if layout == "ddp":
        return DistributedDataParallel(model, process_group=ctx.grid(tp)["dp"].get_group())
    if layout == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=ctx.grid(tp)["dp"])
        return fully_shard(model, mesh=ctx.grid(tp)["dp"])
    return model


def batch(ctx: Context, config: str, seed: int) -> Tensor:
    """Token ids, the same on every rank."""
    ids = torch.randint(CONFIGS[config].vocab_size, (2, 6), generator=torch.Generator().manual_seed(seed))
    return ids.to(ctx.device)


def backward(model: nn.Module, ids: Tensor) -> None:
    """Gradients of a loss whose value is the same however the model is laid out."""
    logits = model(ids)
    (logits.sin().sum() / 7).backward()
