"""Two pipeline stages of two tensor-parallel ranks each, by torch's own schedules, against the dense model."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import tpfused
from tests.parallelize.models import VOCAB
from tests.parallelize.training import TOLERANCE, assert_same, batches, dense_losses, parallel, train

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PARTS = 4  # micro-batches


class Stage(nn.Module):
    """One half of a `ParallelTransformer`; `tokens` in a text, which under sequence parallelism its input hides."""

    def __init__(self, model: tpfused.ParallelTransformer, first: bool, tokens: int):
        super().__init__()
        half = len(model.blocks) // 2
        self.first, self.total_len = first, tokens if model.sequence_parallel else None
        self.blocks = model.blocks[:half] if first else model.blocks[half:]
        if first:
            self.embedding, self.positions = model.embedding, model.positions
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """From ids ``[batch, tokens]`` to ``[tokens, batch, hidden]``, and on to ``[batch, tokens, vocabulary shard]``;
        between the stages, this rank's tokens under sequence parallelism.
        """
        if self.first:
            tokens = x.shape[1]
            x = self.embedding(x.t())
            if self.positions is not None:
                x = x + self.positions(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x, total_len=self.total_len)
        return x if self.first else self.head(self.norm(x), total_len=self.total_len).transpose(0, 1)


class LlamaStage(nn.Module):
    """One half of a transformers Llama from `parallelize`: its own forward, with half of the layers."""

    def __init__(self, model: nn.Module, first: bool):
        super().__init__()
        self.base, self.head = model.model, None if first else model.lm_head
        half = len(self.base.layers) // 2
        self.base.layers = self.base.layers[:half] if first else self.base.layers[half:]
        if first:
            self.base.norm = nn.Identity()
        else:
            self.base.embed_tokens, self.head.gather_output = None, False

    def forward(self, x: Tensor) -> Tensor:
        """From ids ``[batch, tokens]`` to ``[batch, tokens, hidden]``, and on to ``[..., vocabulary shard]``."""
        if self.head is None:
            return self.base(x).last_hidden_state
        return self.head(self.base(inputs_embeds=x).last_hidden_state)


def check_pipeline(ctx, seed, name, schedule, plain):
    expected = dense_losses(ctx, name, seed)
    pp = ctx.grid(2)["dp"]  # the same ranks, each with another part of the model instead of other data
    index, group = pp.get_local_rank(), pp.get_group()
    model = parallel(ctx.mesh(2), name, seed, plain=plain).model
    if name == "llama":
        stage = LlamaStage(model, index == 0)
    else:
        tokens = next(batches(seed, ctx.device)).shape[1] - 1
        stage = Stage(model, index == 0, tokens)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return tpfused.vocab_parallel_cross_entropy(logits, labels, vocab_size=VOCAB, group=ctx.group(2))

    runs = SCHEDULES[schedule](PipelineStage(stage, index, 2, ctx.device, group=group), PARTS, loss_fn=loss)

    def step(ids: Tensor) -> Tensor:
        losses = []
        if index == 0:
            runs.step(ids[:, :-1].contiguous())
        else:
            runs.step(target=ids[:, 1:], losses=losses)
        total = sum(losses, torch.zeros((), dtype=torch.float64, device=ctx.device)).detach() / PARTS
        dist.all_reduce(total, group=group)
        return total

    def clip(parameters: list[Tensor], max_norm: float) -> Tensor:
        """By the norm of both stages' gradients."""
        norm = tpfused.clip_grad_norm_(parameters, math.inf)  # this stage's; scales nothing
        total = norm.square()
        dist.all_reduce(total, group=group)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total.sqrt())
        return total.sqrt()

    assert_same(train(stage, step, batches(seed, ctx.device), clip), expected, TOLERANCE[name])


@pytest.mark.parametrize("plain", [False, True], ids=["mesh", "group"])
@pytest.mark.parametrize("name, schedule", [("own-gpt", "gpipe"), ("own-llama", "1f1b")])
def test_two_stages(workers, seed, name, schedule, plain):
    if workers.world != 4:
        pytest.skip("needs 4 ranks")
    workers.run(check_pipeline, seed, name, schedule, plain)


def test_two_stages_of_a_parallelized_model(workers, seed):
    pytest.importorskip("transformers")
    if workers.world != 4:
        pytest.skip("needs 4 ranks")
    workers.run(check_pipeline, seed, "llama", "1f1b", plain=False)
