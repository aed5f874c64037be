"""The functions of tpfused.compat.megatron: cross entropy and the mappings, with their gradients."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.compare import Block, collectives_made, compare, refuses, strided
from tpfused.checks import AssertedError
from tpfused.compat import megatron

TOKENS, BATCH = 8, 2


def check_loss(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    vocabulary, smoothing = 12, 0.2
    logits, grad = block.randn(TOKENS, BATCH, vocabulary), block.randn(TOKENS, BATCH)
    target = torch.randint(vocabulary, (TOKENS, BATCH), device=block.device)
    for amount in (0.0, smoothing, (vocabulary - 1) / vocabulary):
        # What is not the label's own shares `amount` equally.
        wanted = torch.full_like(logits, amount / (vocabulary - 1)).scatter(-1, target[..., None], 1 - amount)
        wanted[0] = 0  # without a label
        labels = target.clone()
        labels[0] = torch.tensor([-1, -100], device=block.device)
        mine = block.own(logits, -1).clone().requires_grad_()
        loss = megatron.vocab_parallel_cross_entropy(mine, labels, amount, tp_group=block.group)
        loss.backward(grad)
        compare(
            {"out": loss.detach(), "x": mine.grad},
            lambda x, wanted=wanted: -(wanted * x.log_softmax(-1)).sum(-1),
            {"x": logits},
            grad,
            lambda name, tensor: block.own(tensor, -1 if name == "x" else None),
            f"smoothing {amount}",
        )
    plain = megatron.vocab_parallel_cross_entropy(mine, labels, tp_group=block.group)
    for odd in ("x", None, mine):
        with refuses(TypeError, "label_smoothing", repr(odd)):
            megatron.vocab_parallel_cross_entropy(mine, labels, odd, tp_group=block.group)
    with refuses(AssertedError, 1.0):
        megatron.vocab_parallel_cross_entropy(mine, labels, 1.0, tp_group=block.group)
    with refuses(AssertedError, 0.93, vocabulary, 0.916667):
        megatron.vocab_parallel_cross_entropy(mine, labels, 0.93, tp_group=block.group)
    for dtype in (torch.int32, torch.int16, torch.int8):
        assert torch.equal(megatron.vocab_parallel_cross_entropy(mine, labels.to(dtype), tp_group=block.group), plain)
    for odd in (labels.double(), labels > 0):
        with refuses(TypeError, odd.dtype):
            megatron.vocab_parallel_cross_entropy(mine, odd, tp_group=block.group)
    for smoothing in (0.0, 0.1):
        with refuses(TypeError, "list"):
            megatron.vocab_parallel_cross_entropy(mine, labels.tolist(), smoothing, tp_group=block.group)
        with refuses(TypeError, "list"):
            megatron.vocab_parallel_cross_entropy(mine.tolist(), labels, smoothing, tp_group=block.group)
    if block.device.type == "cpu":
        with refuses(ValueError, vocabulary):
            megatron.vocab_parallel_cross_entropy(mine, labels.fill_(vocabulary), tp_group=block.group)


def test_loss_of_each_token(workers, tp, seed):
    workers.run(check_loss, tp, seed)


def check_mappings(ctx, tp, seed):
    """Each against its sum, slice or concatenation of all ranks' inputs; its gradient likewise."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)

    def own(whole, dim):
        return block.own(whole, dim)

    def join(parts, dim):
        return torch.cat(list(parts), dim)

    rank = block.rank
    table = {
        # name: (x, g) of all ranks -> this rank's output, this rank's gradient
        "copy_to_tensor_model_parallel_region": lambda x, g: (x[rank], g.sum(0)),
        "reduce_from_tensor_model_parallel_region": lambda x, g: (x.sum(0), g[rank]),
        "scatter_to_tensor_model_parallel_region": lambda x, g: (own(x[rank], -1), join(g, -1)),
        "gather_from_tensor_model_parallel_region": lambda x, g: (join(x, -1), own(g[rank], -1)),
        "scatter_to_sequence_parallel_region": lambda x, g: (own(x[rank], 0), join(g, 0)),
        "gather_from_sequence_parallel_region": lambda x, g: (join(x, 0), own(g.sum(0), 0)),
        "reduce_scatter_to_sequence_parallel_region": lambda x, g: (own(x.sum(0), 0), join(g, 0)),
        "all_gather_last_dim_from_tensor_parallel_region": lambda x, g: (join(x, -1), own(g.sum(0), -1)),
        "reduce_scatter_last_dim_to_tensor_parallel_region": lambda x, g: (own(x.sum(0), -1), join(g, -1)),
    }
    cases = [(name, {}, expected) for name, expected in table.items()]
    cases.append(
        (
            "gather_from_sequence_parallel_region",
            {"tensor_parallel_output_grad": False},
            lambda x, g: (join(x, 0), own(g[rank], 0)),
        )
    )
    for name, options, expected in cases:
        function = getattr(megatron, name)
        x = block.randn(tp, 4, 3, 8)
        mine = strided(x[rank]).detach().requires_grad_()
        out = function(mine, group=block.group, **options)
        g = block.randn(tp, *out.shape)
        out.backward(strided(g[rank]))
        for actual, wanted in zip((out, mine.grad), expected(x, g), strict=True):
            torch.testing.assert_close(actual, wanted, msg=lambda message, name=name: f"{name}: {message}")


def test_mappings_and_their_gradients(workers, tp, seed):
    workers.run(check_mappings, tp, seed)


def check_default_group(ctx):
    with collectives_made() as names:
        out = megatron.reduce_from_tensor_model_parallel_region(torch.ones(2, device=ctx.device))
    assert out.tolist() == [ctx.world] * 2 and names == (["all_reduce"] if ctx.world > 1 else [])


def test_the_default_group_where_nothing_else_is_said(workers):
    workers.run(check_default_group)


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="tpfused.compat.megatron.* 'no_such_name'"):
        _ = megatron.no_such_name
    assert not hasattr(megatron, "__no_such_name__")


def test_submodules_need_no_import_of_their_own():
    code = (
        "from tpfused.compat import megatron\n"
        "names = 'cross_entropy', 'data', 'layers', 'mappings', 'random', 'utils'\n"
        "print(*(getattr(megatron, name).__name__ for name in names))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.count("tpfused.compat.megatron.") == 6


@pytest.fixture
def installed(monkeypatch):
    """-> a function that puts modules of megatron-core, by their names, where imports find them."""

    def install(*names):
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "megatron", None)  # as if it could not be found
        for name in names:
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)

    return install


def test_names_that_are_not_here_say_what_is_missing(installed):
    installed()
    with pytest.raises(AttributeError, match="megatron.random has no 'no_such_name'.*pip install megatron-core"):
        _ = megatron.random.no_such_name
    installed("megatron")  # a namespace that other packages share
    with pytest.raises(AttributeError, match="pip install megatron-core"):
        _ = megatron.no_such_name
    installed("megatron", "megatron.core")
    with pytest.raises(AttributeError, match="cannot be imported: .*megatron.core.tensor_parallel"):
        _ = megatron.no_such_name
    installed("megatron", "megatron.core", "megatron.core.tensor_parallel")
    with pytest.raises(AttributeError, match="the installed megatron.core.tensor_parallel has 'no_such_name'"):
        _ = megatron.no_such_name
    sys.modules["megatron.core.tensor_parallel"].a_name = 3
    assert megatron.a_name == 3
