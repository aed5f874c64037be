"""The tokens of the largest logits over a split vocabulary, and decoding by them step by step."""

import torch

from tests.compare import Block, refuses
from tests.layers.cached import GPT, make
from tests.layers.test_transformer import draw_ids
from tpfused import KVCache, vocab_parallel_argmax
from tpfused.group import resolve_group


def check_argmax(ctx, tp, seed):
    """Equal logits on several ranks and on one, shards that are uneven or empty; any dimensions before them."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    for vocab_size in (3, 13, 50257):
        for shape in ((5,), (5, 1), (2, 3), (), (0,)):
            for dtype in (torch.float64, torch.bfloat16):
                logits = torch.randint(-2, 3, (*shape, vocab_size), device=ctx.device).to(dtype)
                if logits.numel():
                    logits.view(-1, vocab_size)[0] = -torch.inf
                shard = block.own(logits, -1).requires_grad_()
                for group in (block.group, resolve_group(block.group)):
                    found = vocab_parallel_argmax(shard, vocab_size, group)
                    assert torch.equal(found, logits.argmax(-1)) and found.dtype == torch.int64
    logits = torch.zeros(2, 13, device=ctx.device)
    logits[1, 4:] = 1.0  # equal on several ranks
    assert vocab_parallel_argmax(block.own(logits, -1), 13, block.group).tolist() == [0, 4]


def check_argmax_refusals(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    logits = block.own(torch.zeros(2, 13, device=ctx.device), -1)
    own = logits.shape[-1]
    for wrong in {own + 1, 13} - {own}:
        with refuses(ValueError, "vocab_parallel_argmax", 13, own, wrong):
            vocab_parallel_argmax(torch.zeros(2, wrong, device=ctx.device), 13, block.group)
    for few in (0, -13):
        with refuses(ValueError, "vocab_size", "at least 1", few):
            vocab_parallel_argmax(logits, few, block.group)
    for odd in (13.0, True, "13", None):
        with refuses(TypeError, "vocab_size", repr(odd)):
            vocab_parallel_argmax(logits, odd, block.group)
    with refuses(TypeError, torch.int64):
        vocab_parallel_argmax(logits.long(), 13, block.group)
    with refuses(TypeError, "list"):
        vocab_parallel_argmax([0.0], 13, block.group)


@torch.no_grad()
def check_steps(ctx, tp, seed):
    """Decoding step by step, as README does it, gives the tokens of `generate`."""
    block = Block(ctx, tp, "group", seed)
    model, _ = make(block, GPT)
    ids = draw_ids(block, GPT, 5)
    cache, out = KVCache(model, batch=2, max_tokens=12), [ids]
    for _ in range(6):
        logits = model(out[-1], cache=cache, last_only=True)
        out.append(vocab_parallel_argmax(logits, GPT.vocab_size, block.group))
    assert torch.equal(torch.cat(out, dim=1), model.generate(ids, 6))


def test_equals_dense_argmax(workers, tp, seed):
    workers.run(check_argmax, tp, seed)


def test_bad_input_is_refused_before_any_collective(workers, tp):
    workers.run(check_argmax_refusals, tp)


def test_steps_give_the_tokens_of_generate(workers, tp, seed):
    workers.run(check_steps, tp, seed)
