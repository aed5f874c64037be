"""What layers and configurations must refuse to be made of."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.compare import Block, refuses
from tpfused import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelGatedMLP,
    ParallelMLP,
    ParallelTransformer,
    ParallelTransformerBlock,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
)
from tpfused.group import TPGroup
from tpfused.layers.norm import Norm

SIZES = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 4, "ffn_size": 8, "max_positions": 8}


def test_numbers_that_make_no_sense_are_refused():
    alone = TPGroup(None, 0, 1)
    for eps in (-1, -1e-5, float("nan"), float("inf")):
        with refuses(ValueError, "norm_eps", eps):
            ParallelTransformer(TransformerConfig.llama(**SIZES, norm_eps=eps), group=alone)
        with refuses(ValueError, "eps", eps):
            Norm("layernorm", 8, eps, group=alone)
    for eps in (None, "1e-5", True):
        with refuses(TypeError, "norm_eps", repr(eps)):
            ParallelTransformer(TransformerConfig.llama(**SIZES, norm_eps=eps), group=alone)
    for error, theta in ((ValueError, 0), (ValueError, -1e4), (ValueError, float("inf")), (TypeError, "1e4")):
        with refuses(error, "rope_theta", theta):
            ParallelTransformer(TransformerConfig.llama(**SIZES, rope_theta=theta), group=alone)
        with refuses(error, "rope_theta", theta):
            ParallelTransformer(TransformerConfig.gpt(**SIZES, rope_theta=theta), group=alone)
        with refuses(error, "rope_theta", theta):
            ParallelAttention(8, 2, rope_theta=theta, group=alone)
    model = ParallelTransformer(TransformerConfig.llama(**SIZES), group=alone)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    for eos_id in (1.5, "2", True):
        with refuses(TypeError, "eos_id", repr(eos_id)):
            model.generate(ids, 2, eos_id=eos_id)
    with refuses(ValueError, "fast"):
        VocabParallelEmbedding(8, 8, backend="fast", group=alone)


LAYERS = {
    "column": lambda **options: ColumnParallelLinear(4, 6, **options),
    "row": lambda **options: RowParallelLinear(4, 6, **options),
    "embedding": lambda **options: VocabParallelEmbedding(5, 4, **options),
    "mlp": lambda **options: ParallelMLP(4, 8, **options),
    "gated": lambda **options: ParallelGatedMLP(4, 8, **options),
    "attention": lambda **options: ParallelAttention(8, 4, **options),
    "norm": lambda **options: Norm("rmsnorm", 4, **options),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("layer", LAYERS)
def test_arguments_of_another_kind_are_refused(layer, device):
    place = {"group": TPGroup(None, 0, 1), "device": device}
    with refuses(TypeError, "dtype", "torch.dtype", "'bf16'"):
        LAYERS[layer](dtype="bf16", **place)
    if layer != "norm":
        with refuses(TypeError, "init_method", "function", "'normal'"):
            LAYERS[layer](init_method="normal", **place)
    if layer == "attention":
        with refuses(TypeError, "dropout", "'0.1'"):
            LAYERS[layer](dropout="0.1", **place)


def draw(std):
    return torch.randn(4, 4) * std


def fill_and_return_nothing(weight):
    weight.fill_(1.0)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "norm"])
def test_init_methods_that_cannot_fill_a_weight_are_refused(layer):
    alone = {"group": TPGroup(None, 0, 1)}
    for init_method, told in (
        (lambda: torch.zeros(4), "<lambda> takes ()"),
        (nn.init.constant_, "missing a required argument: 'val'"),
        (partial(draw, std=1.0), "takes (*, std=1.0)"),
    ):
        for device in ("cpu", "meta"):
            with refuses(TypeError, "init_method", told):
                LAYERS[layer](init_method=init_method, device=device, **alone)
    for init_method in (torch.zeros_like, lambda weight: weight + 1, lambda weight: weight.clone().normal_()):
        with refuses(ValueError, "init_method", "in place", "new tensor of shape"):
            LAYERS[layer](init_method=init_method, **alone)
    for init_method, told in ((lambda weight: (weight * 0,), "tuple"), (lambda weight: weight.numpy() * 0, "ndarray")):
        with refuses(ValueError, "init_method", "in place", f"returned {told}"):
            LAYERS[layer](init_method=init_method, **alone)
    for init_method in (
        nn.init.ones_,
        partial(nn.init.constant_, val=1.0),
        lambda weight: weight.t().fill_(1.0),
        lambda weight: weight.data.fill_(1.0),
        fill_and_return_nothing,
    ):
        for name, param in LAYERS[layer](init_method=init_method, **alone).named_parameters():
            assert (param == ("weight" in name)).all()


def check_names_in_errors(ctx, tp):
    """A layer built of others is the one that errors name."""
    block = Block(ctx, tp, "group", 0)
    options = {"device": ctx.device, **block.place}
    for layer, sizes in (
        (ParallelMLP, (8, 16)),
        (ParallelGatedMLP, (8, 16)),
        (ParallelAttention, (8, 4)),
        (ParallelAttention, (8, 4, 1)),
    ):
        made, name = layer(*sizes, **options), f"{layer.__name__}: "
        x = block.randn(3, 2, 8).float()
        with refuses(ValueError, name, 8, (3, 2, 5)):
            made(x[..., :5])
        with refuses(TypeError, name, "float64"):
            made(x.double())
        with refuses(ValueError, name, "total_len 3"):
            made(x, total_len=3)
        with refuses(ValueError, name, "total_len 99"):
            layer(*sizes, sequence_parallel=True, **options)(x, total_len=99)
        with refuses(ValueError, name, "`then`"):
            made(x, residual=x, then=(x, None))
        with refuses(TypeError, "dtype must be", "int8"):
            layer(*sizes, dtype=torch.int8, **options)


def test_errors_name_the_layer_that_was_built(workers, tp):
    workers.run(check_names_in_errors, tp)


SWITCHES = {
    "column": "bias gather_output sequence_parallel skip_bias_add accumulate_main_grad save_gathered",
    "row": "bias input_is_parallel sequence_parallel skip_bias_add accumulate_main_grad",
    "embedding": "sequence_parallel accumulate_main_grad",
    "mlp": "bias sequence_parallel accumulate_main_grad save_gathered",
    "gated": "bias sequence_parallel accumulate_main_grad save_gathered",
    "attention": "bias causal sequence_parallel accumulate_main_grad save_gathered",
    "norm": "sequence_parallel",
}


def check_switches(ctx, tp):
    block = Block(ctx, tp, "group", 0)
    place = {"device": ctx.device, **block.place}
    for value in ("no", 1, None):
        for layer, names in SWITCHES.items():
            for name in names.split():
                with refuses(TypeError, f"{name} must be True or False", repr(value)):
                    LAYERS[layer](**{name: value}, **place)
        for name in (
            "gated bias tie_embeddings causal sequence_parallel accumulate_main_grad save_gathered "
            "checkpoint_activations"
        ).split():
            for kind in (ParallelTransformer, ParallelTransformerBlock):
                with refuses(TypeError, f"{name} must be True or False", repr(value)):
                    kind(TransformerConfig(**SIZES, **{name: value}), **place)


def test_what_only_looks_like_a_boolean_is_refused(workers, tp):
    workers.run(check_switches, tp)


@pytest.mark.parametrize("kind", [ParallelTransformer, ParallelTransformerBlock])
def test_configs_of_another_kind_are_refused(kind):
    alone = TPGroup(None, 0, 1)
    with refuses(TypeError, "config", "TransformerConfig", "dict"):
        kind(SIZES, group=alone)
    with refuses(TypeError, "dtype", "torch.dtype", "'bf16'"):
        kind(TransformerConfig(**SIZES), group=alone, dtype="bf16")
    with refuses(TypeError, "attention_dropout", "None"):
        kind(TransformerConfig(**SIZES, attention_dropout=None), group=alone)
