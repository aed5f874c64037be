"""Calls that are rare: without gradients, with tangents, in a group that is gone, under torch's settings of TF32."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from tests.compare import Block
from tests.distributed import connected
from tests.overlap.test_operations import forced
from tpfused.explanation import explain
from tpfused.kernels.matmul import in_tf32
from tpfused.overlap import calls
from tpfused.overlap.all_gather_matmul import all_gather_matmul
from tpfused.overlap.matmul_all_gather import column_matmul
from tpfused.overlap.tiers import tier


def settings():
    """How torch is told to round float32 for its matmuls, or not to, and whether it does then."""
    matmul = torch.backends.cuda.matmul
    return [
        (lambda: setattr(matmul, "allow_tf32", True), True),
        (lambda: torch.set_float32_matmul_precision("highest"), False),
        (lambda: torch.set_float32_matmul_precision("high"), True),
        (lambda: setattr(matmul, "fp32_precision", "ieee"), False),
        (lambda: setattr(matmul, "fp32_precision", "tf32"), True),  # after which torch does not tell allow_tf32
    ]


def check_settings(ctx):
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.fp32_precision
    x, weight = torch.randn(4, 8, device=ctx.device), torch.randn(8, 8, device=ctx.device)
    try:
        with forced(ctx, ctx.world, "p2p"):
            for setting, rounds in settings():
                setting()
                assert in_tf32(torch.float32) == rounds and not in_tf32(torch.bfloat16)
                assert all_gather_matmul(x, weight, group=ctx.group(ctx.world)).shape == (4 * ctx.world, 8)
            assert {choice.dtype for choice in explain()} >= {"float32", "tf32"}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_every_setting_of_tf32(ranks):
    ranks.run(check_settings)


def check_without_gradients(ctx):
    """Nothing is measured where nothing travels, and the kernels are those of training."""
    block = Block(ctx, ctx.world, "group", 0)
    x, weight = torch.randn(6, 8, device=ctx.device), torch.randn(8, 8, device=ctx.device, requires_grad=True)
    with forced(ctx, ctx.world, "measured"), pytest.MonkeyPatch.context() as patch:
        backward = Mock(side_effect=calls.whole_input_backward)
        patch.setattr(calls, "whole_input_backward", backward)
        with torch.no_grad():
            inferred = column_matmul(x, weight, **block.place)
        assert not backward.called
        chosen = {choice.operation: choice for choice in explain() if "column_matmul" in choice.operation}
        assert chosen["column_matmul without gradients"].why == "not measured: nothing travels"
        assert torch.allclose(column_matmul(x, weight, **block.place), inferred, atol=1e-5)
        assert backward.called


def test_without_gradients(ranks):
    ranks.run(check_without_gradients)


def check_tangents(ctx):
    x, weight = torch.randn(6, 8, device=ctx.device), torch.randn(8, 8, device=ctx.device)
    with forced(ctx, ctx.world, "p2p"), forward_ad.dual_level():
        all_gather_matmul(x, weight, group=ctx.group(ctx.world))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            all_gather_matmul(forward_ad.make_dual(x, x), weight, group=ctx.group(ctx.world))


def check_tangents_where_nothing_travels(ctx):
    """Plain PyTorch's part of a column-parallel layer has them."""
    x, weight = torch.randn(6, 8, device=ctx.device), torch.randn(8, 8, device=ctx.device)
    with tier("reference"), forward_ad.dual_level():
        y = column_matmul(forward_ad.make_dual(x, x), weight, group=ctx.group(ctx.world))
        assert torch.allclose(forward_ad.unpack_dual(y).tangent, x @ weight.T, atol=1e-5)


def test_tangents_where_nothing_travels(ranks):
    ranks.run(check_tangents_where_nothing_travels)


def test_a_tangent_is_refused(ranks):
    ranks.run(check_tangents)


def check_backward_in_a_group_that_is_gone(ctx):
    x, weight = (torch.randn(8, 8, device=ctx.device, requires_grad=True) for _ in range(2))
    for name in ("p2p", "nccl"):
        group = connected(dist.new_group())
        with forced(ctx, ctx.world, name):
            out = all_gather_matmul(x, weight, group=group)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="all_gather_matmul: a backward pass in a process group that has been"):
            out.sum().backward()


def test_backward_in_a_group_that_is_gone(ranks):
    ranks.run(check_backward_in_a_group_that_is_gone)
