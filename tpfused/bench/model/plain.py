"""The model as a PyTorch user writes it: nn.Linear and SDPA, made tensor-parallel by torch's `parallelize_module`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpfused.bench.model.cases import Size


def rotary_tables(size: Size, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[tokens, head_dim]``, each angle's twice, as `rotate` wants them."""
    frequencies = size.theta ** -(torch.arange(0, size.head_dim, 2, device=device).float() / size.head_dim)
    angles = torch.arange(tokens, device=device).float().outer(frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of ``[..., tokens, head_dim]`` in its own dtype, as Hugging Face's and Megatron's models do."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention of ``[batch, heads, tokens, d]``, with rotary positions."""
    cos, sin = (table[: q.shape[2]] for table in tables)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    shared = q.shape[1] // k.shape[1]
    if q.dtype == torch.float32 and shared > 1:  # of shared heads torch would keep all scores then
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.head_dim = size.head_dim
        rows, kv_rows = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q, self.k, self.v = (nn.Linear(size.hidden, n, bias=False) for n in (rows, kv_rows, kv_rows))
        self.out = nn.Linear(rows, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # As many heads as the projections give: this rank's.
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(attend(q, k, v, (cos, sin)).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.gate, self.up = (nn.Linear(size.hidden, size.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(size.hidden, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(size), GatedMLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Plain(nn.Module):
    """Its parameters have the names that `full_state_dict` gives ours. `blocks`: compiled ones, to be used instead."""

    def __init__(self, size: Size, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.tables: tuple[Tensor, Tensor] | None = None

    def logits(self, ids: Tensor, blocks: Sequence[nn.Module] | None = None) -> Tensor:
        """``[batch, tokens, vocabulary]``: on several ranks a DTensor, split along the vocabulary."""
        x = self.embedding(ids)
        for block in blocks or self.blocks:
            x = block(x, *self.tables)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, labels: Tensor, blocks: Sequence[nn.Module] | None = None) -> Tensor:
        """The loss. On several ranks it and its backward belong inside torch's `loss_parallel`."""
        return F.cross_entropy(self.logits(ids, blocks).flatten(0, 1).float(), labels.flatten())


def build(size: Size, layers: int, tokens: int, device: torch.device, dtype: torch.dtype, mesh=None) -> Plain:
    """With uninitialised parameters; `mesh`: sharded over it, the tokens between the blocks too."""
    with torch.device("meta"):
        model = Plain(size, layers).to(dtype)
    if mesh is not None:
        _parallelize(model, mesh)
    model.to_empty(device=device)
    model.tables = rotary_tables(size, tokens, device, dtype)
    return model


def _parallelize(model: Plain, mesh) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tokens = Shard(1)

    def gathered(*others: None) -> PrepareModuleInput:
        """Its first input is this rank's tokens, and is wanted whole; the others are left alone."""
        layouts = {"input_layouts": (tokens, *others), "desired_input_layouts": (Replicate(), *others)}
        return PrepareModuleInput(**layouts)

    block = {
        "attention_norm": SequenceParallel(),
        "attention": gathered(None, None),
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.out": RowwiseParallel(output_layouts=tokens),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered(),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, whole)
    for part in model.blocks:
        parallelize_module(part, mesh, block)
