"""The model with Megatron-LM's own layers, those that need no Transformer Engine, around the same SDPA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpfused.bench.model.cases import Size
from tpfused.bench.model.plain import attend, rotary_tables


def version() -> str | None:
    """megatron-core's, where it is installed."""
    if not (find_spec("megatron") and find_spec("megatron.core")):
        return None
    return metadata.version("megatron-core")


class Block(nn.Module):
    """Queries, keys and values are one projection, packed by key-value head, and gate and up another, gates first."""

    def __init__(self, size: Size, column, row):
        super().__init__()
        self.size = size
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(size.hidden, eps=1e-5) for _ in range(2))
        self.qkv = column(size.hidden, (size.heads + 2 * size.kv_heads) * size.head_dim)
        self.out = row(size.heads * size.head_dim, size.hidden)
        self.gate_up = column(size.hidden, 2 * size.ffn)
        self.down = row(size.ffn, size.hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

        x = x + self._attention(self.attention_norm(x), tables)
        fed, _ = self.gate_up(self.mlp_norm(x))
        return x + self.down(bias_swiglu_impl(fed, None))[0]

    def _attention(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Of ``[tokens, batch, hidden]``, as Megatron has it."""
        d, queries = self.size.head_dim, self.size.heads // self.size.kv_heads
        mixed, _ = self.qkv(x)
        q, k, v = mixed.unflatten(-1, (-1, (queries + 2) * d)).split((queries * d, d, d), dim=-1)
        q = q.reshape(*q.shape[:2], -1, d)
        out = attend(*(part.permute(1, 2, 0, 3) for part in (q, k, v)), tables)
        return self.out(out.permute(2, 0, 1, 3).flatten(2))[0]


class Megatron(nn.Module):
    """On `group`; its losses need `current` around them."""

    def __init__(
        self, size: Size, layers: int, tokens: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        warnings.filterwarnings("ignore", module="megatron")  # of what it would rather have installed and set
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.transformer_config import TransformerConfig

        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        self.group = group
        self.sequence_parallel = group.size() > 1
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            tensor_model_parallel_size=group.size(),
            sequence_parallel=self.sequence_parallel,
            params_dtype=dtype,
            perform_initialization=False,
            use_cpu_initialization=device.type == "cpu",
        )
        common = {"config": config, "init_method": nn.init.normal_, "tp_group": group}
        linear = {**common, "bias": False, "skip_bias_add": False}
        column = partial(tensor_parallel.ColumnParallelLinear, gather_output=False, **linear)
        row = partial(tensor_parallel.RowParallelLinear, input_is_parallel=True, **linear)
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            size.vocabulary, size.hidden, reduce_scatter_embeddings=self.sequence_parallel, **common
        )
        self.blocks = nn.ModuleList(Block(size, column, row) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = column(size.hidden, size.vocabulary)
        self.to(device, dtype)
        self.tables = rotary_tables(size, tokens, device, dtype)

    def logits(self, ids: Tensor) -> Tensor:
        """``[tokens, batch, vocabulary shard]``."""
        x = self.embedding(ids)
        if not self.sequence_parallel:  # where it scatters the tokens, it transposes them as well
            x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, self.tables)
        return self.head(self.norm(x))[0]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        return vocab_parallel_cross_entropy(self.logits(ids), labels.t().contiguous()).mean()

    def finish(self) -> None:
        """Sum the norms' gradients over the ranks, as Megatron does once backward has returned."""
        if self.sequence_parallel:
            grads = [part.weight.grad for part in self.modules() if isinstance(part, nn.RMSNorm)]
            whole = torch.cat(grads)
            dist.all_reduce(whole, group=self.group)
            torch._foreach_copy_(grads, whole.split([grad.numel() for grad in grads]))


@contextmanager
def current(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, Megatron's global state is of this group: its loss takes no other."""
    from megatron.core import parallel_state

    before = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
    try:
        yield
    finally:
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = before
