"""Parameters that are a rank's shard of a larger tensor, and the module base class that makes them."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, SupportsIndex

import torch
from torch import Tensor, nn

from tpfused.autograd import refuse_export_with_gradients
from tpfused.collectives import copy_to_group
from tpfused.group import GROUPS, TPGroup, check_exists, replica_mesh, resolve_group
from tpfused.main_grad import announced, main_grad_of
from tpfused.placement import ShardInfo, is_dtensor, local, own_part, shard_info, splits
from tpfused.sharding import shard_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ParallelModule(nn.Module):
    """A module whose parameters are split over a tensor-parallel group.

    With ``group=`` (or nothing: the default group) parameters are plain tensors, with ``mesh=`` DTensors. Subclasses
    make them with `new_parameter` and fill them from whole tensors with `fill_parameter`, so that every degree of
    tensor parallelism draws the same random numbers and ends with the same weights, bit for bit. FSDP2 needs ``mesh=``.

    A copy (``copy.deepcopy``) is of the same group. Pickled, each rank's module is its own part; loaded by the same
    rank, it finds the group of the same ranks, which must exist, or raises RuntimeError.
    """

    accumulate_main_grad = False  # whether the weight's gradient is added to its main_grad, where it has one

    def __init__(self, group=None, mesh: DeviceMesh | None = None):
        super().__init__()
        self.group = resolve_group(group, mesh)
        self._shards: dict[str, ShardInfo] = {}

    def new_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        shard_dim: int | None = None,
        *,
        group: TPGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register an uninitialised parameter of which `shape` is the whole shape.

        It is split along `shard_dim` over `group` (the module's own by default), or whole on each rank for None.

        Raises:
            TypeError: a dtype that is not a floating-point torch.dtype of at least 16 bits.
        """
        is_dtype = isinstance(dtype, torch.dtype)
        if dtype is not None and not (is_dtype and dtype.is_floating_point and dtype.itemsize >= 2):
            raise TypeError(
                f"dtype must be a floating-point torch.dtype of at least 16 bits, as torch.bfloat16, not {dtype!r}"
            )
        group = group or self.group
        mesh = self.group.mesh
        if device is None and mesh is not None:
            device = mesh.device_type
        local_shape = list(shape)
        if shard_dim is not None:
            local_shape[shard_dim] = shard_size(shape[shard_dim], group.size, group.rank)
        data = torch.empty(local_shape, device=device, dtype=dtype)
        if mesh is not None:
            data = _as_dtensor(data, shape, shard_dim, group)
        elif shard_dim is not None and group.size > 1:
            self._shards[name] = ShardInfo(shard_dim, shape[shard_dim], group)
        self.register_parameter(name, nn.Parameter(data))

    @torch.no_grad()
    def fill_parameter(self, name: str, whole: Tensor) -> None:
        """Copy this rank's part of `whole` into the parameter."""
        param = getattr(self, name)
        local(param).copy_(own_part(whole, splits(param)))

    def local(self, name: str) -> Tensor | None:
        """What this rank computes with for the parameter `name`; its gradient reaches the parameter.

        Raises:
            ValueError: FSDP2 has taken a plain shard for a whole parameter, or DDP a DTensor's local tensor; a plain
                shard is parametrized or pruned.
            RuntimeError: the process group was destroyed.
        """
        if self.group.process_group not in GROUPS:
            check_exists(self.group, type(self).__name__)
        param = self._parameters.get(name)
        if type(param) is nn.Parameter and (name not in self._shards or shard_info(param) is not None):
            return param  # at once: plain, and the layer's own
        param = getattr(self, name)
        if name in vars(self) and is_dtensor(param):
            # DDP(device_mesh=) trains the local tensors, and puts DTensors that are no parameters in their place.
            # Gradients would be clipped and checkpoints saved as if this rank's shards were the only ones.
            raise ValueError(
                f"{type(self).__name__}.{name} is no longer a parameter, but a DTensor made of one, as "
                f"DistributedDataParallel(device_mesh=) does; build the layers with group= for "
                f"DistributedDataParallel(process_group=), or wrap them by fully_shard, over a (replicas, 1) mesh say"
            )
        if name in self._shards and self._is_computed(name):
            # Of whatever it is computed from nobody knows which part of a whole it is, and whether the same function of
            # the whole has this shard: a row's norm, say, is over all ranks' columns.
            raise ValueError(
                f"{type(self).__name__}.{name}, one of {self._shards[name].group.size} ranks' shards, is parametrized "
                f"or pruned: nobody knows how what it is computed from is split, to compute, clip or save it as a part "
                f"of the whole; make that permanent first (remove_parametrizations, prune.remove), or build the layer "
                f"with mesh=, whose DTensors know"
            )
        replaced = name in self._shards and isinstance(param, nn.Parameter) and shard_info(param) is None
        if replaced and not torch.compiler.is_exporting():  # torch.export traces with fake ones
            # FSDP2 puts parameters of its own in the place of ours. It knows of a shard only if that is a DTensor, and
            # would clip gradients and save checkpoints as if this rank's were the only one.
            raise ValueError(
                f"{type(self).__name__}.{name} was replaced by a parameter that is not known as a tensor-parallel "
                f"shard: under FSDP2, build the layers with mesh=, not group=. One of your own is to be assigned as an "
                f"attribute; functional_call takes tensors that are no parameters"
            )
        # A matrix is multiplied or looked up, which gives a new gradient; a bias may get what the layer's output does.
        return None if param is None else local(param, new_gradient=param.ndim > 1)

    def weight_and_main_grad(self) -> tuple[Tensor, Tensor | None]:
        """What this rank computes with for the weight, and what backward is to add its gradient to, if not to `grad`.

        Raises:
            ValueError: as `check_trains_own_weight`.
            ValueError, TypeError: a main_grad that does not fit the weight; and as `local`.
        """
        weight = self.local("weight")
        if not self.accumulate_main_grad:
            return weight, None
        if torch.compiler.is_exporting():
            refuse_export_with_gradients()
            return weight, None
        self.check_trains_own_weight()
        main_grad = main_grad_of(self.weight, f"{type(self).__name__}.weight")
        return announced(weight, main_grad, self.weight)

    def check_trains_own_weight(self) -> None:
        """Refuse a weight that is not the parameter on which users see, and set, its `main_grad`: that would stay as it
        is without a word.

        Raises:
            ValueError: FSDP2 has put another parameter in its place for forward, or it is parametrized or pruned.
        """
        weight = self._parameters.get("weight")
        if self._is_computed("weight") or (isinstance(weight, nn.Parameter) and not hasattr(weight, "tp_shard")):
            raise ValueError(
                f"{type(self).__name__} has accumulate_main_grad=True (Megatron: gradient_accumulation_fusion), but "
                f"forward computes with another tensor than its own parameter {type(self).__name__}.weight, as FSDP2 "
                f"makes it do, a parametrization, or pruning: that one's main_grad would stay as it is. Leave the "
                f"option off, or the weight out of these (fully_shard's ignored_params); a weight of your own is to be "
                f"set as layer.weight = ..."
            )

    def _is_computed(self, name: str) -> bool:
        """Whether torch computes it from other parameters. A program may have put a tensor of its own there instead."""
        if name in self._parameters:
            return False
        # A parametrized one is a property; pruning and the older weight_norm leave weight_orig, weight_g and weight_v.
        return name not in vars(self) or any(other.startswith(f"{name}_") for other in self._parameters)

    def replicated(self, name: str, *, sharded_tokens: bool) -> Tensor | None:
        """The same for a parameter that is whole on each rank.

        Where each rank sees other tokens (sequence parallelism), its gradient is a partial sum on each rank: it is
        all-reduced over the group, so that it is right as soon as backward returns.
        """
        param = self.local(name)
        return copy_to_group(param, self.group) if sharded_tokens and param is not None else param

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._tag_parameters()

    def _tag_parameters(self) -> None:
        # A Parameter's attributes do not survive deepcopy, pickling or a move off the meta device: set again then.
        for name, param in self._parameters.items():
            # One that is no shard here may be one in a layer that it is tied to. None of FSDP2's own has the attribute.
            if param is not None and (name in self._shards or not hasattr(param, "tp_shard")):
                param.tp_shard = self._shards.get(name)

    def _apply(self, fn: Callable, recurse: bool = True):
        module = super()._apply(fn, recurse)
        self._tag_parameters()
        return module

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._tag_parameters()


class LinearParameters(ParallelModule):
    """A linear layer's weight ``[out, in]`` and bias ``[out]``, split along one of the weight's two dimensions.

    `weight_shard_dim` 0 splits the outputs (and with them the bias), 1 the inputs (the bias is whole on each rank).
    Initialised as `nn.Linear` of the whole shape is; with `init_method`, a function that fills the whole weight in
    place, the bias starts at zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        weight_shard_dim: int,
        *,
        init_method: Callable[[Tensor], object] | None = None,
        group: TPGroup | None = None,
        mesh: DeviceMesh | None = None,
        shard_group: TPGroup | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(group, mesh)
        in_features = check_size(in_features, "in_features")
        out_features = check_size(out_features, "out_features")
        check_init_method(init_method)
        self.in_features = in_features
        self.out_features = out_features
        self.init_method = init_method
        placing = {"group": shard_group, "device": device, "dtype": dtype}
        self.new_parameter("weight", (out_features, in_features), weight_shard_dim, **placing)
        if bias:
            self.new_parameter("bias", (out_features,), 0 if weight_shard_dim == 0 else None, **placing)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole weight and bias as `nn.Linear` does, and keep this rank's part. Nothing on the meta device."""
        if self.weight.is_meta:
            return
        whole = self.new_whole_weight(self.out_features)
        init_weight(whole, self.init_method)
        self.fill_parameter("weight", whole)
        if self.bias is not None:
            self.fill_parameter("bias", new_whole_bias(whole, self.init_method))

    def new_whole_weight(self, out_features: int) -> Tensor:
        """Uninitialised ``[out_features, in]``, where this rank's part of the weight lives."""
        return torch.empty(out_features, self.in_features, device=local(self.weight).device, dtype=self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, ranks={self.group.size}"


@torch.no_grad()
def init_weight(whole: Tensor, init_method: Callable[[Tensor], object] | None) -> None:
    """Fill a whole ``[out, in]`` weight: `init_method`, or what `nn.Linear` does."""
    if init_method is not None:
        fill_in_place(whole, init_method)
    else:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))


def fill_in_place(whole: Tensor, init_method: Callable[[Tensor], object]) -> None:
    """Fill a whole weight by the user's function.

    Raises:
        ValueError: it returned something else than that tensor or None: a new one, say, as a function does that leaves
            the given one as it was, uninitialised.
    """
    returned = init_method(whole)
    if returned is None:
        return
    told = type(returned).__name__
    if isinstance(returned, Tensor):
        # torch.nn.init's return the given tensor itself, and a view of it is well too: lambda w: w.t().normal_()
        if returned.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            return
        told = f"a new tensor of shape {tuple(returned.shape)}, given one of {tuple(whole.shape)}"
    raise ValueError(
        f"init_method must fill the tensor that it is given in place, and return that or None: {_name_of(init_method)} "
        f"returned {told}"
    )


@torch.no_grad()
def new_whole_bias(whole_weight: Tensor, init_method: Callable[[Tensor], object] | None) -> Tensor:
    """The bias that goes with a whole weight: zero under an `init_method`, else what `nn.Linear` draws."""
    out_features, in_features = whole_weight.shape
    bias = whole_weight.new_zeros(out_features)
    if init_method is None:
        bound = 1 / math.sqrt(in_features)  # not in_features**-0.5, which some C libraries round otherwise
        bias.uniform_(-bound, bound)
    return bias


def empty_on(param: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter like this one, a DTensor or not, on another device (off the meta device, say)."""
    return nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)


def check_init_method(init_method: Callable[[Tensor], object] | None) -> None:
    if init_method is None:
        return
    if not callable(init_method):
        raise TypeError(
            f"init_method must be a function that fills a tensor in place, as torch.nn.init.xavier_uniform_, or None, "
            f"not {init_method!r}"
        )
    try:
        signature = inspect.signature(init_method)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"init_method is called with one tensor, to fill in place, but {_name_of(init_method)} takes {signature}: "
            f"{error}"
        ) from None


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def check_integer(number: SupportsIndex, what: str) -> int:
    """The number as Python's own integer, NumPy's say.

    Raises:
        TypeError: it is none: True and False too, which would count as 1 and 0, and tensors, which would be waited for.
    """
    if isinstance(number, int):
        if not isinstance(number, bool):
            return number
    elif not isinstance(number, Tensor):
        with suppress(TypeError):
            return operator.index(number)
    raise TypeError(f"{what} must be an integer, not {type(number).__name__} {number!r}")


def check_size(size: SupportsIndex, what: str) -> int:
    """The same of at least 1, or a ValueError."""
    size = check_integer(size, what)
    if size < 1:
        raise ValueError(f"{what} must be at least 1, not {size}")
    return size


def _as_dtensor(data: Tensor, shape: tuple[int, ...], shard_dim: int | None, group: TPGroup) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = group.mesh if group.replicas == 1 else replica_mesh(group)
    placements = [Replicate()] * mesh.ndim
    if shard_dim is not None:
        placements[0] = Shard(shard_dim)
    whole_shape = torch.Size(shape)
    strides = torch.empty(whole_shape, device="meta").stride()
    return DTensor.from_local(data, mesh, placements, run_check=False, shape=whole_shape, stride=strides)
