"""The cases: each operation by each tier, and each layer, for a dtype and a degree of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Container
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpfused
from tpfused.checking.rule import Results, Verdict, judge
from tpfused.collectives import own_slice
from tpfused.group import TPGroup
from tpfused.layers.softmax import AttnMaskType, FusedScaleMaskSoftmax
from tpfused.overlap.tiers import tier
from tpfused.placement import local, own_part, splits
from tpfused.reference import activate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# Tokens, features in and out, activation. The small ones' rows travel in one kernel each where peers reach each other;
# with the large one copy engines bring them beside the matmul, in several blocks, and two ranks split a reduce-scatter.
SIZES = ((512, 256, 384, "gelu_tanh"), (129, 264, 66, "gelu"), (1, 64, 3, None), (8191, 1024, 4608, "gelu_tanh"))
LARGE = SIZES[-1]  # on GPUs alone

# The dimensions along which x, weight, bias and the result are split over the ranks; None: each has all of it.
OPERATIONS = {
    "all_gather_matmul": (0, 0, 0, 1),
    "matmul_reduce_scatter": (1, 1, None, 0),
    "matmul_all_reduce": (1, 1, None, None),
    "column_matmul": (None, 0, 0, 1),
    "matmul_all_gather": (None, 0, 0, None),
}

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY, BATCH, TOKENS = 128, 320, 8, 2, 1003, 2, 48
MANY_TOKENS = 1024  # which attention kernels go through in several blocks
# The tokens of a decoding model's calls: a prompt, more of it, and single ones; fewer than the cache has room for.
CALLS, PADDING = (30, 7, 1, 1, 1, 1), 5
SPREAD = 0.5  # of what is added to parameters: those that start at 0 or 1 hide mistakes
SHARPER = 3  # attention's weights: as they are drawn, it is so weak that 16 bits would not tell whether it is there


@dataclass(frozen=True)
class Layer:
    """How to build one, and how its input and output are split: by the token dimension 0, or not at all."""

    build: Callable[..., nn.Module]
    features: int = HIDDEN  # of its input
    tokens: int = TOKENS
    splits_tokens: bool = False
    scatters: bool = False  # its output is split by the token dimension
    ids: bool = False  # its input is token ids
    batch_first: bool = False
    in_shard: bool = False  # its input is this rank's features
    out_shard: bool = False
    has_heads: bool = False  # which have to divide by the ranks
    decodes: bool = False  # called with a cache, without gradients


class _Loss(nn.Module):
    def __init__(self, *, group, device, dtype):
        super().__init__()
        self.group = group
        self.register_buffer("labels", torch.randint(VOCABULARY, (TOKENS, BATCH), device=device), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        options = {"vocab_size": VOCABULARY, "label_smoothing": 0.1, "z_loss": 0.1, "reduction": "none"}
        return tpfused.vocab_parallel_cross_entropy(logits, self.labels, group=self.group, **options)


class _Softmax(FusedScaleMaskSoftmax):
    """Of one head's scores ``[queries, batch, keys]``: a kernel that no layer of this package runs."""

    def __init__(self, *, group, device, dtype):
        super().__init__(False, False, AttnMaskType.causal, True, None, True, scale=0.5)

    def forward(self, scores: Tensor) -> Tensor:
        return super().forward(scores.transpose(0, 1)[:, None], None)[:, 0].transpose(0, 1)


# With positions, for without them the keys' bias has no gradient but roundings.
_attention = partial(tpfused.ParallelAttention, HIDDEN, HEADS, KV_HEADS, causal=True, rope_theta=1e4)


@torch.no_grad()
def _sharp_attention(**options) -> nn.Module:
    attention = _attention(**options)
    for param in attention.parameters():
        local(param).mul_(SHARPER)
    return attention


def _transformer(kind: type[nn.Module], style: Callable[..., tpfused.TransformerConfig], **place) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": HEADS, "ffn_size": FFN, "max_positions": TOKENS}
    return kind(style(vocab_size=VOCABULARY, **sizes), **place)


_gpt = partial(_transformer, style=tpfused.TransformerConfig.gpt)
_llama = partial(
    _transformer, style=partial(tpfused.TransformerConfig.llama, num_kv_heads=KV_HEADS, sequence_parallel=True)
)

ARGMAX = "vocab_parallel_argmax"
LAYERS = {
    "ColumnParallelLinear": Layer(
        partial(tpfused.ColumnParallelLinear, HIDDEN, FFN, activation="gelu"), out_shard=True
    ),
    "ColumnParallelLinear gather_output": Layer(partial(tpfused.ColumnParallelLinear, HIDDEN, FFN, gather_output=True)),
    "RowParallelLinear": Layer(partial(tpfused.RowParallelLinear, HIDDEN, FFN), in_shard=True),
    "VocabParallelEmbedding": Layer(partial(tpfused.VocabParallelEmbedding, VOCABULARY, HIDDEN), ids=True),
    "VocabParallelEmbedding sequence_parallel": Layer(
        partial(tpfused.VocabParallelEmbedding, VOCABULARY, HIDDEN, sequence_parallel=True), ids=True, scatters=True
    ),
    "ParallelMLP": Layer(partial(tpfused.ParallelMLP, HIDDEN, FFN)),
    "ParallelMLP sequence_parallel": Layer(
        partial(tpfused.ParallelMLP, HIDDEN, FFN, sequence_parallel=True), splits_tokens=True
    ),
    "ParallelGatedMLP": Layer(partial(tpfused.ParallelGatedMLP, HIDDEN, FFN)),
    "ParallelGatedMLP sequence_parallel": Layer(
        partial(tpfused.ParallelGatedMLP, HIDDEN, FFN, sequence_parallel=True), splits_tokens=True
    ),
    "ParallelAttention": Layer(_attention, has_heads=True),
    "ParallelAttention sequence_parallel": Layer(
        partial(_attention, sequence_parallel=True),
        splits_tokens=True,
        has_heads=True,
    ),
    "ParallelAttention of many tokens": Layer(_sharp_attention, tokens=MANY_TOKENS, has_heads=True),
    "vocab_parallel_cross_entropy": Layer(_Loss, features=VOCABULARY, in_shard=True),
    "FusedScaleMaskSoftmax": Layer(_Softmax, features=TOKENS),
    "ParallelTransformerBlock": Layer(partial(_gpt, tpfused.ParallelTransformerBlock), has_heads=True),
    "ParallelTransformerBlock Llama, sequence_parallel": Layer(
        partial(_llama, tpfused.ParallelTransformerBlock), splits_tokens=True, has_heads=True
    ),
    "ParallelTransformer": Layer(
        partial(_gpt, tpfused.ParallelTransformer), ids=True, batch_first=True, out_shard=True, has_heads=True
    ),
    "ParallelTransformer Llama, sequence_parallel": Layer(
        partial(_llama, tpfused.ParallelTransformer), ids=True, batch_first=True, out_shard=True, has_heads=True
    ),
    "ParallelTransformer decoding": Layer(partial(_gpt, tpfused.ParallelTransformer), has_heads=True, decodes=True),
    "ParallelTransformer decoding Llama, sequence_parallel": Layer(
        partial(_llama, tpfused.ParallelTransformer), has_heads=True, decodes=True
    ),
}


@dataclass(frozen=True)
class Case:
    kind: str  # of KINDS
    name: str
    tp: int
    dtype: str
    tier: str = "first"  # what these GPUs have, though another were faster; a layer's operations also by "sequential"
    size: int = 0  # of SIZES

    @property
    def label(self) -> str:
        by = f" by {self.tier}" if self.tier != "first" else ""
        sizes = "x".join(map(str, SIZES[self.size][:3])) if self.kind == "operation" else ""
        return " ".join(f"{self.name}{by} {self.dtype} {sizes} tp{self.tp}".split())


def cases(degrees: tuple[int, ...], tiers: tuple[str, ...], on_gpu: bool) -> list[Case]:
    """All of them; on a CPU in float64, by the plain path."""
    dtypes = ("bf16", "fp16", "fp32") if on_gpu else ("fp64",)
    found = [
        Case("operation", name, tp, dtype, by, size)
        for tp in degrees
        if tp > 1
        for name in OPERATIONS
        for by in tiers
        for dtype in dtypes
        for size, sizes in enumerate(SIZES)
        if on_gpu or sizes is not LARGE
    ]
    found += [
        Case("layer", name, tp, dtype, by)
        for tp in degrees
        for name, layer in LAYERS.items()
        # The kernels without the overlap, as where that was measured to be the best; an operation alone has none.
        for by in ("first", "sequential")[: 2 if on_gpu and tp > 1 else 1]
        for dtype in dtypes
        if not (layer.has_heads and HEADS % tp)
        if on_gpu or layer.tokens < MANY_TOKENS
    ]
    return found + [Case("argmax", ARGMAX, tp, dtype) for tp in degrees for dtype in dtypes]


def run(case: Case, group: TPGroup, device: torch.device) -> Verdict:
    """This rank's verdict. All ranks of the group draw the same random numbers first."""
    with tier(case.tier):
        return KINDS[case.kind](case, group, device, DTYPES[case.dtype])


def _own(dim: int | None, whole: Tensor, group: TPGroup) -> Tensor:
    return whole if dim is None else own_slice(whole, dim, group)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _operation(case: Case, group: TPGroup, device: torch.device, dtype: torch.dtype) -> Verdict:
    tokens, k, n, activation = SIZES[case.size]
    by_inputs = OPERATIONS[case.name][1] == 1
    activation = None if by_inputs else activation
    draw = partial(torch.randn, device=device, dtype=dtype)
    whole = {"x": draw(tokens, k), "weight": draw(n, k) * k**-0.5, "bias": draw(n)}
    grad = draw(tokens, n)
    dims = dict(zip((*whole, "result"), OPERATIONS[case.name], strict=True))

    def dense(to: torch.dtype) -> Results:
        leaves = {name: _leaf(x.to(to)) for name, x in whole.items()}
        result = activate(F.linear(*leaves.values()), activation)
        return _with_gradients(result, leaves, grad.to(to))

    mine = {name: _leaf(_own(dims[name], x, group)) for name, x in whole.items()}
    options = {"in_features": k} if by_inputs else {"out_features": n, "activation": activation}
    if case.name == "all_gather_matmul":
        options["total_len"] = tokens
    result = getattr(tpfused, case.name)(*mine.values(), group=group, **options)
    actual = _with_gradients(result, mine, _own(dims["result"], grad, group))
    if case.name == "matmul_reduce_scatter":
        del actual["bias"]  # of this rank's tokens alone
    # Sums over ranks, whose parts are rounded before, are chains; so are gradients, which come through the activation.
    # In float32 there is luck in one matmul too: another order of its sums is beyond the rule in 1 of 60 calls that
    # have three results. In 16 bits the last rounding is all there is.
    single = () if by_inputs or dtype == torch.float32 else ("result",)
    return judge(actual, dense(torch.float64), dense(dtype), lambda name, x: _own(dims[name], x, group), single)


def _layer(case: Case, group: TPGroup, device: torch.device, dtype: torch.dtype) -> Verdict:
    layer = LAYERS[case.name]
    if layer.decodes:
        return _decoding(case, group, device, dtype)
    module, alone = _twins(layer, group, device, dtype)
    shape = (BATCH, layer.tokens) if layer.batch_first else (layer.tokens, BATCH)
    if layer.ids:
        x = torch.randint(VOCABULARY, shape, device=device)
    else:
        x = torch.randn(*shape, layer.features, device=device, dtype=dtype)
    token_dim = 0 if layer.splits_tokens else None
    dims = {
        "x": -1 if layer.in_shard else token_dim,
        "result": -1 if layer.out_shard else 0 if layer.scatters else token_dim,
    }
    grad = None

    def results(model: nn.Module, x: Tensor, own: bool) -> Results:
        nonlocal grad
        x = _leaf(x)
        result = model(x, total_len=layer.tokens) if layer.splits_tokens else model(x)
        if grad is None:
            grad = torch.randn_like(result)
        model.zero_grad()
        result.backward((_own(dims["result"], grad, group) if own else grad).to(result.dtype))
        found = {"result": result.detach()} | ({} if layer.ids else {"x": x.grad})
        return found | {name: local(param.grad) for name, param in model.named_parameters()}

    parameters = dict(module.named_parameters())
    with tier("reference"):  # plain PyTorch: a kernel is not to be compared with itself
        exact = results(deepcopy(alone).double(), x if layer.ids else x.double(), own=False)
        eager = results(alone, x, own=False)
    exact, eager = (_named_as(parameters, alone, found) for found in (exact, eager))
    actual = results(module, _own(dims["x"], x, group), own=True)

    def part(name: str, value: Tensor) -> Tensor:
        if name in parameters:
            return own_part(value, splits(parameters[name]))
        return _own(dims[name], value, group)

    return judge(actual, exact, eager, part)


@torch.no_grad()
def _decoding(case: Case, group: TPGroup, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Logits of tokens that come in several calls, against those of the dense model, which has no cache; as they come
    in a CUDA graph too (`KVCache.fixed`), and beside a sequence whose first tokens are padding.
    """
    model, alone = (each.eval() for each in _twins(LAYERS[case.name], group, device, dtype))
    ids = torch.randint(VOCABULARY, (BATCH, sum(CALLS)), device=device)
    padding = torch.tensor([0] * (BATCH - 1) + [PADDING], device=device)

    def dense(model: nn.Module) -> Results:
        whole = model(ids)
        beside_padding = torch.cat((*whole[:-1], model(ids[-1:, PADDING:])[0]))
        return dict.fromkeys(("logits", "fixed"), whole) | dict.fromkeys(("padded", "padded, fixed"), beside_padding)

    def decoded(fixed: bool, padding: Tensor | None) -> Tensor:
        cache = tpfused.KVCache(model, BATCH, TOKENS, padding=padding)
        cache.fixed = fixed
        logits = torch.cat([model(part, cache=cache) for part in ids.split(CALLS, dim=1)], dim=1)
        return logits if padding is None else torch.cat((*logits[:-1], logits[-1, PADDING:]))

    with tier("reference"):
        exact, eager = dense(deepcopy(alone).double()), dense(alone)
    actual = {"logits": decoded(False, None), "fixed": decoded(True, None)}
    actual |= {"padded": decoded(False, padding), "padded, fixed": decoded(True, padding)}
    return judge(actual, exact, eager, lambda name, x: own_slice(x, -1, group))


def _argmax(case: Case, group: TPGroup, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Ids, which are right or not; of equal logits, of two ranks too, the lowest."""
    logits = torch.randn(TOKENS, BATCH, VOCABULARY, device=device, dtype=dtype)
    logits[0, :, [1, -1]] = 2 * logits.max()
    right = {"ids": logits.argmax(-1).double()}
    found = tpfused.vocab_parallel_argmax(_own(-1, logits, group), VOCABULARY, group)
    return judge({"ids": found.double()}, right, right, lambda name, x: x)


def _twins(layer: Layer, group: TPGroup, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The layer on the ranks of `group`, and whole on one, of the same weights: as one seed draws them, and more added
    to each."""
    seed, twins = torch.random.initial_seed(), []
    for place in (group, TPGroup(None, 0, 1)):
        torch.manual_seed(seed)
        twins.append(layer.build(group=place, device=device, dtype=dtype))
    module, alone = twins
    own = dict(module.named_parameters())
    with torch.no_grad():
        more = {}
        for name, whole in alone.named_parameters():
            more[name] = SPREAD * torch.randn_like(whole) * (1 if whole.ndim == 1 else whole.shape[-1] ** -0.5)
            whole.add_(more[name])
        for name, value in _named_as(own, alone, more).items():
            local(own[name]).add_(own_part(value, splits(own[name])))
    return module, alone


def _named_as(names: Container[str], alone: nn.Module, tensors: Results) -> Results:
    """The dense twin's, with its packed projections as several, where the ranks' are: where those are more than the
    key-value heads."""
    found = dict(tensors)
    for path, inner in alone.named_modules():
        for child, packing in getattr(inner, "packed_children", {}).items():
            prefix = f"{path}." if path else ""
            for kind in ("weight", "bias"):
                if (name := f"{prefix}{child}.{kind}") in found and name not in names:
                    parts = packing.unpack(found.pop(name))
                    found |= {f"{prefix}{part}.{kind}": x for part, x in zip(packing.names, parts, strict=True)}
    return found


def _with_gradients(result: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> Results:
    gradients = torch.autograd.grad(result, list(leaves.values()), grad)
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


KINDS = {"operation": _operation, "layer": _layer, "argmax": _argmax}
