"""Vocabulary-parallel embedding (Shoeybi et al., 2019, "Megatron-LM", section 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tpfused import checks, reference
from tpfused.collectives import own_slice, reduce_from_group, reduce_scatter_tokens
from tpfused.kernels.embedding import embedding
from tpfused.layers.backend import runs_kernels
from tpfused.layers.ids import IdCheck, check_mode
from tpfused.main_grad import into_main_grad
from tpfused.parameter import ParallelModule, check_init_method, check_size, fill_in_place, local
from tpfused.sharding import shard_range


class VocabParallelEmbedding(ParallelModule):
    """`nn.Embedding` with the vocabulary split over the ranks.

    Args:
        num_embeddings, embedding_dim: of the whole table. The vocabulary need not divide by the number of ranks.
        padding_idx: a global id whose row starts at zero and gets no gradient; may be negative, counted from the end.
        sequence_parallel: reduce-scatter the output, so that each rank gets its tokens; otherwise it is all-reduced.
        init_method: fills the whole table in place. None: normal(0, 1), as `nn.Embedding`.
        sequence_dim: the dimension of the ids that sequence parallelism splits.
        check: what to do about ids outside the vocabulary. "async": on the CPU raise at once, on a GPU write NaN and
            raise at the next call (compiled code writes NaN and does not raise); "sync": raise at once, at the price of
            a synchronisation; "off": give a zero row. Captured in a CUDA graph, "sync" too gives NaN and no error.
        backend, accumulate_main_grad, group, mesh: as in `ColumnParallelLinear`.

    Shapes: int32 or int64 ids ``[...]``, whole on each rank; output ``[..., embedding_dim]``, its `sequence_dim` this
    rank's part under sequence parallelism.

    Raises:
        ValueError: an id outside the vocabulary, ids on another device, a padding_idx outside the vocabulary.
        TypeError: ids that are not integers; and as `ColumnParallelLinear`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence_parallel: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dim: int = 0,
        check: str = "async",
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        checks.check_booleans(VocabParallelEmbedding.__init__, locals())
        super().__init__(group, mesh)
        num_embeddings = check_size(num_embeddings, "num_embeddings")
        embedding_dim = check_size(embedding_dim, "embedding_dim")
        checks.check_sequence_dim(sequence_dim)
        check_mode(check)
        checks.check_backend(backend)
        check_init_method(init_method)
        self.backend = backend
        self.accumulate_main_grad = accumulate_main_grad
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = row_of_padding(padding_idx, num_embeddings)
        self.sequence_parallel = sequence_parallel
        self.init_method = init_method or nn.init.normal_
        self.sequence_dim = sequence_dim
        self.check = check
        self._id_check = IdCheck("token ids")
        self.new_parameter("weight", (num_embeddings, embedding_dim), 0, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole table, and keep this rank's rows. Nothing on the meta device."""
        if self.weight.is_meta:
            return
        whole = torch.empty(
            self.num_embeddings,
            self.embedding_dim,
            device=local(self.weight).device,
            dtype=self.weight.dtype,
        )
        fill_in_place(whole, self.init_method)
        if self.padding_idx is not None:
            whole[self.padding_idx] = 0
        self.fill_parameter("weight", whole)

    def forward(self, ids: Tensor) -> Tensor:
        weight, main_grad = self.weight_and_main_grad()
        check_ids(ids, weight, "VocabParallelEmbedding")
        dim = None
        if self.sequence_parallel:
            dim = checks.token_dim(ids, self.sequence_dim, "VocabParallelEmbedding", has_features=False)
        ids, unsure = self._id_check(ids, self.num_embeddings, self.check)
        if runs_kernels(weight, self.backend, "embedding", "" if weight.shape[0] else "no rows on this rank"):
            start, _ = shard_range(self.num_embeddings, self.group.size, self.group.rank)
            rows = embedding(ids, weight, start, self.num_embeddings, self.padding_idx, unsure, main_grad)
            return reduce_from_group(rows, self.group) if dim is None else reduce_scatter_tokens(rows, dim, self.group)
        out = reference.vocab_parallel_embedding(
            ids,
            into_main_grad(weight, main_grad),
            self.num_embeddings,
            self.group,
            padding_idx=self.padding_idx,
            sequence_dim=dim,
        )
        if unsure:
            bad = (ids < 0) | (ids >= self.num_embeddings)
            if dim is not None:
                bad = own_slice(bad, dim, self.group)
            out = out.masked_fill(bad.unsqueeze(-1), torch.nan)
        return out

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.group.size}"


def row_of_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    """As a row of the table, counted from its start.

    Raises:
        TypeError: it is no integer.
        ValueError: it is outside the vocabulary.
    """
    if padding_idx is None:
        return None
    padding_idx = checks.check_integer(padding_idx, "padding_idx")
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(f"padding_idx {padding_idx} is outside a vocabulary of {num_embeddings}")
    return padding_idx % num_embeddings


def check_ids(ids: Tensor, weight: Tensor, layer: str) -> None:
    """What can be known without a look at the ids themselves."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"token ids must be an int64 or int32 tensor, not {checks.kind_of(ids)}")
    checks.check_dense(ids, layer, "the token ids")
    if ids.device != weight.device:
        raise ValueError(f"token ids are on {ids.device}, the embedding on {weight.device}")
