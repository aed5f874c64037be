"""The plan that the error of an unknown architecture shows: one to start from, and right as it stands."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tpfused
from tests.parallelize.own_models import on_four
from tpfused.parameter import ParallelModule

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)


def shown_plan(model, mesh):
    try:
        tpfused.parallelize(model, mesh)
    except ValueError as error:
        return eval(str(error).partition("plan = ")[2])
    raise AssertionError("an unknown architecture was taken")


UNKNOWN = {
    # Its positions are an embedding of another forward; it projects to narrower embeddings, which are tied to the head.
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 12, "max_position_embeddings": 32},
    "Gemma": {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8},  # scales embeddings tied to the head
    "Falcon": {},  # has linear layers of its own
    "GPTNeoX": {},
}
STAYS_WHOLE = {
    "OPT": {"model.decoder.embed_positions"},
    "Gemma": {"model.embed_tokens", "lm_head"},
    "Falcon": {f"transformer.h.{block}.mlp.{name}" for block in (0, 1) for name in ("dense_h_to_4h", "dense_4h_to_h")},
    "GPTNeoX": set(),
}


def check_shown_plan(ctx, tp, seed, name):
    """The plan that the error shows is one to start from: it is right as it stands."""
    import transformers

    sizes = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes | {"bos_token_id": 1, "eos_token_id": 2} | UNKNOWN[name])
    torch.manual_seed(seed)
    dense = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model = copy.deepcopy(dense)
    plan = shown_plan(model, ctx.mesh(tp))
    assert len(plan) >= 2
    tpfused.parallelize(model, ctx.mesh(tp), plan)
    modules = dict(model.named_modules())
    assert not [part for part in STAYS_WHOLE[name] if isinstance(modules[part], ParallelModule)]
    ids = torch.randint(37, (2, 7))
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)


@split
@pytest.mark.parametrize("name", UNKNOWN)
def test_the_plan_that_the_error_shows_works(workers, tp, seed, name):
    pytest.importorskip("transformers")
    if workers.device == "cpu":
        workers.run(check_shown_plan, tp, seed, name)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """Modules that one pattern matches, and tied ones, of which only some can be split."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), Doubled(8, 37, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) if index < 2 else Doubled(8, 8) for index in range(3))
        self.block = nn.ModuleDict({"fc": nn.Linear(8, 8), "inner": nn.ModuleDict({"fc": Doubled(8, 8)})})
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in (*self.layers, self.block["fc"], self.block["inner"]["fc"], self.fc, self.other):
            x = x + layer(x)
        return self.head(x)


def check_mixed(ctx, seed):
    torch.manual_seed(seed)
    dense = Mixed().to(ctx.device)
    model = copy.deepcopy(dense)
    plan = shown_plan(model, ctx.mesh(4))
    assert plan == {"block.fc": "colwise_gather", "other": "colwise_gather"}
    tpfused.parallelize(model, ctx.mesh(4), plan)
    ids = torch.randint(37, (2, 7), device=ctx.device)
    torch.testing.assert_close(model(ids), dense(ids), rtol=1e-4, atol=1e-5)


def check_stacked(ctx, seed):
    """Only numbers tell a layer from the activation beside it."""
    torch.manual_seed(seed)
    flat, *others = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
    deep = nn.Sequential(OrderedDict(first=nn.Linear(8, 8), act=nn.ReLU(), blocks=nn.Sequential(*others)))
    for dense, patterns in ((flat, ("0", "2")), (deep, ("first", "blocks.*.0", "blocks.*.2"))):
        model = copy.deepcopy(dense.to(ctx.device))
        plan = shown_plan(model, ctx.mesh(4))
        assert plan == dict.fromkeys(patterns, "colwise_gather")
        tpfused.parallelize(model, ctx.mesh(4), plan)
        kinds = [type(module) for module in model.modules()]
        assert nn.Linear not in kinds and kinds.count(nn.GELU) == len(patterns) - 1
        x = torch.randn(3, 8, device=ctx.device)
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", [check_mixed, check_stacked])
def test_the_plan_leaves_out_what_cannot_be_split(workers, seed, check):
    workers.run(on_four, check, seed)
