"""The vocabulary-parallel cross entropy against F.cross_entropy."""

import pytest
import torch
import torch.nn.functional as F

from tests.compare import Block, assert_close, assert_within_rule, collectives_made, refuses, results
from tpfused import vocab_parallel_cross_entropy
from tpfused.group import resolve_group

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


def loss_case(block, logits, target, **options):
    """Value and gradient of every rank, for a gradient of the loss that is not 1."""
    vocabulary = logits.shape[-1]
    reduction = options.get("reduction", "mean")
    grad = block.randn(*(target.shape if reduction == "none" else ()))
    expected = results(lambda logits: dense_loss(logits, target, **options), {"logits": logits.double()}, grad)

    shard = block.own(logits, -1).detach().requires_grad_()  # a view with the whole's strides
    before = shard.detach().clone()
    loss = vocab_parallel_cross_entropy(shard, target, vocab_size=vocabulary, group=block.group, **options)
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
        assert_within_rule(dlogits, *wholes, lambda whole: block.own(whole, -1), f"gradient of {what}")


def check_dense(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for vocabulary in VOCABULARIES:
        for shape in ((6,), (2, 3)):
            logits, target = draw(block, vocabulary, shape)
            for reduction in ("mean", "sum", "none"):
                loss_case(block, logits, target, reduction=reduction)
    for options in (
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0},
        {"z_loss": 0.01},
        {"label_smoothing": 0.2, "z_loss": 0.1},
    ):
        for reduction in ("mean", "sum", "none"):
            loss_case(block, *draw(block, 13, (2, 4)), reduction=reduction, **options)
            loss_case(block, *draw(block, 2, (5,)), reduction=reduction, **options)  # empty shards
    for ignore_index in (3, 12, 0, -1):
        loss_case(
            block, *draw(block, 13, (2, 4), ignore_index=ignore_index), ignore_index=ignore_index, label_smoothing=0.1
        )
    strided = draw(block, 13, (4, 6))
    loss_case(block, strided[0].transpose(0, 1), strided[1].transpose(0, 1))
    loss_case(block, *draw(block, 13, (4,), scale=1e4))  # exponentials far beyond the range of floats
    loss_case(block, *draw(block, 13, (0,)), reduction="sum")


def check_dtypes(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}):
            loss_case(block, *draw(block, 300, (2, 8), dtype=dtype), **options)
        loss_case(block, *draw(block, 300, (16,), dtype=dtype), reduction="none")


def check_edges(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    logits, target = draw(block, 13, (6,))

    def loss(logits, target, **options):
        return vocab_parallel_cross_entropy(block.own(logits, -1), target, vocab_size=13, group=block.group, **options)

    ignored = torch.full_like(target, -100)
    assert loss(logits, ignored).isnan() and F.cross_entropy(logits, ignored).isnan()
    assert loss(logits, ignored, reduction="sum") == 0
    assert (loss(logits, ignored, reduction="none", label_smoothing=0.1, z_loss=0.1) == 0).all()

    masked = logits.clone()  # a model may forbid some ids
    masked[:, 3:6] = -torch.inf
    target.fill_(1)
    shard = block.own(masked, -1).detach().requires_grad_()
    value = vocab_parallel_cross_entropy(shard, target, vocab_size=13, group=block.group)
    expected = results(lambda logits: F.cross_entropy(logits, target), {"logits": masked}, torch.ones_like(value))
    assert_close(value.detach(), expected["out"])
    assert_close(torch.autograd.grad(value, shard)[0], block.own(expected["logits"], -1))

    # Without vocab_size all shards are as wide as the own one; a TPGroup does for a process group.
    even, target = draw(block, 4 * tp, (6,))
    value = vocab_parallel_cross_entropy(block.own(even, -1), target, group=resolve_group(**block.place))
    assert_close(value, F.cross_entropy(even, target))


def check_counts(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    logits, target = draw(block, 16, (6,))
    shard = block.own(logits, -1).detach().requires_grad_()
    with collectives_made() as names:
        loss = vocab_parallel_cross_entropy(shard, target, group=block.group, label_smoothing=0.1, z_loss=0.1)
        assert set(names) == ({"all_reduce"} if tp > 1 else set()) and len(names) <= 2
        names.clear()
        loss.backward()
        assert not names


def check_refusals(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    width = 4
    logits = block.randn(6, width)
    target = torch.zeros(6, dtype=torch.int64, device=ctx.device)

    def loss(logits=logits, target=target, **options):
        return vocab_parallel_cross_entropy(logits, target, group=block.group, **options)

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
    for smoothing in (-0.1, 1.5):
        with refuses(ValueError, smoothing):
            loss(label_smoothing=smoothing)
    with refuses(ValueError, "median"):
        loss(reduction="median")
    with refuses(ValueError, "later"):
        loss(check="later")
    with refuses(TypeError, "str"):
        vocab_parallel_cross_entropy(logits, target, group="tp")
    with refuses(TypeError, "list"):
        loss(target=[0] * 6)


def check_late_refusal(ctx, tp):
    """By default a GPU is not waited for: NaN for a bad label, the error at the next call. The CPU raises at once."""
    block = Block(ctx, tp, "group", 0)
    logits, target = draw(block, 8, (3,))
    bad = target.index_fill(0, torch.tensor([1], device=ctx.device), 8)

    def losses(target):
        return vocab_parallel_cross_entropy(
            block.own(logits, -1), target, vocab_size=8, group=block.group, reduction="none"
        )

    if ctx.device.type == "cpu":
        with refuses(ValueError, 8):
            losses(bad)
    else:
        assert losses(bad).isnan().tolist() == [False, True, False]
        with refuses(ValueError, 8):
            losses(target)
    assert not losses(target).isnan().any()


def test_equals_dense(workers, tp, seed):
    workers.run(check_dense, tp, seed)


def test_lower_precision_obeys_the_tolerance(workers, tp, seed):
    workers.run(check_dtypes, tp, seed)


def test_ignored_and_forbidden_tokens_and_equal_shards(workers, tp, seed):
    workers.run(check_edges, tp, seed)


def test_makes_no_collective_backward(workers, tp, seed):
    workers.run(check_counts, tp, seed)


def test_bad_input_is_refused_before_any_collective(workers, tp):
    workers.run(check_refusals, tp)


def test_bad_labels_without_a_synchronisation(workers, tp):
    workers.run(check_late_refusal, tp)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_process_is_its_dense_self(seed, reduction):
    torch.manual_seed(seed)
    logits, target = torch.randn(4, 9), torch.randint(9, (4,))
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(logits, target, reduction=reduction),
        F.cross_entropy(logits, target, reduction=reduction),
    )
