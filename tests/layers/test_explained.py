"""What `explain` tells of the layers: kernels, back ends of attention, and why it was plain PyTorch."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tpfused
from tpfused import ParallelAttention, ParallelGatedMLP, RowParallelLinear, VocabParallelEmbedding, explain
from tpfused import explanation as module
from tpfused.layers import backend, sdpa

IDS = torch.tensor([[1, 2, 3]])


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
    assert {row.device for row in explain().computations} == {"cpu"}
    header, *rows = str(explain()).split("\n\n")[1].splitlines()
    assert header.split() == ["layers", "compute", "dtype", "on", "by", "why"] and len(rows) == 3
    assert rows[0].endswith("plain PyTorch  the tensors are on the CPU")


def test_attention_to_a_cache():
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "ffn_size": 8, "max_positions": 8}
    tpfused.ParallelTransformer(tpfused.TransformerConfig(**sizes)).generate(torch.zeros(1, 2, dtype=torch.int64), 2)
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


def test_compiled_code_tells_nothing():
    torch._dynamo.reset()
    attention = ParallelAttention(32, 4, causal=True)
    torch.compile(attention, fullgraph=True, backend="aot_eager")(torch.ones(5, 2, 32))
    assert explain().computations == ()
