"""One new token and a cache: attention in a decoding step."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tpfused.bench.case import Case, Setting, Variant, Work, copy_floor

SUMMARY = "a decoding step's attention to a full cache, which its token joins; floor: a copy of as many bytes"
VARIANTS = ("ours", "eager", "repeated")


def case(batch: int, slots: int, heads: int, kv_heads: int, quick: bool = False, head_dim: int = 128) -> Case:
    sizes = {"batch": batch, "slots": slots, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    name = f"batch {batch}, {slots} slots {heads}/{kv_heads}x{head_dim}"
    return Case("decode", name, "fwd", VARIANTS, partial(build, **sizes), quick)


def build(setting: Setting, batch: int, slots: int, heads: int, kv_heads: int, head_dim: int) -> Work:
    from tpfused.kernels.decode import decode_attention

    q = setting.random(batch, heads, 1, head_dim)
    k, v = (setting.random(batch, kv_heads, 1, head_dim) for _ in range(2))
    keys, values = (setting.random(batch, kv_heads, slots, head_dim) for _ in range(2))
    slot = torch.tensor([slots - 1], device=setting.device)

    # A model makes it once for all layers.
    mask = torch.zeros(1, 1, 1, slots, dtype=setting.dtype, device=setting.device)

    def eager(compute: Tensor, repeated: bool) -> Tensor:
        """torch's: the cache written, a mask over its slots, the heads that share a key and a value as so many tokens,
        or these repeated."""
        dtype, repeats = compute.dtype, heads // kv_heads
        for kept, new in ((keys, k), (values, v)):
            kept.index_copy_(2, slot, new)
        seen = [x.to(dtype) for x in (keys, values)]
        if repeated:
            seen = [x.repeat_interleave(repeats, 1) for x in seen]
            return F.scaled_dot_product_attention(compute, *seen, attn_mask=mask.to(dtype))
        rows = compute.reshape(batch, kv_heads, repeats, head_dim)
        return F.scaled_dot_product_attention(rows, *seen, attn_mask=mask.to(dtype)).reshape(compute.shape)

    variants = {
        "ours": Variant(lambda: decode_attention(q, k, v, keys, values, slot, slots)),
        "eager": Variant(partial(eager, q, repeated=False)),
        "repeated": Variant(partial(eager, q, repeated=True), note="keys and values repeated for each head"),
    }
    moved = (keys.numel() + values.numel()) * keys.element_size()
    return Work(variants, lambda: [eager(q.double(), repeated=False)], copy_floor(moved, setting.device), moved)


CASES = [
    case(batch, slots, heads, kv_heads, quick=(batch, slots, kv_heads) == (1, 2048, 4))
    for heads, kv_heads in ((32, 8), (16, 4), (8, 2))
    for batch, slots in ((1, 2048), (1, 8192), (1, 131072), (16, 2048), (64, 8192))
]
