"""Megatron-LM's tensor-parallel layers: its signatures, its parameters' attributes, its way to read a config.

A `config` is Megatron's ``ModelParallelConfig`` or any object with some of these attributes:

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
`disable_grad_reduce`, `sequence_parallel`, `gradient_accumulation_fusion`, `tp_group`. `gather_output`,
`sequence_parallel` and `disable_grad_reduce` may be changed between calls. `is_expert` and its like are False.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.collectives import gather_from_group
from tpfused.compat.megatron.mappings import check_divides, find_group
from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.group import TPGroup
from tpfused.layers import embedding, linear
from tpfused.main_grad import announced, into_main_grad, main_grad_of
from tpfused.parameter import ParallelModule, check_init_method, check_size, fill_in_place
from tpfused.sharding import divide

Init = Callable[[Tensor], object] | None
_ALONE = TPGroup(None, rank=0, size=1)


class _Layer(ParallelModule):
    """What Megatron's programs expect of a layer besides its forward."""

    partition_dims: dict[str, int]  # of the parameters that are split
    extra_state: dict[str, None] = {}  # in distributed checkpoints, where Megatron's layers look for it
    stride = 1

    def _setup(
        self, config, init_method: Init, tp_group: dist.ProcessGroup | None, stride: int = 1, pg_collection=None
    ) -> dict:
        """To be called first -> the arguments that say how parameters are made."""
        check_size(stride, "stride")
        check_init_method(init_method)
        if config is None or isinstance(config, dict | str):
            raise TypeError(f"config must be an object with Megatron's attributes, not {type(config).__name__}")
        remat_group = getattr(pg_collection, "gtp_remat", None)
        _refuse(
            type(self).__name__,
            gtp_weight_remat_size=getattr(config, "gtp_weight_remat_size", 1) > 1,
            pg_collection=remat_group is not None and remat_group.size() > 1,
        )
        self.config = config
        self.stride = stride
        group = find_group(tp_group)
        on_cpu = getattr(config, "use_cpu_initialization", False)
        if init_method is not None and (on_cpu or stride > 1):
            init_method = _Initializer(init_method, self.partition_dims["weight"], stride, group, in_float32=on_cpu)
        device = None
        if not on_cpu and torch.cuda.is_available() and torch.get_default_device().type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = getattr(config, "params_dtype", None)
        return {"init_method": init_method, "group": group, "device": device, "dtype": dtype}

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.group.process_group

    def reset_parameters(self) -> None:
        if getattr(self.config, "perform_initialization", True):
            super().reset_parameters()

    def _tag_parameters(self) -> None:
        super()._tag_parameters()
        for name, param in self._parameters.items():
            if param is None:
                continue
            param.allreduce = True  # over the data-parallel ranks
            if name in self.partition_dims:
                param.tensor_model_parallel = True
                param.partition_dim = self.partition_dims[name]
                param.partition_stride = self.stride
            else:
                param.sequence_parallel = False  # its gradient is complete already

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # Megatron's layers save one, without anything in it
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For Megatron's distributed checkpoints; Megatron must be installed."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True) | self.extra_state,
            prefix,
            self.partition_dims,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class _Linear(_Layer):
    """The same of a linear layer."""

    extra_state = {"_extra_state": None}
    is_expert = expert_parallel = explicit_expert_comm = False

    @property
    def gradient_accumulation_fusion(self) -> bool:
        return getattr(self.config, "gradient_accumulation_fusion", False)

    def weight_and_main_grad(self, given: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """As `ParallelModule.weight_and_main_grad`, for a `given` weight in place of the layer's too."""
        weight = self.local("weight") if given is None else given
        main_grad = getattr(weight, "main_grad", None) if self.gradient_accumulation_fusion else None
        if main_grad is None or not weight.requires_grad:
            return weight, None
        seen = announced(weight, weight)
        if isinstance(main_grad, Tensor) and main_grad.dtype == weight.dtype != torch.float32:
            return into_main_grad(seen, main_grad), None  # matmuls add to float32 only
        return seen, main_grad_of(weight, f"{type(self).__name__}.weight")

    def backward_dw(self) -> None:
        """Nothing: weight gradients are complete when backward returns."""


class _Initializer:
    """Fills a whole weight such that contiguous shards are Megatron's.

    With a stride, Megatron splits a weight into that many blocks (gate and up, say), and each block over the ranks.
    """

    def __init__(
        self, init_method: Callable[[Tensor], object], dim: int, stride: int, group: TPGroup, in_float32: bool
    ):
        self.init_method, self.in_float32 = init_method, in_float32
        self.dim, self.stride, self.ranks = dim, stride, group.size

    def __call__(self, whole: Tensor) -> None:
        drawn = torch.empty(whole.shape, dtype=torch.float32) if self.in_float32 else torch.empty_like(whole)
        fill_in_place(drawn, self.init_method)
        blocks = drawn.unflatten(self.dim, (self.stride, self.ranks, -1)).transpose(self.dim, self.dim + 1)
        whole.copy_(blocks.flatten(self.dim, self.dim + 2))


class ColumnParallelLinear(_Linear, linear.ColumnParallelLinear):
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
        _refuse(
            "ColumnParallelLinear",
            is_expert=is_expert,
            embedding_activation_buffer=embedding_activation_buffer is not None,
            grad_output_buffer=grad_output_buffer is not None,
            output_dtype=output_dtype not in (None, place["dtype"] or torch.get_default_dtype()),
        )
        self.disable_grad_reduce = disable_grad_reduce
        self.output_dtype = output_dtype
        self.skips_weight = skip_weight_param_allocation
        self.output_size_per_partition = _per_rank(output_size, "output_size", stride, place["group"])
        super().__init__(
            input_size,
            output_size,
            bias,
            gather_output=gather_output,
            sequence_parallel=getattr(config, "sequence_parallel", False),
            skip_bias_add=skip_bias_add,
            **place,
        )
        self.input_size, self.output_size = input_size, output_size

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
            main_grad=main_grad,
        )
        if gather and alone:
            out = gather_from_group(out, -1, self.output_size, self.group)
        return out, bias if self.skip_bias_add else None


class RowParallelLinear(_Linear, linear.RowParallelLinear):
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
        _refuse("RowParallelLinear", is_expert=is_expert)
        self.input_size_per_partition = _per_rank(input_size, "input_size", stride, place["group"])
        super().__init__(
            input_size,
            output_size,
            bias,
            input_is_parallel=input_is_parallel,
            sequence_parallel=getattr(config, "sequence_parallel", False),
            skip_bias_add=skip_bias_add,
            **place,
        )
        self.input_size, self.output_size = input_size, output_size

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.sequence_parallel and isinstance(input_, Tensor) and input_.ndim > 1:
            check_divides(input_, 0, self.group, "RowParallelLinear")
        out = super().forward(input_)
        return out if self.skip_bias_add else (out, None)


class VocabParallelEmbedding(_Layer, embedding.VocabParallelEmbedding):
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
        group = place["group"]
        self.num_embeddings_per_partition = _per_rank(num_embeddings, "num_embeddings", 1, group)
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
            if not isinstance(input_, Tensor) or input_.ndim != 2:
                got = tuple(input_.shape) if isinstance(input_, Tensor) else type(input_).__name__
                raise ValueError(f"VocabParallelEmbedding: the ids must be [batch, tokens], not {got}")
            input_ = input_.transpose(0, 1)
            check_divides(input_, 0, self.group, "VocabParallelEmbedding")
        return super().forward(input_)


def _per_rank(size: int, what: str, stride: int, group: TPGroup) -> int:
    check_size(size, what)
    divide(size, group.size * stride, f"{what} over {group.size} tensor-parallel ranks and a stride of {stride}")
    return size // group.size


def _refuse(layer: str, **given: bool) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"{layer}: {name} is not supported, and would change results if it were ignored")


__getattr__ = names_of("megatron.core.tensor_parallel.layers")
