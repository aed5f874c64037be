"""Files that hold one parameter of the model under two names: tied, or with and without the base model's prefix."""

import pytest
import torch

import tpfused
from tests.compare import refuses
from tests.parallelize.models import build

pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What transformers would save, in memory of its own."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def check_loads(ctx, name, file, dtype):
    with torch.device("meta"):
        model = tpfused.parallelize(build(name).to(dtype), ctx.mesh(ctx.world))
    tpfused.load_sharded(model, file)
    return tpfused.full_state_dict(model)


def check_refuses(ctx, name, file, told):
    """Whichever rank's part it is that differs, all hear of it."""
    with torch.device("meta"):
        model = tpfused.parallelize(build(name), ctx.mesh(ctx.world))
    with refuses(ValueError, *told):
        tpfused.load_sharded(model, file)
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("row", [0, -1])
def test_a_head_that_is_not_the_tied_embedding_is_refused(workers, tmp_path, row):
    """Transformers unties the two, which is another model."""
    state = stored(build("qwen2"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][row, 3] += 1
    save_file(state, tmp_path / "model.safetensors")
    told = "1 tensors of the checkpoint differ", "\n  model.embed_tokens.weight from lm_head.weight"
    workers.run(check_refuses, "qwen2", tmp_path, told)


@pytest.mark.parametrize("name, entry", [("h.0.attn.c_attn.weight", (5, 63)), ("ln_f.bias", 0), ("wpe.weight", (3, 1))])
def test_names_with_and_without_the_prefix(workers, tmp_path, name, entry):
    """A packed weight, of which one rank reads the entry, and what all ranks read."""
    state = stored(build("gpt2"))
    state |= {short: state[f"transformer.{short}"].clone() for short in ("wpe.weight", "ln_f.weight", name)}
    state[name][entry] += 1
    save_file(state, tmp_path / "model.safetensors")
    one, other = sorted((name, f"transformer.{name}"))  # as safetensors has them
    told = "1 tensors of the checkpoint differ", f"\n  {other} from {one}"
    workers.run(check_refuses, "gpt2", tmp_path, told)


def test_each_copy_has_to_fit(workers, tmp_path):
    state = stored(build("gpt2"))
    state |= {"wpe.weight": torch.zeros(32, 31), "wte.weight": state["transformer.wte.weight"].int()}
    save_file(state, tmp_path / "model.safetensors")
    told = "1 of another shape, 1 of another dtype", "wpe.weight (32, 31), not (32, 32)"
    workers.run(check_refuses, "gpt2", tmp_path, (*told, "wte.weight torch.int32, not torch.float32"))


def test_copies_that_are_the_same_once_cast_are_one(workers, tmp_path):
    """NaNs, too: what is compared is bits."""
    state = stored(build("qwen2"))
    state["model.embed_tokens.weight"][0] = torch.nan
    state["lm_head.weight"] = state["model.embed_tokens.weight"].bfloat16()
    save_file(state, tmp_path / "model.safetensors")
    loaded = workers.run(check_loads, "qwen2", tmp_path, torch.bfloat16)[0]
    head, loaded = state["lm_head.weight"], loaded["model.embed_tokens.weight"]
    assert torch.equal(loaded.view(torch.int16), head.view(torch.int16))
