"""What only a GPU can show: captured programs, several devices, large tensors, the same bits each time."""

import gc

import pytest
import torch

from tests.kernels.operations import NAMES, cross_entropy, operations, results
from tpfused.kernels import dropout as dropout_module
from tpfused.kernels.decode import decode_attention
from tpfused.kernels.dropout import dropout
from tpfused.kernels.gated_act import gated_act
from tpfused.kernels.softmax import scale_mask_softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


DIFFERENTIABLE = [name for name in NAMES if name != "cross_entropy"]  # its Function belongs to the layer


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name):
    function, inputs = operations()[name]
    first = results(function, inputs)
    for _ in range(5):
        assert all(map(torch.equal, results(function, inputs), first))


def test_decoding_gives_the_same_bits():
    q, k, v = (torch.randn(2, heads, 1, 72, device="cuda", dtype=torch.bfloat16) for heads in (6, 3, 3))
    keys, values = torch.randn(2, 2, 3, 200, 72, device="cuda", dtype=torch.bfloat16)
    slot = torch.tensor([130], device="cuda")
    first = decode_attention(q, k, v, keys, values, slot, 200)
    assert all(torch.equal(decode_attention(q, k, v, keys, values, slot, 200), first) for _ in range(5))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_captured_graph_follows_its_inputs(name):
    function, inputs = operations()[name]
    static = [x.detach().clone().requires_grad_() for x in inputs]
    grad = torch.randn_like(function(*static))

    def step():
        return torch.autograd.grad(function(*static), static, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*static)
        captured = torch.autograd.grad(out, static, grad)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in static:
                x.copy_(torch.randn_like(x))
        graph.replay()
        again = out.clone()
        if "dropout" in name:
            graph.replay()
            assert not torch.equal(again, out)  # each replay draws anew, as torch's own dropout does
        else:
            assert torch.equal(again, function(*static))
            assert all(map(torch.equal, captured, step()))


def test_a_kernel_may_be_loaded_during_a_capture(monkeypatch):
    """Another than the calls before have run, as attention's with dropout is."""
    monkeypatch.setattr(dropout_module, "BLOCK", 256)  # no other test's kernel
    x = torch.ones(1000, device="cuda")
    seed = dropout_module.draw_seed(x.device)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout_module._forward(x, seed, 0.5)
    graph.replay()
    assert torch.equal(y, dropout_module._forward(x, seed, 0.5)) and 0.3 < (y != 0).float().mean() < 0.7


def test_large_tensors():
    """More than 2**31 elements: the last rows are right, which 32-bit offsets would not reach."""
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip("needs 30 GiB")
    rows = 2**16 + 8
    x = torch.empty(1, 1, rows, 2**15, device="cuda", dtype=torch.float16).normal_()
    y = scale_mask_softmax(x)
    torch.testing.assert_close(y[..., -3:, :], x[..., -3:, :].softmax(-1), rtol=1e-3, atol=1e-5)
    y = dropout(x, 0.5)
    assert 0.49 < (y[..., -3:, :] != 0).float().mean() < 0.51
    torch.testing.assert_close(y[..., -3:, :], 2 * x[..., -3:, :] * (y[..., -3:, :] != 0))
    logits = x.view(rows, 2**15)
    target = torch.randint(2**15, (rows,), device="cuda")
    losses, grad = cross_entropy(logits, target)
    last = torch.nn.functional.cross_entropy(logits[-3:].float(), target[-3:], reduction="none")
    torch.testing.assert_close(losses[-3:], last, rtol=1e-4, atol=1e-4)
    assert grad[-3:].float().sum(-1).abs().max() < 1e-2 and grad[-1, target[-1]] < -0.9
    del y, grad
    gated = gated_act(logits)
    gate, up = logits[-1].view(-1, 2).float().unbind(-1)
    torch.testing.assert_close(gated[-1].float(), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_device_of_its_tensors(name):
    torch.manual_seed(3)
    function, inputs = operations("cuda:0")[name]
    torch.manual_seed(3)
    elsewhere, there = operations("cuda:1")[name]
    there = [x.copy_(y) for x, y in zip(there, inputs, strict=True)]
    assert torch.cuda.current_device() == 0
    for actual, expected in zip(results(elsewhere, there), results(function, inputs), strict=True):
        assert actual.device.index == 1
        differs = "dropout" in name or name in ("softmax", "embedding", "cross_entropy")  # by its masks or ids
        if not differs:
            assert torch.equal(actual.cpu(), expected.cpu())
