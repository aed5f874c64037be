"""What `explain` tells of the layers: kernels, back ends of attention, and why it was plain PyTorch."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tpfused
from tpfused import (
    FusedScaleMaskSoftmax,
    ParallelAttention,
    ParallelGatedMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    explain,
    reference,
)
from tpfused import explanation as module
from tpfused.compat.fairscale import layers as fairscale_layers
from tpfused.group import TPGroup
from tpfused.layers import backend, sdpa, softmax
from tpfused.layers.softmax import AttnMaskType
from tpfused.overlap import choice
from tpfused.random import rank_dropout

IDS = torch.tensor([[1, 2, 3]])
SIZES = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_size": 8, "max_positions": 8}


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(module, "_told", {})
    monkeypatch.setattr(sdpa, "_told", set())


def told():
    return {row.what: row for row in explain().computations}


def test_the_plain_path_and_why():
    VocabParallelEmbedding(8, 4)(IDS)
    assert told()["embedding"].runs_by == "plain PyTorch" and told()["embedding"].why == "the tensors are on the CPU"
    RowParallelLinear(8, 4, backend="reference")(torch.ones(2, 8))
    assert told()["row-parallel linear"].why == "backend='reference'"
    with tpfused.tier("reference"):
        ParallelGatedMLP(8, 4)(torch.ones(2, 8))
    assert told()["gated activation"].why == "forced by the tier"
    assert told()["column-parallel linear"].why == "forced by the tier"
    assert {row.device for row in explain().computations} == {"cpu"}
    header, *rows = str(explain()).split("\n\n")[1].splitlines()
    assert header.split() == ["layers", "compute", "dtype", "on", "by", "why"] and len(rows) == 5
    assert rows[0].endswith("plain PyTorch  the tensors are on the CPU")


def test_attention_to_a_cache():
    tpfused.ParallelTransformer(tpfused.TransformerConfig(**SIZES)).generate(torch.zeros(1, 2, dtype=torch.int64), 2)
    assert told()["attention to a cache"].why == "the tensors are on the CPU"


def test_kernels(monkeypatch):
    """Each kind once, however often it runs."""
    monkeypatch.setattr(backend, "why_plain", lambda x, backend: "")
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        backend.runs_kernels(torch.ones(2, dtype=dtype), None, "rotary positions")
    backend.runs_kernels(torch.ones(2), None)
    assert [(row.dtype, row.runs_by, row.why) for row in explain().computations] == [
        ("bfloat16", "kernel", ""),
        ("float32", "kernel", ""),
    ]


def test_the_back_end_of_attention():
    attention = ParallelAttention(32, 4, 2, causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        attention(torch.ones(5, 2, 32))
    (row,) = (row for row in explain().computations if row.what == "attention")
    assert row.runs_by == "math (torch)" and row.why == "4 heads of 8, 5 tokens on 5, causal"
    attention(torch.ones(6, 2, 32))  # of about the same size
    attention(torch.ones(9, 2, 32), torch.ones(2, 9, dtype=torch.bool))
    rows = [row for row in explain().computations if row.what == "attention"]
    assert len(rows) == 2 and rows[1].why == "4 heads of 8, 9 tokens on 9, mask"


@pytest.fixture
def on_gpu(monkeypatch):
    """As if the tensors were on a GPU that has kernels."""

    def why_plain(x, backend):
        return "" if backend is None else f"backend={backend!r}"

    for user in (backend, softmax, fairscale_layers):
        monkeypatch.setattr(user, "why_plain", why_plain)


SCORES = torch.ones(1, 2, 3, 3)


def _hide(scores, mask):
    return scores.masked_fill(mask, -torch.inf)


def masked_softmax(fusion=True):
    return FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, fusion, _hide, True, None)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("offset", [None, torch.ones(2)])
def test_the_masked_softmax(fusion, offset):
    """Whichever way it goes, in one row for one reason."""
    layer = masked_softmax(fusion)
    rows = []
    for forward in (layer, layer.forward_torch_softmax, lambda *args: layer.forward_fused_softmax(*args[:2])):
        forward(SCORES, None, offset)
        rows.append([(row.what, row.runs_by, row.why) for row in explain().computations])
    assert rows == 3 * [[("masked softmax", "plain PyTorch", "the tensors are on the CPU")]]


def test_why_a_masked_softmax_has_no_kernel_on_a_gpu(on_gpu):
    masked_softmax()(SCORES, None, torch.ones(2))
    assert told()["masked softmax"].why == "no kernel with a softmax_offset"
    masked_softmax(fusion=False)(SCORES, None, torch.ones(2))
    assert told()["masked softmax"].why == "scaled_masked_softmax_fusion=False"
    masked_softmax().forward_torch_softmax(SCORES, None)
    assert told()["masked softmax"].why == "a program called forward_torch_softmax"


def test_plain_parts_of_layers_that_have_kernels_on_a_gpu(on_gpu):
    mask = torch.zeros(1, 1, 3, 3, requires_grad=True)
    ParallelAttention(8, 2)(torch.ones(3, 1, 8), mask, return_probabilities=True)
    row = told()["softmax of attention"]
    assert (row.runs_by, row.why) == ("plain PyTorch", "no kernel for a mask's gradient")
    rank_dropout(torch.ones(3), 0.1, TPGroup(None, 0, 1))
    assert told()["dropout of a rank's own"].why == "one rank"


def test_an_embedding_without_rows_on_this_rank(on_gpu, monkeypatch):
    layer = VocabParallelEmbedding(4, 2)
    layer.weight = torch.nn.Parameter(torch.ones(0, 2))
    monkeypatch.setattr(reference, "vocab_parallel_embedding", lambda *args, **options: None)
    layer(torch.zeros(1, dtype=torch.int64))
    row = told()["embedding"]
    assert (row.runs_by, row.why) == ("plain PyTorch", "no rows on this rank")


def test_fairscales_embedding(monkeypatch):
    monkeypatch.setattr(fairscale_layers, "tp_group", lambda: TPGroup(None, 0, 1))
    layer = fairscale_layers.ParallelEmbedding(8, 4)
    layer(IDS)
    assert told()["embedding"].why == "the tensors are on the CPU"
    monkeypatch.setattr(fairscale_layers, "why_plain", lambda x, backend: "")
    layer(IDS)
    assert told()["embedding"].why == "no kernel for a split embedding dimension"


def test_the_norm_after_a_sum():
    model = tpfused.ParallelTransformer(tpfused.TransformerConfig(**SIZES))
    model.generate(torch.zeros(1, 2, dtype=torch.int64), 2)
    assert told()["norm after a sum"].why == "matmul_all_reduce does not run by p2p"
    with tpfused.deterministic():
        model.generate(torch.zeros(1, 2, dtype=torch.int64), 2)
    assert told()["norm after a sum"].why == "deterministic: other tiers round more often"
    model.norm.register_forward_hook(lambda *args: None)
    model.generate(torch.zeros(1, 2, dtype=torch.int64), 2)
    assert told()["norm after a sum"].why == "a module was wrapped, replaced or given a hook"
    assert told()["norm after a sum"].runs_by == "plain PyTorch"


# What computes in one way only: nothing is to be told of it.
ONE_WAY = {
    "KVCache", "TransformerConfig", "check_alive", "clip_grad_norm_", "deterministic", "explain", "full_state_dict",
    "load_full_state_dict", "load_sharded", "parallelize", "rank_rng", "save_sharded", "scale_mask_softmax",
    "set_timeout", "tier", "vocab_parallel_argmax",
}  # fmt: skip
X, W = torch.ones(2, 8), torch.ones(8, 8)
CALLS = {
    "ColumnParallelLinear": lambda: tpfused.ColumnParallelLinear(8, 8)(X),
    "FusedScaleMaskSoftmax": lambda: masked_softmax()(SCORES, None),
    "ParallelAttention": lambda: ParallelAttention(8, 2)(X[None]),
    "ParallelGatedMLP": lambda: ParallelGatedMLP(8, 8)(X),
    "ParallelMLP": lambda: tpfused.ParallelMLP(8, 8)(X),
    "ParallelTransformer": lambda: tpfused.ParallelTransformer(tpfused.TransformerConfig(**SIZES))(IDS),
    "ParallelTransformerBlock": lambda: tpfused.ParallelTransformerBlock(tpfused.TransformerConfig(**SIZES))(X[None]),
    "RowParallelLinear": lambda: RowParallelLinear(8, 8)(X),
    "VocabParallelEmbedding": lambda: VocabParallelEmbedding(8, 8)(IDS),
    "all_gather_matmul": lambda: tpfused.all_gather_matmul(X, W),
    "column_matmul": lambda: tpfused.column_matmul(X, W),
    "matmul_all_gather": lambda: tpfused.matmul_all_gather(X, W),
    "matmul_all_reduce": lambda: tpfused.matmul_all_reduce(X, W),
    "matmul_reduce_scatter": lambda: tpfused.matmul_reduce_scatter(X, W),
    "vocab_parallel_cross_entropy": lambda: tpfused.vocab_parallel_cross_entropy(X, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", sorted({*tpfused.__all__} - ONE_WAY))
def test_all_that_has_a_choice_tells_it(name, monkeypatch):
    for table in ("_listed", "_known", "_measured"):
        monkeypatch.setattr(choice, table, {})
    CALLS[name]()
    assert explain() or explain().computations


def test_compiled_code_tells_nothing():
    torch._dynamo.reset()
    attention = ParallelAttention(32, 4, causal=True)
    torch.compile(attention, fullgraph=True, backend="aot_eager")(torch.ones(5, 2, 32))
    assert explain().computations == ()
