"""Transformers' own `from_pretrained` with this package's styles."""

import os
from unittest import mock

import pytest
import torch

from tests.compare import refuses
from tests.parallelize.models import build, random_ids

pytest.importorskip("transformers")


def check_transformers_loads(ctx, folder, name):
    """Transformers' own `from_pretrained` loads the shards, and this package's layers compute."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    from tpfused.layers.linear import ColumnParallelLinear
    from tpfused.parallel.styles import tp_plan

    with torch.device("meta"):
        skeleton = build(name)
    kind = getattr(transformers, type(skeleton).__name__)
    distributed = DistributedConfig(tp_size=ctx.world, tp_plan=tp_plan(skeleton))
    own_device = ctx.rank if ctx.device.type == "cpu" else ctx.device.index  # of which there may be fewer than ranks
    with mock.patch.dict(os.environ, LOCAL_RANK=str(own_device)):
        model = kind.from_pretrained(folder / name, distributed_config=distributed).eval()
    assert type(model.model.layers[0].mlp.up_proj) is ColumnParallelLinear
    assert model.model.layers[0].mlp.up_proj.weight.to_local().shape[0] < model.config.intermediate_size
    dense = kind.from_pretrained(folder / name).to(ctx.device).eval()
    torch.manual_seed(4)
    ids, _ = random_ids(dense, ctx.device)
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), dense.generate(ids, **options))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings


def check_transformers_cannot(ctx):
    from tpfused.parallel.styles import tp_plan

    with torch.device("meta"):
        gpt2, bert = build("gpt2"), build("bert")
    with refuses(ValueError, "transformer.h.0.attn.c_attn", "fused_qkv", "load_sharded"):
        tp_plan(gpt2)
    with refuses(ValueError, "cls.predictions.decoder shares", "load_sharded"):
        tp_plan(bert)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_from_pretrained(workers, tmp_path, name):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    pytest.importorskip("accelerate")  # transformers asks for it
    if workers.world > 1:
        torch.manual_seed(11)
        build(name).save_pretrained(tmp_path / name, max_shard_size="20KB")
        workers.run(check_transformers_loads, tmp_path, name)


def test_what_transformers_from_pretrained_cannot_load(workers):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    workers.run(check_transformers_cannot)
