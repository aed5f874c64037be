"""What Megatron-LM's layers have in common besides their signatures: how a config says that parameters are made, what
these say of themselves, checkpoints, and gradients that go to `main_grad`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tpfused.checks import check_boolean, check_tensor
from tpfused.compat.asserted import divide
from tpfused.compat.megatron.mappings import find_group
from tpfused.group import TPGroup
from tpfused.main_grad import announced, into_main_grad, main_grad_of
from tpfused.parameter import ParallelModule, check_init_method, check_size, fill_in_place

Init = Callable[[Tensor], object] | None
SWITCHES = {  # of a config, as they are where it has none, or None
    "sequence_parallel": False,
    "perform_initialization": True,
    "use_cpu_initialization": False,
    "gradient_accumulation_fusion": False,
}


class Layer(ParallelModule):
    """What Megatron's programs expect of a layer besides its forward."""

    partition_dims: dict[str, int]  # of the parameters that are split
    extra_state: dict[str, None] = {}  # in distributed checkpoints, where Megatron's layers look for it
    stride = 1

    def _setup(
        self, config, init_method: Init, tp_group: dist.ProcessGroup | None, stride: int = 1, pg_collection=None
    ) -> dict:
        """To be called first -> the arguments that say how parameters are made."""
        stride = check_size(stride, "stride")
        check_init_method(init_method)
        if isinstance(config, type(None) | str | int | float | dict | list | tuple | Tensor):
            raise TypeError(f"config must be an object with Megatron's attributes, not {type(config).__name__}")
        for name in SWITCHES:
            check_boolean(switch(config, name), f"config.{name}")
        remat_size = getattr(config, "gtp_weight_remat_size", None)
        remat_size = 1 if remat_size is None else check_size(remat_size, "config.gtp_weight_remat_size")
        remat_group = getattr(pg_collection, "gtp_remat", None)
        if remat_group is not None and not callable(getattr(remat_group, "size", None)):
            raise TypeError(f"pg_collection.gtp_remat must be a process group, not {remat_group!r}")
        remat_ranks = 1 if remat_group is None else remat_group.size()
        refuse(
            type(self).__name__,
            gtp_weight_remat_size=remat_size if remat_size > 1 else None,
            pg_collection=f"gtp_remat of {remat_ranks} ranks" if remat_ranks > 1 else None,
        )
        self.config = config
        self.stride = stride
        group = find_group(tp_group)
        on_cpu = switch(config, "use_cpu_initialization")
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
        if switch(self.config, "perform_initialization"):
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


class LinearLayer(Layer):
    """The same of a linear layer."""

    extra_state = {"_extra_state": None}
    is_expert = expert_parallel = explicit_expert_comm = False

    @property
    def gradient_accumulation_fusion(self) -> bool:
        return switch(self.config, "gradient_accumulation_fusion")

    def weight_and_main_grad(self, given: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """As `ParallelModule.weight_and_main_grad`, for a `given` weight in place of the layer's too."""
        if given is not None:
            check_tensor(given, f"{type(self).__name__}: the weight")
        weight = self.local("weight") if given is None else given
        if not self.gradient_accumulation_fusion:
            return weight, None
        if given is None:
            self.check_trains_own_weight()
        main_grad = main_grad_of(weight, f"{type(self).__name__}.weight", own_dtype=True)
        weight, main_grad = announced(weight, main_grad, weight)
        if main_grad is None or main_grad.dtype == torch.float32:
            return weight, main_grad
        return into_main_grad(weight, main_grad), None  # matmuls add to float32 only

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


def switch(config: object, name: str) -> bool:
    given = getattr(config, name, None)
    return SWITCHES[name] if given is None else given


def per_rank(size: int, what: str, stride: int, group: TPGroup) -> int:
    size = check_size(size, what)
    divide(size, group.size * stride, f"{what} over {group.size} tensor-parallel ranks and a stride of {stride}")
    return size // group.size


def refuse(layer: str, **given: object) -> None:
    """`given`: arguments that are not None where they are not supported."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{layer}: {name} {reprlib.repr(value)} is not supported, and would change results if it were ignored"
            )
