"""LayerNorm and RMSNorm whose weights are whole on each rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpfused import checks, reference
from tpfused.overlap.plans import NORM_KINDS, NormOperands
from tpfused.parameter import ParallelModule, check_size, local


class Norm(ParallelModule):
    """`nn.LayerNorm` or `nn.RMSNorm` over the last dimension.

    Under `sequence_parallel` each rank normalises its own tokens, so the gradients of weight and bias are summed over
    the ranks in backward.
    """

    def __init__(
        self,
        kind: str,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        group=None,
        mesh=None,
        device=None,
        dtype=None,
    ):
        checks.check_booleans(Norm.__init__, locals())
        super().__init__(group, mesh)
        hidden_size = check_size(hidden_size, "hidden_size")
        if kind not in NORM_KINDS:
            raise ValueError(f"norm must be one of {', '.join(NORM_KINDS)}, not {kind!r}")
        checks.check_eps(eps, "eps")
        self.kind = kind
        self.hidden_size = hidden_size
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        self.new_parameter("weight", (hidden_size,), device=device, dtype=dtype)
        if kind == "layernorm":
            self.new_parameter("bias", (hidden_size,), device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.ones_(local(self.weight))
        if self.bias is not None:
            nn.init.zeros_(local(self.bias))

    def forward(self, x: Tensor) -> Tensor:
        kind, weight, bias, eps = self.operands()
        checks.check_input(x, self.hidden_size, weight, "Norm")
        return reference.normalize(x, kind, weight, bias, eps)

    def operands(self) -> NormOperands:
        weight, bias = (self.replicated(name, sharded_tokens=self.sequence_parallel) for name in ("weight", "bias"))
        return NormOperands(self.kind, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.hidden_size}, eps={self.eps}"
