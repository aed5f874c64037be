"""Token ids and labels outside the vocabulary, in compiled code and in CUDA graphs."""

import pytest
import torch

from tests.compare import Block, refuses
from tests.conftest import gpu_world
from tests.distributed import Workers
from tests.layers.test_compiled import compiled
from tpfused import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tpfused.placement import local

ranks = pytest.mark.parametrize("tp", [1, 2], indirect=True)
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def workers(request):
    """Two at most, for compiling takes long."""
    world = 2 if request.param == "cpu" else min(2, gpu_world())
    if world == 0:
        pytest.skip("there is no GPU")
    with Workers(request.param, world) as pool:
        yield pool


def check_ids(ctx, tp, mode, backend):
    block = Block(ctx, tp, mode, 0)
    good, bad = (torch.tensor(ids, device=ctx.device) for ids in ([3, 9, 0], [3, 10, -1]))
    for check in ("async", "sync", "off"):
        layer = VocabParallelEmbedding(10, 4, check=check, device=ctx.device, **block.place)
        function = compiled(layer, backend)
        expected = layer(good).detach()
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                assert torch.equal(function(good).detach(), expected)
                if check == "sync" or (check == "async" and ctx.device.type == "cpu"):
                    with refuses(ValueError, "token ids", "-1 (the smallest) and 10 (the largest)"):
                        function(bad)
                else:
                    out = function(bad).detach()
                    assert torch.equal(out[0], expected[0])
                    assert (out[1:].isnan() if check == "async" else out[1:] == 0).all()
                out = function(good)
        function(good.new_empty(0))
        assert torch.equal(out, expected)
        layer.zero_grad()
        function(good).sum().backward()
        rows = torch.zeros(10, 4, device=ctx.device)
        rows[good] = 1
        assert torch.equal(local(layer.weight.grad), block.own(rows, 0))


@backends
@pytest.mark.parametrize("mode", ["group", "mesh"])
@ranks
def test_ids(workers, tp, mode, backend):
    workers.run(check_ids, tp, mode, backend, timeout=240)


def check_labels(ctx, tp, backend):
    """What is told at once, all ranks are told, though one alone has such a label."""
    block = Block(ctx, tp, "group", 0)
    torch.manual_seed(block.seed)
    whole = torch.randn(4, 13, device=ctx.device)
    good = torch.tensor([12, 0, -100, 5], device=ctx.device)
    one_bad = good.clone()
    if block.rank == tp - 1:
        one_bad[3] = 13
    for check in ("async", "sync", "off"):
        logits = block.own(whole, -1).clone().requires_grad_()

        def loss(target, logits=logits, check=check):
            # Twice as large, so that there is something before the loss.
            options = {"vocab_size": 13, "group": block.group, "reduction": "none"}
            return vocab_parallel_cross_entropy(logits * 2, target, check=check, **options)

        function = compiled(loss, backend)
        torch.testing.assert_close(function(good), loss(good))
        if check == "sync" or (check == "async" and ctx.device.type == "cpu"):
            with refuses(ValueError, "labels", "13 (the largest)", *([f"{tp} ranks"] if tp > 1 else [])):
                function(one_bad)
        else:
            all_bad = good.index_fill(0, torch.tensor([3], device=ctx.device), 13)
            assert function(all_bad).isnan().tolist() == [False, False, False, True]
        grads = [torch.autograd.grad(each(good).sum(), logits)[0] for each in (function, loss)]
        torch.testing.assert_close(*grads)


@backends
@ranks
def test_labels(workers, tp, backend):
    workers.run(check_labels, tp, backend, timeout=240)


def check_capture(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    good, bad = (torch.tensor(ids, device=ctx.device) for ids in ([3, 9, 0], [3, 10, -1]))
    for check in ("async", "sync", "off"):
        layer = VocabParallelEmbedding(10, 4, check=check, device=ctx.device, **block.place)
        ids, graph = good.clone(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            layer(ids)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = layer(ids)
        ids.copy_(bad)
        graph.replay()
        assert not out[0].isnan().any()
        assert (out[1:] == 0 if check == "off" else out[1:].isnan()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
@ranks
def test_capture(workers, tp):
    workers.run(check_capture, tp)
