"""The feed-forward layers: one column-parallel and one row-parallel matmul, one collective each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tpfused import checks, reference
from tpfused.group import resolve_group
from tpfused.kernels.gated_act import gated_act
from tpfused.layers.backend import runs_kernels
from tpfused.layers.linear import ColumnParallelLinear, PackedColumnParallelLinear, RowParallelLinear, Then, joined
from tpfused.packing import GateUpPacking
from tpfused.parameter import check_size
from tpfused.sharding import padded_shard_size

_OF_BOTH = "sequence_parallel sequence_dim init_method backend accumulate_main_grad group mesh device dtype".split()


def _common(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a constructor's arguments, those that both of its linear layers take."""
    return {name: arguments[name] for name in _OF_BOTH}


class ParallelMLP(nn.Module):
    """``fc2(act(fc1(x)))``, the `ffn_size` features split over the ranks.

    Args:
        hidden_size, ffn_size: of the whole layer.
        activation: as in `ColumnParallelLinear`.
        bias: of both layers.
        sequence_parallel, sequence_dim, init_method, backend, accumulate_main_grad, save_gathered, group, mesh: as in
            `ColumnParallelLinear`.

    Shapes: ``[..., hidden]`` in and out; under sequence parallelism `sequence_dim` is this rank's tokens in both.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: str | None = "gelu",
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init_method: Callable[[Tensor], object] | None = None,
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        save_gathered: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        common = _common(locals())
        super().__init__()
        hidden_size = check_size(hidden_size, "hidden_size")
        ffn_size = check_size(ffn_size, "ffn_size")
        self.hidden_size = hidden_size
        column = {**common, "save_gathered": save_gathered}
        self.fc1 = ColumnParallelLinear(hidden_size, ffn_size, bias, activation=activation, **column)
        self.fc2 = RowParallelLinear(ffn_size, hidden_size, bias, **common)
        self.fc1.called = self.fc2.called = "ParallelMLP"

    def forward(
        self,
        x: Tensor,
        *,
        total_len: int | None = None,
        residual: Tensor | None = None,
        then: Then | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`total_len`: all ranks' tokens, where they do not divide evenly under sequence parallelism. `residual`,
        `then`: as in `RowParallelLinear`."""
        added = joined(x, self.hidden_size, residual, then, "ParallelMLP")
        return self.fc2(self.fc1(x, total_len=total_len), **added)


class ParallelGatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``: SwiGLU with "silu", GEGLU with "gelu" (Shazeer, 2020); gate and up in one matmul.

    Arguments and shapes as in `ParallelMLP`. The packed weight ``gate_up`` is ``[2 * ffn_size, hidden]`` with rows gate
    0, up 0, gate 1, up 1, ...

    Raises:
        ValueError: `activation` is None, or `ffn_size` splits over the ranks such that a gate and its up would be on
        two of them.
    """

    packed_children = {"gate_up": GateUpPacking()}

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        init_method: Callable[[Tensor], object] | None = None,
        backend: str | None = None,
        accumulate_main_grad: bool = False,
        save_gathered: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        common = _common(locals())
        super().__init__()
        hidden_size = check_size(hidden_size, "hidden_size")
        ffn_size = check_size(ffn_size, "ffn_size")
        check_gates(ffn_size, activation, resolve_group(group, mesh).size)
        packing = self.packed_children["gate_up"]
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend
        column = {**common, "save_gathered": save_gathered}
        self.gate_up = PackedColumnParallelLinear(hidden_size, (ffn_size, ffn_size), packing, bias, **column)
        self.down = RowParallelLinear(ffn_size, hidden_size, bias, **common)
        self.gate_up.called = self.down.called = "ParallelGatedMLP"

    def forward(
        self,
        x: Tensor,
        *,
        total_len: int | None = None,
        residual: Tensor | None = None,
        then: Then | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`total_len`, `residual`, `then`: as in `ParallelMLP`."""
        added = joined(x, self.hidden_size, residual, then, "ParallelGatedMLP")
        gate_up = self.gate_up(x, total_len=total_len)
        gate = gated_act if runs_kernels(gate_up, self.backend, "gated activation") else reference.gated_act
        x = gate(gate_up, activation=self.activation)
        return self.down(x, **added)


def check_gates(ffn_size: int, activation: str, ranks: int) -> None:
    """Refuse what `ParallelGatedMLP` cannot be built with on `ranks` ranks."""
    known = [name for name in checks.ACTIVATIONS if name is not None]
    if activation not in known:
        raise ValueError(f"a gate's activation must be one of {', '.join(map(repr, known))}, not {activation!r}")
    if padded_shard_size(2 * ffn_size, ranks) != 2 * padded_shard_size(ffn_size, ranks):
        raise ValueError(
            f"ffn_size {ffn_size} on {ranks} ranks would put a gate and its up on two ranks: "
            f"{2 * ffn_size} packed rows split into shards of {padded_shard_size(2 * ffn_size, ranks)}; an ffn_size "
            f"divisible by {ranks} fits"
        )
