"""A GPT of megatron-core, once with its own tensor-parallel layers and once with tpfused's, where it is installed.

It expects a GPU in places that a CPU serves as well: they are patched here for gloo. Its layer norms for sequence
parallelism come with other packages; a plain one stands in for them.
"""

import inspect
import warnings
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from tests.compare import Block, assert_within_rule
from tests.layers.paths import paths
from tpfused.compat import megatron
from tpfused.compat.megatron import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

pytestmark = pytest.mark.skipif(
    not (find_spec("megatron") and find_spec("megatron.core")), reason="megatron-core is not installed"
)
BATCH = 2
SMALL = {"hidden_size": 16, "num_attention_heads": 4, "tokens": 8, "vocabulary": 32}
# As real models have it: the overlapped operations have enough rows to cut, and the kernels are those for 16 bits.
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "tokens": 1024, "vocabulary": 1024}


class Norm(torch.nn.LayerNorm):
    """Of this rank's tokens under sequence parallelism: its gradients are partial sums, and say so."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel


@contextmanager
def parallel_state_of(ctx, tp):
    """Megatron with `tp` ranks to a tensor-parallel group."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if ctx.device.type == "cpu":
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        from megatron.core import parallel_state
        from megatron.core.models import backends
        from megatron.core.tensor_parallel.random import initialize_rng_tracker
        from megatron.core.transformer import transformer_block

        patch.setattr(backends, "LNImpl", Norm)
        patch.setattr(transformer_block, "LayerNormImpl", Norm)
        initialize_rng_tracker(inference_rng_tracker=True)  # the one that needs no GPU; nothing is drawn from it
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def our_layers():
    """What changing the import does, in Megatron's own modules."""
    from megatron.core import tensor_parallel
    from megatron.core.models import backends
    from megatron.core.transformer import dot_product_attention

    with pytest.MonkeyPatch.context() as patch:
        for name in megatron.__all__:
            patch.setattr(tensor_parallel, name, getattr(megatron, name), raising=False)
        for kind in (ColumnParallelLinear, RowParallelLinear):
            patch.setattr(backends, kind.__name__, kind)
        patch.setattr(dot_product_attention, "FusedScaleMaskSoftmax", megatron.FusedScaleMaskSoftmax)
        yield


def build(block, tied, *, tokens, vocabulary, **settings):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        tensor_model_parallel_size=block.tp,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=True,
        **settings,
    )
    torch.manual_seed(block.seed)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocabulary, tokens, share_embeddings_and_output_weights=tied)
    return model.to(block.device, config.params_dtype)


def train_step(model, block):
    """The loss of each token, and all gradients after what Megatron does once backward has returned."""
    torch.manual_seed(block.seed)
    tokens = model.max_sequence_length
    ids, labels = torch.randint(model.vocab_size, (2, BATCH, tokens), device=block.device)
    positions = torch.arange(tokens, device=block.device).expand(BATCH, -1)
    hidden = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=block.device).triu(1)
    model.zero_grad()
    loss = model(ids, positions, hidden, labels=labels)
    loss.mean().backward()
    for param in model.parameters():
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(param.grad, group=block.group)
    return {"loss": loss.detach()} | {name: param.grad.clone() for name, param in model.named_parameters()}


def check_gpt(ctx, tp, seed, tied, **settings):
    block = Block(ctx, tp, "group", seed)
    with parallel_state_of(ctx, tp):
        theirs = build(block, tied, **SMALL, **settings)
        expected = train_step(theirs, block)
        with our_layers():
            ours = build(block, tied, **SMALL, **settings)
            actual = train_step(ours, block)
        kinds = {type(module) for module in ours.modules()}
        assert {ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding} <= kinds
        assert megatron.FusedScaleMaskSoftmax in kinds
        # The same bits from one seed, by the same names.
        weights = dict(theirs.named_parameters())
        assert weights.keys() == dict(ours.named_parameters()).keys()
        for name, param in ours.named_parameters():
            assert torch.equal(param, weights[name]), name
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                assert getattr(param, attribute, None) == getattr(weights[name], attribute, None), (name, attribute)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            error, scale = (value - expected[name]).abs().max(), expected[name].abs().max()
            assert error <= 1e-5 * max(scale, 1e-2), f"{name}: error {error} on values up to {scale}"
        check_states(theirs, ours)


def check_large_gpt(ctx, tp, seed, **settings):
    """In bfloat16, and in each way that our layers run: Megatron's are here what eager torch is to other tests."""
    block = Block(ctx, tp, "group", seed)
    settings |= LARGE | {"params_dtype": torch.bfloat16}
    with parallel_state_of(ctx, tp):
        theirs = build(block, False, **settings)
        eager = train_step(theirs, block)
        expected = train_step(theirs.double(), block)
        with our_layers():
            ours = build(block, False, **settings)
            for path in paths(ctx, tp):
                actual = train_step(ours, block)
                assert actual.keys() == expected.keys()
                for name, value in actual.items():
                    what = f"{name} by {path}"
                    assert_within_rule(value, expected[name], eager[name], lambda own: own, what, chain=True)


def check_states(theirs, ours):
    """Both load what the other saved, and describe the same shards to Megatron's distributed checkpoints."""
    from megatron.core import parallel_state

    state = theirs.state_dict()
    assert any(name.endswith("_extra_state") for name in state)
    ours.load_state_dict(state, strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    # Empty extra states too: Megatron asks a checkpoint for those of its layers.
    expected, actual = (model.sharded_state_dict(metadata=metadata) for model in (theirs, ours))
    assert actual.keys() == expected.keys()
    told = "key", "global_shape", "global_offset", "axis_fragmentations", "replica_id", "allow_shape_mismatch"
    for name, shard in actual.items():
        for what in told:
            assert getattr(shard, what, None) == getattr(expected[name], what, None), (name, what)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gpt_is_the_same(workers, tp, seed, tied, sequence_parallel):
    sequence_parallel = sequence_parallel and tp > 1  # Megatron's config refuses it for one rank
    workers.run(check_gpt, tp, seed, tied, sequence_parallel=sequence_parallel)


def test_gated_gpt_is_the_same(workers, tp, seed):
    silu = torch.nn.functional.silu
    workers.run(check_gpt, tp, seed, False, gated_linear_unit=True, activation_func=silu, add_bias_linear=False)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["cuda"], indirect=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_large_gpt_is_the_same(workers, tp, seed, sequence_parallel):
    sequence_parallel = sequence_parallel and tp > 1
    workers.run(check_large_gpt, tp, seed, sequence_parallel=sequence_parallel)


def call_of(function):
    """Names, kinds and defaults of what can be given, but for what Megatron's versions do not agree on."""
    parameters = inspect.signature(function).parameters.values()
    later = "tp_group", "name", "output_dtype", "pg_collection"
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in later]


def check_names(ctx):
    from megatron.core import tensor_parallel
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType

    for name in set(megatron.__all__) - {"AttnMaskType"}:
        ours, theirs = getattr(megatron, name), getattr(tensor_parallel, name, FusedScaleMaskSoftmax)
        assert call_of(ours) == call_of(theirs), name
        if isinstance(ours, type):
            assert call_of(ours.forward) == call_of(theirs.forward), name
    assert megatron.model_parallel_cuda_manual_seed is tensor_parallel.model_parallel_cuda_manual_seed
    # Module by module: what is here comes first, and what is not, private names too, is Megatron's.
    for module, ours, theirs in (
        ("layers", "RowParallelLinear", "set_tensor_model_parallel_attributes"),
        ("mappings", "scatter_to_sequence_parallel_region", "_gather_along_first_dim"),
        ("cross_entropy", "vocab_parallel_cross_entropy", "VocabParallelCrossEntropy"),
        ("random", None, "get_cuda_rng_tracker"),
        ("utils", None, "split_tensor_along_last_dim"),
        ("data", None, "broadcast_data"),
        ("inference_layers", None, "InferenceRowParallelLinear"),
    ):
        here = import_module(f"tpfused.compat.megatron.{module}")
        there = import_module(f"megatron.core.tensor_parallel.{module}")
        assert getattr(here, theirs) is getattr(there, theirs)
        assert ours is None or getattr(here, ours) is getattr(megatron, ours)
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = here.no_such_name
    assert megatron.cross_entropy.vocab_parallel_cross_entropy is megatron.vocab_parallel_cross_entropy
    assert {kind.name: kind.value for kind in AttnMaskType} == {k.name: k.value for k in megatron.AttnMaskType}
    softmax = megatron.FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, True, None)
    assert not softmax(torch.ones(1, 1, 4, 4), None).triu(1).any()


def test_names_that_are_megatrons(workers):
    workers.run(check_names)
