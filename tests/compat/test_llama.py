"""A client: Meta's reference Llama 3, from PyPI, on tpfused's layers and on fairscale's."""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

from tests.compat.fairscale_groups import THEIRS, default_type, model_parallel, own
from tpfused.compat.fairscale import initialize, layers

pytest.importorskip(f"{THEIRS}.layers")
pytest.importorskip("llama_models.llama3.model")

SIZES = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 96, "multiple_of": 32}
PROMPT, NEW = 5, 12
# The names that its module imports from fairscale.
LAYERS = {
    name: getattr(layers, name) for name in ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
}
COLUMNS = ("wo.weight", "w2.weight")  # of row-parallel layers


def build(args, device):
    """The model in a reference program's way: defaults set, nothing initialised, all weights from a checkpoint."""
    with default_type(device):
        return import_module("llama_models.llama3.model").Transformer(args)


def checkpoint(model, seed):
    """This rank's part of a random checkpoint, whose whole tensors do not depend on the number of ranks."""
    generator, size = torch.Generator().manual_seed(seed), initialize.get_model_parallel_world_size()
    state = {}
    for name, mine in model.state_dict().items():
        if mine.ndim == 1:
            state[name] = 1 + 0.1 * torch.randn(mine.shape, generator=generator)
            continue
        dim = 1 if name.endswith(COLUMNS) else 0
        shape = [n * size if i == dim else n for i, n in enumerate(mine.shape)]
        state[name] = own(torch.randn(shape, generator=generator) / shape[1] ** 0.5, dim)
    return state


def greedy(model, prompt):
    """The prompt and `NEW` more tokens, and the logits that chose them; one token a step after the first."""
    tokens, start, chosen = prompt, 0, []
    for _ in range(NEW):
        logits = model(tokens[:, start:], start)[:, -1]
        chosen.append(logits)
        start = tokens.shape[1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens, torch.stack(chosen)


def generate(device, seed):
    args = import_module("llama_models.llama3.args").ModelArgs(**SIZES, max_batch_size=2, max_seq_len=PROMPT + NEW)
    model = build(args, device)
    missing, unexpected = model.load_state_dict(checkpoint(model, seed), strict=True)
    assert not missing and not unexpected
    prompt = torch.randint(SIZES["vocab_size"], (2, PROMPT), generator=torch.Generator().manual_seed(seed + 1))
    return type(model.output), *greedy(model, prompt.to(device))


def check_llama(ctx, tp, seed):
    theirs, llama = import_module(f"{THEIRS}.initialize"), import_module("llama_models.llama3.model")
    with model_parallel(tp, theirs):
        kind, tokens, logits = generate(ctx.device, seed)
        assert kind is llama.ColumnParallelLinear
        with patch.multiple(llama, **LAYERS):  # on groups that fairscale made
            found = [generate(ctx.device, seed)]
    with model_parallel(tp), patch.multiple(llama, fs_init=initialize, **LAYERS):
        found.append(generate(ctx.device, seed))
    for kind, other_tokens, other_logits in found:
        assert kind is layers.ColumnParallelLinear
        assert torch.equal(other_tokens, tokens)
        torch.testing.assert_close(other_logits, logits, rtol=1e-4, atol=1e-4)
    return tokens.tolist()


def test_llama_3_gives_fairscales_tokens(workers, tp, seed):
    tokens = workers.run(check_llama, tp, seed)
    assert all(other == tokens[0] for other in tokens)


def check_one_token_sequence(ctx, sizes, seed):
    found = []
    for size in sizes:
        with (
            model_parallel(size),
            patch.multiple(import_module("llama_models.llama3.model"), fs_init=initialize, **LAYERS),
        ):
            found.append(generate(ctx.device, seed)[1])
    assert all(torch.equal(tokens, found[0]) for tokens in found)


def test_llama_3_gives_the_same_tokens_at_every_degree(workers, seed):
    workers.run(check_one_token_sequence, [size for size in (1, 2, 4) if size <= workers.world], seed)
