"""A packed projection into heads, with rotary positions: attention's input."""

from dataclasses import replace
from functools import partial

import torch

from tpfused import reference
from tpfused.bench.case import Case, Setting, Variant, Work, call_of, copy_floor

SUMMARY = "queries, keys and values of a packed projection, with rotary positions; floor: a copy of as many values"
THETA = 5e5
VARIANTS = ("ours", "eager", "compile")


def case(tokens: int, heads: int, kv_heads: int, direction: str, quick: bool = False, head_dim: int = 128) -> Case:
    sizes = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    work = partial(build, **sizes, direction=direction)
    return Case("rotary", f"{tokens} tokens {heads}/{kv_heads}x{head_dim}", direction, VARIANTS, work, quick)


def build(setting: Setting, tokens: int, heads: int, kv_heads: int, head_dim: int, direction: str) -> Work:
    from tpfused.kernels.rotary import rotary_qkv

    options = {"queries": heads // kv_heads, "head_dim": head_dim, "theta": THETA, "tokens_first": True}
    ours, eager = (partial(function, **options) for function in (rotary_qkv, reference.rotary_qkv))
    qkv = setting.random(tokens, 1, (heads + 2 * kv_heads) * head_dim)
    # As attention's backward leaves them: in the memory order of its inputs.
    grads = [setting.random(tokens, 1, n, head_dim).permute(1, 2, 0, 3) for n in (heads, kv_heads, kv_heads)]
    functions = {"ours": ours, "eager": eager, "compile": setting.compile(eager)}
    variants = {name: Variant(call_of(direction, function, [qkv], grads)) for name, function in functions.items()}
    if direction == "bwd":

        def operator():
            apart = (grad.permute(2, 0, 1, 3) for grad in grads)
            return torch.ops.tpfused.rotary_qkv_backward(*apart, None, THETA, True)

        variants["ours"] = replace(variants["ours"], fallback=operator)

    def exact():
        return call_of(direction, eager, [qkv.double()], [grad.double() for grad in grads])()

    moved = 2 * qkv.numel() * qkv.element_size()
    return Work(variants, exact, copy_floor(moved, setting.device), moved)


CASES = [
    case(tokens, heads, kv_heads, direction, quick=(tokens, heads) == (8192, 32))
    for tokens, heads, kv_heads in ((8192, 32, 8), (8192, 8, 2), (8192, 64, 8), (8192, 8, 8), (2048, 32, 8))
    for direction in ("fwd", "bwd")
]
