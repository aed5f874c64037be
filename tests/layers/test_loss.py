"""The vocabulary-parallel cross entropy against F.cross_entropy, through the kernels and on the plain path."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests import interpreter
from tests.compare import Block, assert_close, assert_within_rule, collectives_made, refuses, results, strided

interpreter.use_where_there_is_no_gpu()  # in the workers too, as they import this module

from tpfused import vocab_parallel_cross_entropy  # noqa: E402
from tpfused.group import resolve_group  # noqa: E402
from tpfused.kernels import cross_entropy as kernels  # noqa: E402

# Even, uneven, with empty shards, GPT-2's.
VOCABULARIES = [16, 13, 5, 2, 50257]


def dense_loss(logits, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).movedim(-1, 1) if logits.ndim > 1 else logits
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if not z_loss:
        return loss
    extra = z_loss * logits.logsumexp(1).square()
    extra = extra.masked_fill(target == ignore_index, 0)
    if reduction == "none":
        return loss + extra
    return loss + (extra.sum() if reduction == "sum" else extra.sum() / (target != ignore_index).sum())


def draw(block, vocabulary, shape, dtype=torch.float64, ignore_index=-100, scale=3.0):
    logits = (scale * block.randn(*shape, vocabulary)).to(dtype)
    target = torch.randint(vocabulary, shape, device=block.device)
    flat = target.view(-1)
    if flat.numel() > 2:
        flat[0], flat[1], flat[2] = 0, vocabulary - 1, ignore_index
    return logits, target


@pytest.fixture(params=[None, "reference"], ids=["kernels", "reference"])
def backend(request):
    return request.param


def loss_case(block, backend, logits, target, **options):
    """Value and gradient of every rank, for a gradient of the loss that is not 1."""
    vocabulary = logits.shape[-1]
    reduction = options.get("reduction", "mean")
    grad = block.randn(*(target.shape if reduction == "none" else ()))
    expected = results(lambda logits: dense_loss(logits, target, **options), {"logits": logits.double()}, grad)

    shard = block.own(logits, -1).detach().requires_grad_()  # a view with the whole's strides
    before = shard.detach().clone()
    loss = vocab_parallel_cross_entropy(
        shard, target, vocab_size=vocabulary, group=block.group, backend=backend, **options
    )
    what = f"vocabulary {vocabulary}, {tuple(logits.shape)}, {options}"
    assert torch.equal(shard.detach(), before), f"changed the logits of {what}"
    if logits.dtype == torch.float64:
        (dlogits,) = torch.autograd.grad(loss, shard, grad)
        assert_close(loss.detach(), expected["out"], f"loss of {what}")
        assert_close(dlogits, block.own(expected["logits"], -1), f"gradient of {what}")
    else:
        assert loss.dtype == torch.float32
        grad = grad.float()
        eager = results(lambda logits: dense_loss(logits, target, **options), {"logits": logits}, grad)
        (dlogits,) = torch.autograd.grad(loss, shard, grad)
        assert dlogits.dtype == logits.dtype
        assert_within_rule(loss.detach(), expected["out"], eager["out"], lambda whole: whole, f"loss of {what}")
        wholes = expected["logits"], eager["logits"]
        # A token's is softmax less one-hot, times the gradient of its loss: near a sure, right target the two cancel.
        # In float32 four roundings of the softmax are left then (exponent, exponential, sum, logarithm); in 16 bits
        # they vanish in the last one.
        terms = None
        if logits.dtype == torch.float32:
            terms = 4 * grad if reduction == "none" else 4 * grad / (target != -100).sum() ** (reduction == "mean")
            terms = terms[..., None]
        own = lambda whole: block.own(whole, -1)  # noqa: E731
        assert_within_rule(dlogits, *wholes, own, f"gradient of {what}", terms=terms)


def check_dense(ctx, tp, seed, backend):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    case = partial(loss_case, block, backend)
    for vocabulary in VOCABULARIES:
        for shape in ((6,), (2, 3)):
            logits, target = draw(block, vocabulary, shape)
            for reduction in ("mean", "sum", "none") if vocabulary < 1000 else ("mean",):  # which takes long here
                case(logits, target, reduction=reduction)
    for options in (
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0},
        {"z_loss": 0.01},
        {"label_smoothing": 0.2, "z_loss": 0.1},
    ):
        for reduction in ("mean", "sum", "none"):
            case(*draw(block, 13, (2, 4)), reduction=reduction, **options)
            case(*draw(block, 2, (5,)), reduction=reduction, **options)  # empty shards
    for ignore_index in (3, 12, 0, -1):
        case(*draw(block, 13, (2, 4), ignore_index=ignore_index), ignore_index=ignore_index, label_smoothing=0.1)
    logits, target = draw(block, 13, (4, 6))
    case(logits.transpose(0, 1), target.transpose(0, 1))
    case(strided(logits), target)
    for shape in ((2, 1, 3, 2), ()):
        case(*draw(block, 13, shape))
    case(*draw(block, 13, (4,), scale=1e4))  # exponentials far beyond the range of floats
    case(*draw(block, 13, (0,)), reduction="sum")


def check_dtypes(ctx, tp, seed, backend):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    case = partial(loss_case, block, backend)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}):
            case(*draw(block, 300, (2, 8), dtype=dtype), **options)
        case(*draw(block, 300, (16,), dtype=dtype), reduction="none")


def check_parts(ctx, tp, seed):
    """Few tokens and wide shards: more parts in the widest shard than the last, narrower one needs."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BLOCK", 16)
        for vocabulary in (17 * tp - 1, 33 * tp - 1, 64 * tp):
            loss_case(block, None, *draw(block, vocabulary, (5,)), label_smoothing=0.1, z_loss=0.01)


def check_edges(ctx, tp, seed, backend):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    logits, target = draw(block, 13, (6,))

    def loss(logits, target, **options):
        return vocab_parallel_cross_entropy(
            block.own(logits, -1), target, vocab_size=13, group=block.group, backend=backend, **options
        )

    ignored = torch.full_like(target, -100)
    assert loss(logits, ignored).isnan() and F.cross_entropy(logits, ignored).isnan()
    assert loss(logits, ignored, reduction="sum") == 0
    assert (loss(logits, ignored, reduction="none", label_smoothing=0.1, z_loss=0.1) == 0).all()

    masked = logits.clone()  # a model may forbid some ids
    masked[:, 3:6] = -torch.inf
    target.fill_(1)
    shard = block.own(masked, -1).detach().requires_grad_()
    value = vocab_parallel_cross_entropy(shard, target, vocab_size=13, group=block.group, backend=backend)
    expected = results(lambda logits: F.cross_entropy(logits, target), {"logits": masked}, torch.ones_like(value))
    assert_close(value.detach(), expected["out"])
    assert_close(torch.autograd.grad(value, shard)[0], block.own(expected["logits"], -1))

    # Without vocab_size all shards are as wide as the own one; a TPGroup does for a process group.
    even, target = draw(block, 4 * tp, (6,))
    value = vocab_parallel_cross_entropy(
        block.own(even, -1), target, group=resolve_group(**block.place), backend=backend
    )
    assert_close(value, F.cross_entropy(even, target))


def runs_kernels(losses):
    return "VocabParallelCrossEntropy" in losses.grad_fn.name()


def check_counts(ctx, tp, seed, backend):
    block = Block(ctx, tp, "group", seed)
    logits, target = draw(block, 16, (6,))
    shard = block.own(logits, -1).detach().requires_grad_()
    with collectives_made() as names:
        losses = vocab_parallel_cross_entropy(
            shard, target, group=block.group, label_smoothing=0.1, z_loss=0.1, reduction="none", backend=backend
        )
        fused = runs_kernels(losses)
        assert fused == (backend is None and (logits.is_cuda or not torch.cuda.is_available()))
        expected = ["all_gather"] if fused else ["all_reduce", "all_reduce"]
        assert names == (expected if tp > 1 else [])
        names.clear()
        losses.sum().backward()
        assert not names


def check_unchecked_labels(ctx, tp, seed, backend):
    """Their loss is NaN on every rank, and from the kernels their gradient too; other tokens' are not."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    logits, target = draw(block, 13, (5,))
    target[3], target[4] = 13, -1
    shard = block.own(logits, -1).detach().requires_grad_()
    losses = vocab_parallel_cross_entropy(
        shard, target, vocab_size=13, group=block.group, reduction="none", check="off", backend=backend
    )
    assert losses.isnan().tolist() == [False, False, False, True, True] and losses[2] == 0
    losses.sum().backward()
    assert shard.grad[:3].isfinite().all()
    if runs_kernels(losses):
        assert shard.grad[3:].isnan().all()


def check_known_sizes(ctx, tp, seed):
    """Of sizes that differ between ranks, all known and right for their widths, some rank can't miss it."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)

    def losses(shard, target, vocab_size):
        options = {"vocab_size": vocab_size, "reduction": "none", "check": "off", "group": block.group}
        return vocab_parallel_cross_entropy(shard, target, **options)

    size = 7 * tp
    for vocab_size in (size - 1, size):
        logits, target = draw(block, vocab_size, (5,))
        assert not losses(block.own(logits, -1), target, vocab_size).isnan().any()
    shard = block.own(logits, -1).detach().requires_grad_()
    found = losses(shard, target, size - (block.rank == 0))
    assert runs_kernels(found)
    (grad,) = torch.autograd.grad(found.sum(), shard)
    if block.rank == 0:
        ignored = target == -100
        assert torch.equal(found.isnan(), ~ignored) and torch.equal(grad.isnan().all(-1), ~ignored)
    else:
        assert_close(found, dense_loss(logits, target, reduction="none"))


def check_compiled(ctx, tp, seed, backend):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    logits, target = draw(block, 13, (2, 3))
    grad = block.randn(2, 3)

    def losses(logits):
        return vocab_parallel_cross_entropy(
            logits,
            target,
            vocab_size=13,
            label_smoothing=0.1,
            z_loss=0.01,
            reduction="none",
            group=block.group,
            backend=backend,
        )

    # What is in question is whether the loss can be traced: the graph runs as it is.
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    shard = {"logits": block.own(logits, -1)}
    expected = results(losses, shard, grad)
    for name, value in results(compiled, shard, grad).items():
        assert_close(value, expected[name], name)


def check_refusals(ctx, tp, backend):
    block = Block(ctx, tp, "group", 0)
    width = 4
    logits = block.randn(6, width)
    target = torch.zeros(6, dtype=torch.int64, device=ctx.device)

    def loss(logits=logits, target=target, **options):
        return vocab_parallel_cross_entropy(logits, target, group=block.group, **{"backend": backend} | options)

    own = [13 - 12, 13 - 7, 13][[4, 2, 1].index(tp)] if block.rank == tp - 1 else -(-13 // tp)
    wrong = block.randn(6, own + 1)
    with refuses(ValueError, own, 13, own + 1):
        loss(wrong, vocab_size=13)
    if tp > 1:
        with refuses(ValueError, tp * width, width, "gathered"):
            loss(block.randn(6, tp * width), vocab_size=tp * width)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.bool):
        with refuses(TypeError, dtype):
            loss(target=target.to(dtype))
    with refuses(TypeError, torch.int64):
        loss(logits.long())
    with refuses(ValueError, "meta", ctx.device.type):
        loss(target=target.to("meta"))
    for shape in ((5,), (6, 1), ()):
        with refuses(ValueError, (6, width), shape):
            loss(target=target.new_zeros(shape))
    for bad in (tp * width, -1, -101):
        with refuses(ValueError, bad, tp * width):
            loss(target=target.index_fill(0, torch.tensor([2], device=ctx.device), bad), check="sync")
    for error, name, values in (
        (ValueError, "vocab_size", (0, -13)),
        (TypeError, "vocab_size", (True, 13.0, "13")),
        (ValueError, "label_smoothing", (-0.1, 1.5, float("nan"))),
        (TypeError, "label_smoothing", (True, "0.1", None)),
        (ValueError, "z_loss", (-0.1, float("inf"), float("nan"))),
        (TypeError, "z_loss", (True, "0.1", None)),
        (TypeError, "ignore_index", (True, -100.0, None)),
        (ValueError, "reduction", ("median", None, 1, ["mean"])),
        (ValueError, "check", ("later", True, None)),
        (ValueError, "backend", ("triton", True)),
    ):
        for value in values:
            with refuses(error, name, value):
                loss(**{name: value})
    with refuses(TypeError, "str"):
        vocab_parallel_cross_entropy(logits, target, group="tp")
    with refuses(TypeError, "list"):
        loss(target=[0] * 6)


def check_late_refusal(ctx, tp, backend):
    """By default a GPU is not waited for: NaN for a bad label, the error at the next call. The CPU raises at once."""
    block = Block(ctx, tp, "group", 0)
    logits, target = draw(block, 8, (3,))
    bad = target.index_fill(0, torch.tensor([1], device=ctx.device), 8)

    def losses(target):
        return vocab_parallel_cross_entropy(
            block.own(logits, -1), target, vocab_size=8, group=block.group, reduction="none", backend=backend
        )

    if ctx.device.type == "cpu":
        with refuses(ValueError, 8):
            losses(bad)
    else:
        assert losses(bad).isnan().tolist() == [False, True, False]
        with refuses(ValueError, 8):
            losses(target)
    assert not losses(target).isnan().any()


def test_equals_dense(workers, tp, seed, backend):
    workers.run(check_dense, tp, seed, backend)


def test_all_ranks_give_as_many_parts(workers, tp, seed):
    workers.run(check_parts, tp, seed)


def test_lower_precision_obeys_the_tolerance(workers, tp, seed, backend):
    workers.run(check_dtypes, tp, seed, backend)


def test_ignored_and_forbidden_tokens_and_equal_shards(workers, tp, seed, backend):
    workers.run(check_edges, tp, seed, backend)


def test_makes_no_collective_backward(workers, tp, seed, backend):
    workers.run(check_counts, tp, seed, backend)


def test_bad_input_is_refused_before_any_collective(workers, tp, backend):
    workers.run(check_refusals, tp, backend)


def test_bad_labels_without_a_synchronisation(workers, tp, backend):
    workers.run(check_late_refusal, tp, backend)


def test_unchecked_labels_outside_the_vocabulary_give_nan(workers, tp, seed, backend):
    workers.run(check_unchecked_labels, tp, seed, backend)


@pytest.mark.parametrize("tp", [2, 4], indirect=True)
def test_kernels_give_nan_where_ranks_differ_in_the_size(workers, tp, seed):
    workers.run(check_known_sizes, tp, seed)


def test_compiles_into_one_graph(workers, tp, seed, backend):
    workers.run(check_compiled, tp, seed, backend)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_process_is_its_dense_self(seed, reduction, backend):
    torch.manual_seed(seed)
    logits, target = torch.randn(4, 9), torch.randint(9, (4,))
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(logits, target, reduction=reduction, backend=backend),
        F.cross_entropy(logits, target, reduction=reduction),
    )


def test_gradient_is_the_derivative(seed, backend):
    torch.manual_seed(seed)
    logits, target = torch.randn(2, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (2,))
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "backend": backend}
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, target, **options), logits)


def test_overwrites_the_logits_if_allowed(seed):
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def loss_of(logits, target, **options):
        return vocab_parallel_cross_entropy(logits, target, overwrite_logits=True, **options)

    for shape, expanded in (((6, 11), (4, 11)), ((2, 3, 11), (2, 4, 11))):
        leaf = torch.randn(shape, device=device, requires_grad=True)
        for layout in (lambda x: x * 1, strided, lambda x, to=expanded: (x.flatten(0, -2)[:1] * 1).expand(to)):
            logits = layout(leaf)
            target = torch.randint(11, logits.shape[:-1], device=device)
            (expected,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, -2), target.flatten()), logits)
            (through,) = torch.autograd.grad(layout(leaf), leaf, expected)
            before = logits.detach().clone()
            loss = loss_of(logits, target)
            (actual,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            torch.testing.assert_close(actual, through)
            # What can't be written as it lies is left as it is.
            written = logits.is_contiguous()
            torch.testing.assert_close(logits.detach(), expected if written else before)
            with pytest.raises(RuntimeError, match="overwrite_logits"):
                torch.autograd.grad(loss, leaf)

    logits = leaf * 1
    other = logits.square().sum()  # which has saved the logits
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    torch.autograd.grad(loss_of(logits, target), logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(other, leaf)
    with pytest.raises(ValueError, match="leaf"):
        loss_of(leaf, target)
