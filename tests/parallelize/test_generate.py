"""Tokens that are drawn by a parallelized model's `generate`, and models that have another one."""

import copy

import pytest
import torch
from torch import nn

from tests.compare import refuses
from tests.parallelize.models import build, random_ids, twins
from tpfused import parallelize

pytest.importorskip("transformers")

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)
OPTIONS = {"max_new_tokens": 8, "pad_token_id": 0}


def ways_to_ask(model):
    """For samples: in the call, by its configuration, and by the model's, which a configuration leaves as it is."""
    from transformers import GenerationConfig

    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True)
    unset = GenerationConfig(**OPTIONS)
    yield {"do_sample": True}
    yield {"generation_config": config}
    model.generation_config.do_sample = True
    yield {}
    if unset.do_sample is None:  # as from transformers 5 on
        yield {"generation_config": unset}


def check_samples(ctx, tp, seed, name):
    dense, model = twins(ctx, tp, seed, name, dtype=torch.float32)
    for m in (dense, model):
        m.eval()
    ids, mask = random_ids(dense, ctx.device)
    for asked, _ in zip(ways_to_ask(dense), ways_to_ask(model), strict=True):
        given = OPTIONS | {"attention_mask": mask} | asked
        drawn = []
        for m in (dense, model):
            torch.manual_seed(seed)
            drawn.append(m.generate(ids, **given))
        assert torch.equal(*drawn), asked
        torch.manual_seed(seed + ctx.rank)
        with refuses(ValueError, "generate draws tokens", "the random generator of rank"):
            model.generate(ids, **given)
        if asked:  # by its place
            with refuses(ValueError, "generate draws tokens", "the random generator of rank"):
                model.generate(ids, asked.get("generation_config"), **OPTIONS, do_sample=True)
    torch.manual_seed(seed)
    with refuses(ValueError, "generate draws tokens on rank", "do_sample differs"):
        model.generate(ids, do_sample=ctx.rank % tp == 0, **OPTIONS)
    copied = copy.deepcopy(model)
    assert copied.generate.args[0] is copied


@split
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ranks_that_would_draw_apart_are_told(workers, tp, seed, name):
    workers.run(check_samples, tp, seed, name)


def check_nothing_split(ctx, tp, seed):
    torch.manual_seed(seed)
    dense = build("llama").to(ctx.device).eval()
    model = parallelize(copy.deepcopy(dense), ctx.mesh(tp), {"*.mlp.up_proj": "replicate"})
    ids, mask = random_ids(dense, ctx.device)
    drawn = []
    for m in (dense, model):
        torch.manual_seed(seed)
        drawn.append(m.generate(ids, attention_mask=mask, do_sample=True, **OPTIONS))
    assert torch.equal(*drawn)


@split
def test_a_model_of_which_nothing_is_split(workers, tp, seed):
    workers.run(check_nothing_split, tp, seed)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x))


class WithMethod(FeedForward):
    def generate(self, x, steps):
        return torch.stack([self(x)] * steps)


class WithChild(FeedForward):
    def __init__(self):
        super().__init__()
        self.generate = nn.Linear(8, 8)

    def forward(self, x):
        return self.generate(super().forward(x))


def check_others(ctx, tp, seed):
    torch.manual_seed(seed)
    plan, x = {"up": "colwise", "down": "rowwise"}, torch.randn(3, 8, device=ctx.device)
    for kind in (WithMethod, WithChild):
        dense = kind().to(ctx.device)
        model = parallelize(copy.deepcopy(dense), ctx.mesh(tp), plan)
        torch.testing.assert_close(model(x), dense(x))
        if kind is WithMethod:
            torch.testing.assert_close(model.generate(x, steps=2), dense.generate(x, steps=2))
    llama = build("llama").to(ctx.device)
    llama.generate = lambda *args, **kwargs: "the user's"
    assert parallelize(llama, ctx.mesh(tp)).generate(x, do_sample=True) == "the user's"


@split
def test_what_is_not_transformers_own_stays(workers, tp, seed):
    workers.run(check_others, tp, seed)
