"""Masked lookup in one rank's shard of an embedding table."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tpfused.bench.case import Case, Floor, Setting, Work, copy_floor, exact_of, variants_of

SUMMARY = "masked embedding of a vocabulary shard; floor: a copy (fwd), zero-filling the gradient (bwd)"
VARIANTS = ("ours", "eager", "compile")
RANKS = 4  # the shard is the second of so many


def case(tokens: int, kind: str, direction: str, rows: int = 32064, features: int = 4096, quick: bool = False) -> Case:
    """`kind` of ids: "inside" the shard, "spread" over the whole vocabulary, "zipf" (inside, as words are spread)."""
    work = partial(build, tokens=tokens, kind=kind, direction=direction, rows=rows, features=features)
    return Case("embedding", f"{rows}x{features} {tokens} ids {kind}", direction, VARIANTS, work, quick)


def build(setting: Setting, tokens: int, kind: str, direction: str, rows: int, features: int) -> Work:
    from tpfused.kernels.embedding import embedding

    start, vocab = rows, RANKS * rows
    ids = draw(kind, tokens, rows, setting.device)
    weight, grad = setting.random(rows, features), setting.random(tokens, features)

    def ours(weight):
        return embedding(ids, weight, start, vocab)

    def eager(weight):
        outside = (ids < start) | (ids >= start + rows)
        found = F.embedding((ids - start).masked_fill(outside, 0), weight)
        return found.masked_fill(outside.unsqueeze(-1), 0)

    functions = {"ours": ours, "eager": eager, "compile": setting.compile(eager)}
    variants = variants_of(direction, functions, [weight], grad)
    owned = ids[(ids >= start) & (ids < start + rows)]
    row = features * weight.element_size()
    ids_bytes = ids.numel() * ids.element_size()
    exact = exact_of(direction, eager, [weight], grad)
    if direction == "fwd":
        # A row for each id, though the cache may keep one that is wanted again.
        moved = (owned.numel() + tokens) * row + ids_bytes
        return Work(variants, exact, copy_floor(moved, setting.device), moved)
    operator = lambda: torch.ops.tpfused.embedding_backward(grad, ids, rows, start, -1)  # noqa: E731
    variants["ours"] = replace(variants["ours"], fallback=operator)
    zeros = torch.empty_like(weight)
    moved = (owned.numel() + rows) * row + ids_bytes
    return Work(variants, exact, Floor("zero fill", zeros.zero_), moved)


def draw(kind: str, tokens: int, rows: int, device: torch.device) -> Tensor:
    if kind == "spread":
        return torch.randint(RANKS * rows, (tokens,), device=device)
    if kind == "inside":
        return torch.randint(rows, 2 * rows, (tokens,), device=device)
    # The k-th most frequent word has a frequency of about 1 / k (Zipf, 1949); frequent ones have low ids.
    shares = 1 / torch.arange(1, rows + 1, dtype=torch.float64, device=device)
    below = shares.cumsum(0)
    drawn = torch.rand(tokens, dtype=torch.float64, device=device) * below[-1]
    return rows + torch.searchsorted(below, drawn).clamp_(max=rows - 1)


CASES = [
    case(tokens, kind, direction, quick=(tokens, kind) == (8192, "spread"))
    for tokens in (8192, 65536)
    for kind in ("inside", "spread")
    for direction in ("fwd", "bwd")
] + [case(tokens, "zipf", "bwd") for tokens in (8192, 65536)]
