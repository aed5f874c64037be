"""`tpfused check` sees the mistakes that layers and operations can have, in bfloat16 too."""

import pytest
import torch
import torch.nn.functional as F

import tpfused
from tpfused.checking import cases
from tpfused.checking.cases import LAYERS, MANY_TOKENS, OPERATIONS, TOKENS, Case
from tpfused.group import TPGroup
from tpfused.layers import attention
from tpfused.overlap.tiers import wanted

ALONE, CPU = TPGroup(None, 0, 1), torch.device("cpu")
DTYPES = "bf16", "fp16", "fp32"
SMALL = {name: layer for name, layer in LAYERS.items() if layer.tokens < MANY_TOKENS}
ATTENTIVE = [name for name, layer in SMALL.items() if layer.has_heads and not layer.decodes]


def ratio(case, seed):
    torch.manual_seed(seed)
    return cases.run(case, ALONE, CPU).ratio


def parameters_of(name):
    module = SMALL[name].build(group=ALONE, device=CPU, dtype=torch.bfloat16)
    return [(name, parameter) for parameter, _ in module.named_parameters()]


def without(x):
    """As where a bias is left out, or a norm's weight."""
    x.copy_(x.mean().round().expand_as(x))


def exchanged(x):
    """A block of rows, a head's perhaps, in another's place."""
    x.copy_(x.roll(x.shape[0] // 8, 0))


def zeroed(x):
    """A block of features that nothing has come of."""
    x[:, : x.shape[1] // 8] = 0


@pytest.mark.parametrize("name, parameter", [each for name in SMALL for each in parameters_of(name)])
def test_a_wrong_parameter(name, parameter, seed, monkeypatch):
    twins, spoils = cases._twins, []

    def spoiled(*arguments):
        module, alone = twins(*arguments)
        with torch.no_grad():
            spoils[-1](module.get_parameter(parameter))
        return module, alone

    monkeypatch.setattr(cases, "_twins", spoiled)
    is_vector = parameter.endswith(("bias", "norm.weight"))
    for spoil in (without,) if is_vector else (exchanged, zeroed):
        spoils.append(spoil)
        assert ratio(Case("layer", name, 1, "bf16"), seed) > 1.5, spoil


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTIVE)
def test_one_query_that_sees_a_key_too_many(name, dtype, seed, monkeypatch):
    attend = attention.scaled_dot_product_attention

    def attend_wrongly(q, k, v, mask, causal, *options, **more):
        if wanted[-1] == "reference":
            return attend(q, k, v, mask, causal, *options, **more)
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen[TOKENS // 8, TOKENS // 8 + 1] = True
        return attend(q, k, v, seen, False, *options, **more)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend_wrongly)
    assert ratio(Case("layer", name, 1, dtype), seed) > 1.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["label_smoothing", "z_loss"])
def test_a_loss_without_a_term(option, dtype, seed, monkeypatch):
    right = tpfused.vocab_parallel_cross_entropy

    def loss(*arguments, **options):
        return right(*arguments, **options | ({} if wanted[-1] == "reference" else {option: 0.0}))

    monkeypatch.setattr(tpfused, "vocab_parallel_cross_entropy", loss)
    assert ratio(Case("layer", "vocab_parallel_cross_entropy", 1, dtype), seed) > 1


class Shifted(torch.autograd.Function):
    """Some rows are another token's, going forward or back."""

    @staticmethod
    def forward(ctx, x, forth):
        ctx.forth = forth
        return Shifted.exchange(x) if forth else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forth else Shifted.exchange(grad), None

    @staticmethod
    def exchange(x):
        last = x.shape[0] - x.shape[0] // 16
        return torch.cat((x[:last], x[last:].roll(1, 0)))


def without_bias(right, x, weight, bias, **options):
    return right(x, weight, bias * 0, **options)


def of_the_last_features_twice(right, x, weight, bias, **options):
    """As where a rank's share is added twice."""
    k = x.shape[1] // 16
    return right(torch.cat((x[:, :-k], 2 * x[:, -k:]), 1), weight, bias, **options)


def rows_exchanged(right, x, weight, bias, **options):
    return right(Shifted.apply(x, True), weight, bias, **options)


def gradient_rows_exchanged(right, x, weight, bias, **options):
    return right(Shifted.apply(x, False), weight, bias, **options)


MISTAKES = without_bias, of_the_last_features_twice, rows_exchanged, gradient_rows_exchanged


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_operation(name, dtype, mistake, seed, monkeypatch):
    right = getattr(tpfused, name)
    monkeypatch.setattr(tpfused, name, lambda *operands, **options: mistake(right, *operands, **options))
    assert ratio(Case("operation", name, 1, dtype, "reference"), seed) > 1.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax_whose_last_key_is_not_hidden(dtype, seed, monkeypatch):
    right = cases._Softmax.forward

    def forward(self, scores):
        if wanted[-1] == "reference":
            return right(self, scores)
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen[TOKENS // 8, TOKENS // 8 + 1] = True
        return F.softmax((scores * 0.5).masked_fill(~seen[:, None], -torch.inf), -1)

    monkeypatch.setattr(cases._Softmax, "forward", forward)
    assert ratio(Case("layer", "FusedScaleMaskSoftmax", 1, dtype), seed) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", ["the other rank's id", "the last of equals"])
def test_a_wrong_id(mistake, dtype, seed, monkeypatch):
    right = tpfused.vocab_parallel_argmax

    def argmax(logits, vocab_size, group):
        if "last" in mistake:
            return vocab_size - 1 - right(logits.flip(-1), vocab_size, group)
        ids = right(logits, vocab_size, group)
        ids[-1, -1] += 1
        return ids

    case = Case("argmax", cases.ARGMAX, 1, dtype)
    assert ratio(case, seed) == 0
    monkeypatch.setattr(tpfused, "vocab_parallel_argmax", argmax)
    assert ratio(case, seed) > 1
