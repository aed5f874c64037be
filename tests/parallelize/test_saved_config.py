"""The config beside a saved checkpoint, as transformers' `save_pretrained` writes it."""

import json

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import tpfused
from tests.parallelize.models import build

pytest.importorskip("transformers")


def check_config(ctx, tp, plain, out):
    """What is written is what transformers would write of the dense model; the model's own config stays."""
    import transformers

    with torch.device("meta"):
        model = build("llama").to(torch.bfloat16)
    model.config.dtype = torch.float32  # of what it was made from
    tpfused.parallelize(model, ctx.mesh(tp))
    fully_shard(model, mesh=ctx.grid(tp)["dp"])
    tpfused.load_sharded(model, plain)
    before = model.config.to_dict()
    tpfused.save_sharded(model, out)
    assert model.config.to_dict() == before and model.config.dtype == torch.float32
    if ctx.rank == 0:
        for name in ("config.json", "generation_config.json"):
            assert json.loads((out / name).read_text()) == json.loads((plain / name).read_text())
        for options in ({}, {"dtype": "auto"}):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(out, **options)
            assert {param.dtype for param in loaded.parameters()} == {torch.bfloat16}
        assert loaded.config.architectures == ["LlamaForCausalLM"] == [type(loaded).__name__]


def test_a_config_has_the_dtype_and_the_class_of_its_model(workers, tmp_path):
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    workers.run(check_config, min(2, workers.world), tmp_path / "plain", tmp_path / "out")


def check_wrapped_config(ctx, out):
    ddp = torch.nn.parallel.DistributedDataParallel
    for name, wrap in ("compiled", torch.compile), ("ddp", ddp), ("checkpointed", checkpoint_wrapper):
        tpfused.save_sharded(wrap(build("llama").to(ctx.device)), out / name)
        written = json.loads((out / name / "config.json").read_text())
        assert written["architectures"] == ["LlamaForCausalLM"] and written["dtype"] == "float32"


def test_wrappers_leave_no_trace_in_a_config(workers, tmp_path):
    workers.run(check_wrapped_config, tmp_path)
