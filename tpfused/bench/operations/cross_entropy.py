"""Cross entropy of one rank that holds the whole vocabulary: the kernels without their collective."""

from functools import partial

import torch
from torch.nn import functional as F

from tpfused.bench.case import Case, Setting, Variant, Work, call_of, copy_floor, exact_of, optional, variants_of

SUMMARY = "mean cross entropy and its gradient; floor: a copy of 6 bytes a logit (2 + 4 in half precision)"
VARIANTS = ("ours", "eager", "compile", "liger")
IGNORE = -100


def case(tokens: int, vocab: int, quick: bool = False) -> Case:
    return Case(
        "cross_entropy", f"{tokens}x{vocab}", "fwd+bwd", VARIANTS, partial(build, tokens=tokens, vocab=vocab), quick
    )


def build(setting: Setting, tokens: int, vocab: int) -> Work:
    from tpfused.kernels import cross_entropy

    logits = setting.random(tokens, vocab)
    target = torch.randint(vocab, (tokens,), device=setting.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    one = torch.ones((), dtype=wide, device=setting.device)
    each = (one / tokens).expand(tokens)  # the mean's gradient

    def eager(x):
        return F.cross_entropy(x.to(torch.promote_types(x.dtype, torch.float32)), target)

    def ours():
        stats = cross_entropy.statistics(logits, target, 0, False)
        loss, log_z = cross_entropy.loss(stats, target, vocab, IGNORE, 0.0, 0.0)
        return loss.mean(), cross_entropy.backward(logits, target, log_z, each, 0, vocab, IGNORE, 0.0, 0.0)

    variants = {"ours": Variant(ours)}
    variants |= variants_of("fwd+bwd", {"eager": eager, "compile": setting.compile(eager)}, [logits], one)
    liger = optional("liger_kernel.transformers.functional", "liger_cross_entropy")
    if liger is not None:
        # It writes the gradient over the logits: a copy of its own, which is random at the first call only.
        variants["liger"] = Variant(
            call_of("fwd+bwd", lambda x: liger(x, target), [logits.clone()], one), note="overwrites its input"
        )
    moved = 3 * logits.numel() * logits.element_size()
    exact = exact_of("fwd+bwd", eager, [logits], one)
    return Work(variants, exact, copy_floor(moved, setting.device), moved)


CASES = [case(8192, 32064, quick=True)]
