"""fairscale's layers: parameters are plain tensors named `weight` and `bias`, and all sizes divide by the ranks.

Accepted without meaning here: `norm_type` (nothing is renormalised), `keep_master_weight_for_test` of
`ParallelEmbedding` (as in fairscale). Refused with a `ValueError`, since results would differ: a `stride` other than 1,
and the embeddings' `max_norm`, `scale_grad_by_freq` and `sparse`.

A program may put weights of other sizes in a layer's place, and `forward` follows: not `full_state_dict`, which knows
the sizes that the layer was built with, and no ids of a `VocabParallelEmbedding` beyond those (as in fairscale).

Differs from fairscale: `padding_idx` is an id of the whole vocabulary at every degree; under autocast the output of
`RowParallelLinear` has autocast's dtype with a bias, too (there it is float32, the bias's).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from tpfused.collectives import gather_from_group
from tpfused.compat.asserted import divide
from tpfused.compat.fairscale.initialize import get_model_parallel_rank as get_model_parallel_rank
from tpfused.compat.fairscale.initialize import get_model_parallel_world_size as get_model_parallel_world_size
from tpfused.compat.fairscale.initialize import tp_group
from tpfused.compat.fairscale.mappings import copy_to_model_parallel_region as copy_to_model_parallel_region
from tpfused.compat.fairscale.mappings import gather_from_model_parallel_region as gather_from_model_parallel_region
from tpfused.compat.fairscale.mappings import reduce_from_model_parallel_region as reduce_from_model_parallel_region
from tpfused.compat.fairscale.mappings import scatter_to_model_parallel_region as scatter_to_model_parallel_region
from tpfused.compat.fairscale.utils import VocabUtility as VocabUtility
from tpfused.compat.fairscale.utils import divide_and_check_no_remainder as divide_and_check_no_remainder
from tpfused.explanation import PLAIN, tell
from tpfused.group import TPGroup
from tpfused.layers import embedding, linear
from tpfused.layers.backend import why_plain
from tpfused.layers.ids import IdCheck
from tpfused.parameter import ParallelModule, check_init_method, check_size, fill_in_place
from tpfused.sharding import shard_range

InitMethod = Callable[[Tensor], object]


class _Layer(ParallelModule):
    """What holds too for a program's subclass that calls ``nn.Module.__init__`` alone and makes its own weights."""

    _shards = {}
    backend = activation = None
    sequence_parallel = skip_bias_add = save_gathered = False
    sequence_dim = 0

    @cached_property
    def group(self) -> TPGroup:
        return tp_group()

    def forward(self, input_: Tensor) -> Tensor:
        return super().forward(input_)


class ColumnParallelLinear(_Layer, linear.ColumnParallelLinear):
    """`tpfused.ColumnParallelLinear` whose output is gathered by default, over fairscale's group.

    Args:
        in_features, out_features: of the whole layer; `out_features` divides by the number of ranks.
        bias: split like the outputs; starts at zero.
        gather_output: return all output features on every rank instead of this rank's.
        init_method: fills the whole ``[out, in]`` weight in place, of which each rank keeps its rows.
        stride: 1.
        keep_master_weight_for_test: keep the whole weight as the attribute `master_weight`.

    Shapes: input ``[..., in]``, whole on each rank; output ``[..., out]``, or ``[..., out / ranks]``.

    Raises:
        ValueError: sizes that do not divide, a stride, no groups; and as the layer of tpfused.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ):
        group = tp_group()
        _check_stride(stride)
        own = _per_rank(out_features, "out_features", group, "ColumnParallelLinear")
        super().__init__(
            in_features, out_features, bias, gather_output=gather_output, init_method=init_method, group=group
        )
        self.output_size_per_partition = own
        self.master_weight = self.get_master_weight() if keep_master_weight_for_test else None

    def split_features(self) -> int:
        return _whole_size(self, 0)

    def get_master_weight(self) -> Tensor:
        """The whole weight ``[out, in]``, without gradient. Collective over the ranks."""
        return _whole_weight(self, 0)


class RowParallelLinear(_Layer, linear.RowParallelLinear):
    """`tpfused.RowParallelLinear` whose input is whole by default, over fairscale's group.

    Args:
        in_features, out_features: of the whole layer; `in_features` divides by the number of ranks.
        bias: whole on each rank, added once, after the reduction; starts at zero.
        input_is_parallel: the input is this rank's features; False: it is whole, and this rank's slice is taken first.
        init_method, stride, keep_master_weight_for_test: as in `ColumnParallelLinear`, with columns for rows.

    Shapes: input ``[..., in]``, or ``[..., in / ranks]``; output ``[..., out]``, whole on each rank. Raises as
    `ColumnParallelLinear` does.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ):
        group = tp_group()
        _check_stride(stride)
        own = _per_rank(in_features, "in_features", group, "RowParallelLinear")
        super().__init__(
            in_features, out_features, bias, input_is_parallel=input_is_parallel, init_method=init_method, group=group
        )
        self.input_size_per_partition = own
        self.master_weight = self.get_master_weight() if keep_master_weight_for_test else None

    def split_features(self) -> int:
        return _whole_size(self, 1)

    def get_master_weight(self) -> Tensor:
        """The whole weight ``[out, in]``, without gradient. Collective over the ranks."""
        return _whole_weight(self, 1)


class _Table(_Layer):
    """The same for an embedding."""

    _weight = None  # of fairscale's
    check = "off"
    _id_check = IdCheck("token ids")


class VocabParallelEmbedding(_Table, embedding.VocabParallelEmbedding):
    """`tpfused.VocabParallelEmbedding` with fairscale's initialisation, over its group.

    Args:
        num_embeddings, embedding_dim: of the whole table; `num_embeddings` divides by the number of ranks.
        padding_idx: an id whose row gets no gradient. It is initialised like the others, unlike in `nn.Embedding`.
        max_norm, scale_grad_by_freq, sparse: None and False.
        norm_type: without meaning.
        init_method: fills the whole table in place, of which each rank keeps its rows.

    Shapes: int32 or int64 ids ``[...]``, whole on each rank; output ``[..., embedding_dim]``, whole on each rank. An id
    outside the vocabulary gives zeros, as in fairscale.

    Raises:
        ValueError: sizes that do not divide, an option that is not supported, a padding_idx outside the vocabulary, an
            init_method that returns a new tensor, no groups.
        TypeError: ids that are not integers, an init_method that is no function of one tensor.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
    ):
        group = tp_group()
        _check_lookup(max_norm, scale_grad_by_freq, sparse)
        own = _per_rank(num_embeddings, "num_embeddings", group, "VocabParallelEmbedding")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, init_method=init_method, check=self.check, group=group
        )
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, norm_type, False, False
        self.num_embeddings_per_partition = own
        self.vocab_start_index, self.vocab_end_index = shard_range(self.num_embeddings, group.size, group.rank)

    def reset_parameters(self) -> None:
        """Draw the whole table, and keep this rank's rows. Nothing on the meta device."""
        _draw_table(self)


class ParallelEmbedding(_Table):
    """`nn.Embedding` with the embedding dimension split over the ranks, and gathered after the lookup.

    Args:
        num_embeddings, embedding_dim: of the whole table; `embedding_dim` divides by the number of ranks.
        keep_master_weight_for_test: without meaning.

    Other arguments, shapes and errors as in `VocabParallelEmbedding`, but for an id outside the vocabulary, which is an
    error of torch's.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ):
        super().__init__(tp_group())
        _check_lookup(max_norm, scale_grad_by_freq, sparse)
        num_embeddings = check_size(num_embeddings, "num_embeddings")
        embedding_dim = check_size(embedding_dim, "embedding_dim")
        self.embedding_dim_per_partition = _per_rank(embedding_dim, "embedding_dim", self.group, "ParallelEmbedding")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = embedding.row_of_padding(padding_idx, num_embeddings)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, norm_type, False, False
        check_init_method(init_method)
        self.init_method = init_method
        self.new_parameter("weight", (num_embeddings, embedding_dim), 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole table, and keep this rank's columns. Nothing on the meta device."""
        _draw_table(self)

    def forward(self, input_: Tensor) -> Tensor:
        weight = self.local("weight")
        embedding.check_ids(input_, weight, "ParallelEmbedding")
        tell("embedding", weight, PLAIN, why_plain(weight, None) or "no kernel for a split embedding dimension")
        rows = F.embedding(input_, weight, self.padding_idx)
        return gather_from_group(rows, -1, _whole_size(self, 1), self.group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.group.size}"


@torch.no_grad()
def _draw_table(layer: VocabParallelEmbedding | ParallelEmbedding) -> None:
    if layer.weight.is_meta:
        return
    whole = layer.weight.new_empty(layer.num_embeddings, layer.embedding_dim)
    fill_in_place(whole, layer.init_method)
    layer.fill_parameter("weight", whole)


def _whole_size(layer: ColumnParallelLinear | RowParallelLinear | ParallelEmbedding, dim: int) -> int:
    """By what is there: a program may have put a tensor of its own, and of another size, in the weight's place."""
    return int(layer.weight.shape[dim]) * layer.group.size  # under torch.jit.trace sizes are tensors


def _whole_weight(layer: ColumnParallelLinear | RowParallelLinear, dim: int) -> Tensor:
    return gather_from_group(layer.weight.detach(), dim, _whole_size(layer, dim), layer.group)


@torch.no_grad()
def _initialize_affine_weight(
    weight: Tensor,
    out_features: int,
    in_features: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
) -> Tensor | None:
    """Fill `weight`, this rank's shard, as the layers here are filled. Programs call it for layers of their own.

    Args:
        out_features, in_features: of the whole weight, which `init_method` fills.
        per_partition_size: of `weight` along `partition_dim`, which is split.
        stride: 1.
        return_master_weight: return the whole weight instead of None.

    Raises:
        ValueError: a stride, an init_method that returns a new tensor.
        TypeError: an init_method that is no function of one tensor.
    """
    _check_stride(stride)
    check_init_method(init_method)
    group = tp_group()
    whole = weight if group.size == 1 else weight.new_empty(out_features, in_features)
    fill_in_place(whole, init_method)
    if group.size > 1:
        weight.copy_(whole.narrow(partition_dim, group.rank * per_partition_size, per_partition_size))
    return whole if return_master_weight else None


def _per_rank(size: int, what: str, group: TPGroup, layer: str) -> int:
    size = check_size(size, what)
    return divide(size, group.size, f"{layer}: {what} over the model-parallel ranks")


def _check_stride(stride: int) -> None:
    if stride != 1:
        raise ValueError(f"stride must be 1, not {stride!r}: shards are consecutive rows or columns")


def _check_lookup(max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    if max_norm is not None:
        raise ValueError(f"max_norm must be None, not {max_norm}: rows are not renormalised")
    for name, given in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            raise ValueError(f"{name} must be False, not {given}: the gradient is a dense sum over the tokens")
