"""A stand-in for the compiled extension, for tests without a GPU: the same calls on addresses, by torch and gloo.

What lies at the addresses is computed in float32. That strides and sizes are plausible is checked.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpfused.collectives import all_gather, all_reduce, reduce_scatter
from tpfused.group import TPGroup
from tpfused.overlap import calls, choice, measure, saved
from tpfused.overlap.communicator import TF32, TYPES
from tpfused.reference import activate, normalize
from tpfused.sharding import shard_range

DTYPES = {code: dtype for dtype, code in TYPES.items()} | {TF32: torch.float32}
EPILOGUES = {0: None, calls.RELU: "relu", calls.GELU_TANH: "gelu_tanh"}


class Module:
    """Its attributes are the extension's functions."""

    def __init__(self, tp: TPGroup):
        self.tp = tp

    def all_reduce(self, handle, stream, type_code, n, x, y):
        dtype = DTYPES[type_code]
        assert (handle, stream) == (1, 2) and 0 < n * dtype.itemsize <= calls.MOST_REDUCED and y != x
        assert not (n * dtype.itemsize % 16 or x % 16 or y % 16)
        whole = Call(self.tp, dtype, 1, 1, 1, 0, n, x)
        sums = whole.read(x, 1, n).clone()
        dist.all_reduce(sums, group=self.tp.process_group)
        whole.at(y, 1, n).copy_(sums)

    def __getattr__(self, name):
        def run(handle, tier, stream, workspace, workspace_bytes, type_code, *arguments):
            assert (handle, stream) == (1, 2) and tier in (0, 1) and workspace and workspace_bytes > 0
            getattr(Call(self.tp, DTYPES[type_code], *arguments[:9]), name)(*arguments[9:])

        return run


class Call:
    def __init__(self, tp: TPGroup, dtype: torch.dtype, tokens, each, batch, k, n, x, *layout):
        self.tp, self.dtype, self.tokens, self.each, self.batch, self.k, self.n = tp, dtype, tokens, each, batch, k, n
        self.x, self.layout = x, layout
        start, stop = shard_range(tokens, tp.size, tp.rank)
        self.total, self.own = tokens * each * batch, (stop - start) * each * batch

    def at(
        self, address: int, rows: int, columns: int, leading: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The memory of a matrix."""
        dtype = dtype or self.dtype
        leading = columns if leading is None else leading
        entries = (rows - 1) * leading + columns if rows and columns else 0
        if not entries:
            return torch.empty(rows, columns, dtype=dtype)
        assert address and leading >= columns
        memory = (ctypes.c_char * (entries * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (leading, 1))

    def read(self, *place: int | None) -> Tensor:
        return self.at(*place).float()

    def weight(self, n: int | None = None, layout: tuple[int, int, bool] | None = None) -> Tensor:
        address, leading, transposed = layout or self.layout
        n = self.n if n is None else n
        return self.read(address, self.k, n, leading).T if transposed else self.read(address, n, self.k, leading)

    def bias(self, address: int, n: int) -> Tensor | None:
        return self.read(address, 1, n)[0] if address else None

    def gathered(self, rows: Tensor) -> Tensor:
        tokens = rows.reshape(self.batch, self.own // (self.each * self.batch), self.each * rows.shape[1])
        return all_gather(tokens, 1, self.tokens, self.tp).view(self.total, rows.shape[1])

    def scattered(self, rows: Tensor) -> Tensor:
        tokens = rows.reshape(self.batch, self.tokens, self.each * rows.shape[1])
        return reduce_scatter(tokens, 1, self.tp).view(self.own, rows.shape[1])

    def wgrad(self, address: int, wants: int, dpre: Tensor, x: Tensor, transposed: bool) -> None:
        """Written (1), or added to what is there in float32 (2); laid out as the weight is."""
        if not wants:
            return
        gradient = x.T @ dpre if transposed else dpre.T @ x
        if wants == 2:
            self.at(address, *gradient.shape, dtype=torch.float32).add_(gradient)
        else:
            self.at(address, *gradient.shape).copy_(gradient)

    def multiply(self, x: Tensor, w: Tensor, epilogue: int, bias: int, pre: int) -> Tensor:
        y = F.linear(x, w, self.bias(bias, w.shape[0]))
        if pre:
            assert epilogue == calls.GELU_TANH
            self.at(pre, *y.shape).copy_(y)
        return activate(y, EPILOGUES[epilogue])

    def all_gather_matmul(self, gathered, columns) -> None:
        x = self.gathered(self.read(self.x, self.own, self.k))
        if gathered:
            self.at(gathered, self.total, self.k).copy_(x)
        for n, *layout, y, epilogue, bias, pre in columns:
            result = self.multiply(x, self.weight(n, layout), epilogue, bias, pre)
            self.at(y, self.total, n).copy_(result)

    def column_backward(self, whole, dx, wants_dx, wants_dw, columns) -> None:
        x = self.read(self.x, self.total if whole else self.own, self.k) if wants_dw else None
        x = x if whole or not wants_dw else self.gathered(x)
        parts = torch.zeros(self.total, self.k)
        for n, *layout, dpre, dw in columns:
            dpre = self.read(dpre, self.total, n)
            self.wgrad(dw, wants_dw, dpre, x, layout[2])
            if wants_dx:
                parts += dpre @ self.weight(n, layout)
        if wants_dx:
            self.at(dx, self.own, self.k).copy_(self.scattered(parts))

    def matmul_reduce_scatter(self, y, residual, bias) -> None:
        sums = self.scattered(self.read(self.x, self.total, self.k) @ self.weight().T)
        if residual:
            sums += self.read(residual, self.own, self.n)
        self.at(y, self.own, self.n).copy_(sums + self.bias(bias, self.n) if bias else sums)

    def row_backward(self, dy, dx, dw, wants_dx, wants_dw) -> None:
        dy = self.gathered(self.read(dy, self.own, self.n))
        if wants_dx:
            self.at(dx, self.total, self.k).copy_(dy @ self.weight())
        self.wgrad(dw, wants_dw, dy, self.read(self.x, self.total, self.k), self.layout[2])

    def matmul_all_reduce(self, y, bias) -> None:
        sums = all_reduce(self.read(self.x, self.total, self.k) @ self.weight().T, self.tp)
        self.at(y, self.total, self.n).copy_(sums + self.bias(bias, self.n) if bias else sums)

    def matmul_all_reduce_norm(self, bias, residual, total, y, weight, norm_bias, eps, centered) -> None:
        self.matmul_all_reduce(y, bias)
        whole = self.at(total, self.total, self.n)
        whole.copy_(self.read(residual, self.total, self.n) + self.read(y, self.total, self.n))
        kind, weight = "layernorm" if centered else "rmsnorm", self.read(weight, 1, self.n)[0]
        self.at(y, self.total, self.n).copy_(normalize(whole.float(), kind, weight, self.bias(norm_bias, self.n), eps))

    def whole_input_backward(self, dpre, dx, dw, wants_dw) -> None:
        dpre = self.read(dpre, self.total, self.n)
        self.at(dx, self.total, self.k).copy_(all_reduce(dpre @ self.weight(), self.tp))
        self.wgrad(dw, wants_dw, dpre, self.read(self.x, self.total, self.k), self.layout[2])

    def matmul_all_gather(self, y, epilogue, bias, pre) -> None:
        start, stop = shard_range(self.n, self.tp.size, self.tp.rank)
        own = self.multiply(self.read(self.x, self.total, self.k), self.weight(stop - start), epilogue, bias, pre)
        self.at(y, self.total, self.n).copy_(all_gather(own, 1, self.n, self.tp))


class Communicator:
    tiers, handle, has_peers = ("p2p", "nccl"), 1, True

    def __init__(self, tp: TPGroup):
        self.module, self.rank, self.size, self.workspaces = Module(tp), tp.rank, tp.size, {}
        self.process_group = tp.process_group

    def reserve(self, slot_bytes: int, operation: str) -> None:
        assert slot_bytes >= 0

    def connect_nccl(self, operation: str) -> None:
        pass

    def check_alive(self) -> None:
        pass

    def set_deterministic(self, wanted: bool) -> None:
        pass


@contextmanager
def stand_in() -> Iterator[None]:
    """Operations on CPU tensors find the stand-in, and have its tiers."""
    made = {}

    def place_of(group, device, capturing, operation):
        mine = made.setdefault(group.process_group, Communicator(group))
        place = choice._places[group.process_group, device] = choice._Place(mine, Communicator.tiers, "stand-in")
        return place

    def lap(run: partial, calls: int, device: torch.device) -> float:
        run()
        return 2e-6 if run.args == (None,) else 1e-6  # the plain path takes longer

    with pytest.MonkeyPatch.context() as patch:
        for table in ("_known", "_measured", "_listed", "_places"):
            patch.setattr(choice, table, {})
        patch.setattr(choice, "_is_on_gpu", lambda x: True)
        patch.setattr(choice, "_is_capturing", lambda: False)
        patch.setattr(choice, "_place_of", place_of)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 2, raising=False)
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
        patch.setattr(calls, "WORKSPACE", dict.fromkeys(calls.WORKSPACE, 4096))
        patch.setattr(calls, "KEPT_WORKSPACE", 16384)
        patch.setattr(measure, "_lap", lap)
        patch.setattr(saved, "load", dict)
        patch.setattr(saved, "save", lambda place, case, us: None)
        yield
