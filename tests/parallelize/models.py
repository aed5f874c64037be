"""Tiny transformers models with random weights, dense and parallel."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpfused
from tests.distributed import Context

VOCAB = 131  # on 4 ranks 33, 33, 33, 32; on 2 66, 65
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 54,  # 14, 14, 14, 12 on 4
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # replicated on 4 ranks
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(name: str, **changes) -> nn.Module:
    """Without dropout; float32, on the default device, with random weights that are not initial ones."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if name in ("gpt2", "gpt2-double"):
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 54}
        sizes |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "summary_first_dropout"), 0.0)
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        config = transformers.GPT2Config(**sizes | changes)
        kind = transformers.GPT2LMHeadModel if name == "gpt2" else transformers.GPT2DoubleHeadsModel
    elif name.startswith("bert"):
        sizes = {key: _DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 32}
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**sizes | {"is_decoder": name == "bert-causal"} | changes)
        kinds = {"bert": "BertForMaskedLM", "bert-causal": "BertLMHeadModel", "bert-base": "BertModel"}
        kind = getattr(transformers, kinds[name])
    else:
        family = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[name]
        tied = name in ("qwen2", "qwen3")
        extra = {"head_dim": 12} if name == "qwen3" else {}
        config = getattr(transformers, f"{family}Config")(**_DECODER | {"tie_word_embeddings": tied} | extra | changes)
        kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(config)
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_meta:
                param.add_(0.1 * torch.randn_like(param))
    return model


def twins(ctx: Context, tp: int, seed: int, name: str, dtype=torch.float64, **changes) -> tuple[nn.Module, nn.Module]:
    """A dense model and the same one parallel, both in training mode; other weights in each block of ranks."""
    torch.manual_seed(seed + ctx.rank // tp)
    dense = build(name, **changes).to(ctx.device, dtype).train()
    return dense, tpfused.parallelize(copy.deepcopy(dense), ctx.mesh(tp))


def random_ids(model: nn.Module, device, batch: int = 2, tokens: int = 9) -> tuple[Tensor, Tensor]:
    """Ids, and a mask with padding on the left of the first text."""
    ids = torch.randint(2, model.config.vocab_size, (batch, tokens), device=device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def dense_loss(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """What transformers computes, in the logits' precision."""
    if type(model).__name__ != "BertForMaskedLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole(tensor: Tensor, like: Tensor) -> Tensor:
    """A DTensor put together, in the shape that the dense model has it in."""
    return tensor.full_tensor().reshape(like.shape)


def compare(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: Callable[[str], str]
) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in expected.items():
        error, scale = (actual[name] - value).abs().max().item(), value.abs().max().item()
        assert error <= tolerance * max(scale, 1e-3), f"{what(name)}: error {error} on values up to {scale}"
