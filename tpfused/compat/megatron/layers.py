"""Megatron-LM's tensor-parallel layers: its signatures, its parameters' attributes, its way to read a config.

A `config` is Megatron's ``ModelParallelConfig`` or any object with some of these attributes (None is as if not there):

- ``sequence_parallel`` (False): as in tpfused's layers, over dimension 0.
- ``params_dtype`` (torch's default): of the parameters.
- ``perform_initialization`` (True): False leaves parameters as they are allocated, for a checkpoint to fill.
- ``use_cpu_initialization`` (False): draw whole weights in float32 on torch's default device, as Megatron does. Without
  it parameters live on the current GPU, where there is one and torch's default device is the CPU.
- ``gradient_accumulation_fusion`` (False): backward adds the gradients of linear layers' weights to their `main_grad`,
  where they have one, and not to `grad`; see `accumulate_main_grad` of `tpfused.ColumnParallelLinear`. Here it may be
  of 16 bits too.
- ``gtp_weight_remat_size`` (1): others raise; generalized tensor parallelism is not supported.

All others are ignored, for they do not change results here: ``async_tensor_model_parallel_allreduce``,
``tp_comm_overlap`` and its like (tpfused overlaps as it measures best), ``cpu_offloading``, ``deterministic_mode``
(`tpfused.deterministic` is for that), ``delay_wgrad_compute``. So are the arguments `keep_master_weight_for_test`,
`tp_comm_buffer_name` and `name`, and a `pg_collection` but for its group of generalized tensor parallelism.

Of attributes that Megatron's layers have, these say what was asked for: `config`, `input_size`, `output_size`,
`output_size_per_partition`, `input_size_per_partition`, `gather_output`, `input_is_parallel`, `skip_bias_add`,
`disable_grad_reduce`, `allreduce_dgrad`, `sequence_parallel`, `gradient_accumulation_fusion`, `tp_group`.
`gather_output`, `sequence_parallel` and `disable_grad_reduce` may be changed between calls. `is_expert` and its like
are False.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.checks import check_boolean, check_booleans, check_tensor
from tpfused.collectives import gather_from_group
from tpfused.compat.megatron.base import Init, Layer, LinearLayer, per_rank, refuse, switch
from tpfused.compat.megatron.mappings import check_divides
from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.group import TPGroup
from tpfused.layers import embedding, linear

_ALONE = TPGroup(None, rank=0, size=1)


class ColumnParallelLinear(LinearLayer, linear.ColumnParallelLinear):
    """Megatron's ``ColumnParallelLinear``: ``(x @ weight.T + bias, None)`` with the outputs split over the ranks.

    Args:
        input_size, output_size: of the whole layer.
        config: see the module.
        init_method: fills the whole ``[out, in]`` weight in place; the bias is zero.
        bias, gather_output: as in `tpfused.ColumnParallelLinear`.
        stride: the blocks that are split one by one: 2 for a gate and its projection.
        skip_bias_add: return ``(x @ weight.T, bias)``, the bias as it is stored, this rank's.
        skip_weight_param_allocation: there is no weight; `forward` is given one (a tied embedding's).
        disable_grad_reduce: without sequence parallelism, leave the input's gradient a partial sum on each rank, for
            what made the input to reduce (`gather_from_sequence_parallel_region`, say).
        output_dtype: None, or that of the parameters.
        tp_group: the tensor-parallel group.

    Shapes: input ``[tokens, batch, in]`` (or other leading dimensions), this rank's tokens under sequence parallelism;
    output all tokens, ``[tokens, batch, out / ranks]``, or ``out`` if gathered. `forward` takes a `weight`
    ``[out / ranks, in]`` in place of the layer's, and `runtime_gather_output` in place of `gather_output`.

    Raises:
        ValueError: `output_size` does not divide by the ranks (times the stride); no weight, or one of a wrong shape;
            `is_expert`, `embedding_activation_buffer`, `grad_output_buffer` or another `output_dtype`, which are not
            supported and would change results; and as `tpfused.ColumnParallelLinear`.
    """

    partition_dims = {"weight": 0, "bias": 0}
    embedding_activation_buffer = grad_output_buffer = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Init,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection=None,
    ):
        place = self._setup(config, init_method, tp_group, stride, pg_collection)
        refuse(
            "ColumnParallelLinear",
            is_expert=is_expert or None,
            embedding_activation_buffer=embedding_activation_buffer,
            grad_output_buffer=grad_output_buffer,
            output_dtype=None if output_dtype == (place["dtype"] or torch.get_default_dtype()) else output_dtype,
        )
        check_booleans(ColumnParallelLinear.__init__, locals())
        self.disable_grad_reduce = disable_grad_reduce
        self.output_dtype = output_dtype
        self.skips_weight = skip_weight_param_allocation
        self.output_size_per_partition = per_rank(output_size, "output_size", stride, place["group"])
        super().__init__(
            input_size,
            output_size,
            bias,
            gather_output=gather_output,
            sequence_parallel=switch(config, "sequence_parallel"),
            skip_bias_add=skip_bias_add,
            **place,
        )
        self.input_size, self.output_size = self.in_features, self.out_features

    @property
    def allreduce_dgrad(self) -> bool:
        return self.group.size > 1 and not self.sequence_parallel and not self.disable_grad_reduce

    def new_parameter(self, name: str, *args, **kwargs) -> None:
        if name == "weight" and self.skips_weight:
            self.register_parameter(name, None)
        else:
            super().new_parameter(name, *args, **kwargs)

    def reset_parameters(self) -> None:
        if not self.skips_weight:
            super().reset_parameters()
        elif self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        weight, main_grad = self.weight_and_main_grad(weight)
        expected = self.output_size_per_partition, self.input_size
        if weight is None or weight.shape != expected:
            got = "there is none" if weight is None else f"its shape is {tuple(weight.shape)}"
            raise ValueError(f"ColumnParallelLinear: the weight must be of shape {expected}, but {got}")
        bias = self.local("bias")
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        check_boolean(gather, "gather_output" if runtime_gather_output is None else "runtime_gather_output")
        check_boolean(self.sequence_parallel, "sequence_parallel")
        check_boolean(self.disable_grad_reduce, "disable_grad_reduce")
        alone = self.disable_grad_reduce and not self.sequence_parallel  # as a whole layer of this rank's features
        out = linear.column_forward(
            input_,
            weight,
            None if self.skip_bias_add else bias,
            _ALONE if alone else self.group,
            sequence_dim=0 if self.sequence_parallel else None,
            total_len=None,
            out_features=self.output_size_per_partition if alone else self.output_size,
            gather_output=gather and not alone,
            backend=self.backend,
            main_grad=main_grad,
            save_gathered=self.save_gathered,
        )
        if gather and alone:
            out = gather_from_group(out, -1, self.output_size, self.group)
        return out, bias if self.skip_bias_add else None


class RowParallelLinear(LinearLayer, linear.RowParallelLinear):
    """Megatron's ``RowParallelLinear``: ``(x @ weight.T + bias, None)`` with the inputs split over the ranks.

    Args:
        input_size, output_size: of the whole layer.
        config, init_method, stride, tp_group: as in `ColumnParallelLinear`.
        bias, input_is_parallel: as in `tpfused.RowParallelLinear`.
        skip_bias_add: return ``(x @ weight.T, bias)``. Whatever adds the bias to this rank's tokens, its gradient is
            summed over the ranks.

    Shapes: input ``[tokens, batch, in / ranks]`` (``in`` without `input_is_parallel`), all tokens; output
    ``[tokens, batch, out]``, this rank's tokens under sequence parallelism.

    Raises:
        ValueError: `input_size`, or tokens under sequence parallelism, do not divide by the ranks; `is_expert`, which
            is not supported; and as `tpfused.RowParallelLinear`.
    """

    partition_dims = {"weight": 1}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Init,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        pg_collection=None,
    ):
        place = self._setup(config, init_method, tp_group, stride, pg_collection)
        refuse("RowParallelLinear", is_expert=is_expert or None)
        check_booleans(RowParallelLinear.__init__, locals())
        self.input_size_per_partition = per_rank(input_size, "input_size", stride, place["group"])
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel=input_is_parallel,
            sequence_parallel=switch(config, "sequence_parallel"),
            skip_bias_add=skip_bias_add,
            **place,
        )
        self.input_size, self.output_size = self.in_features, self.out_features

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        check_boolean(self.sequence_parallel, "sequence_parallel")
        if self.sequence_parallel and isinstance(input_, Tensor) and input_.ndim > 1:
            check_divides(input_, 0, self.group, "RowParallelLinear")
        out = super().forward(input_)
        return out if self.skip_bias_add else (out, None)


class VocabParallelEmbedding(Layer, embedding.VocabParallelEmbedding):
    """Megatron's ``VocabParallelEmbedding``: the vocabulary is split over the ranks.

    Args:
        num_embeddings, embedding_dim: of the whole table.
        init_method: fills the whole table in place.
        reduce_scatter_embeddings: return this rank's tokens, tokens first, for sequence parallelism.
        config, tp_group: as in `ColumnParallelLinear`.

    Shapes: int32 or int64 ids ``[batch, tokens]``; output ``[batch, tokens, embedding_dim]``, or with
    `reduce_scatter_embeddings` ``[tokens / ranks, batch, embedding_dim]``.

    Raises:
        ValueError: `num_embeddings`, or the tokens to scatter, do not divide by the ranks; and as
            `tpfused.VocabParallelEmbedding`.
    """

    partition_dims = {"weight": 0}

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Init,
        reduce_scatter_embeddings: bool = False,
        config,
        tp_group: dist.ProcessGroup | None = None,
        pg_collection=None,
    ):
        place = self._setup(config, init_method, tp_group, pg_collection=pg_collection)
        check_booleans(VocabParallelEmbedding.__init__, locals())
        group = place["group"]
        self.num_embeddings_per_partition = per_rank(num_embeddings, "num_embeddings", 1, group)
        self.vocab_start_index = group.rank * self.num_embeddings_per_partition
        self.vocab_end_index = self.vocab_start_index + self.num_embeddings_per_partition
        super().__init__(num_embeddings, embedding_dim, sequence_parallel=reduce_scatter_embeddings, **place)
        self.reduce_scatter_embeddings = reduce_scatter_embeddings

    def sharded_state_dict(self, *args, **kwargs) -> dict:
        shards = super().sharded_state_dict(*args, **kwargs)
        for shard in shards.values():
            shard.allow_shape_mismatch = True  # vocabularies are padded, by as much as the ranks need
        return shards

    def forward(self, input_: Tensor) -> Tensor:
        if self.reduce_scatter_embeddings:
            check_tensor(input_, "VocabParallelEmbedding: the ids")
            if input_.ndim != 2:
                raise ValueError(f"VocabParallelEmbedding: the ids must be [batch, tokens], not {tuple(input_.shape)}")
            input_ = input_.transpose(0, 1)
            check_divides(input_, 0, self.group, "VocabParallelEmbedding")
        return super().forward(input_)


__getattr__ = names_of("megatron.core.tensor_parallel.layers")
