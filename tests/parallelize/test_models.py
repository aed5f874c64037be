"""Each architecture against its dense self: logits, loss, gradients, tokens, optimizer steps."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.compare import collectives_made, refuses
from tests.parallelize.models import VOCAB, build, compare, dense_loss, random_ids, twins, whole
from tpfused.layers.embedding import VocabParallelEmbedding
from tpfused.layers.linear import ColumnParallelLinear, RowParallelLinear

pytest.importorskip("transformers")

DECODERS = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "bert-causal"]
MODELS = [*DECODERS, "bert"]
split = pytest.mark.parametrize("tp", [2, 4], indirect=True)
# Transformers' RMSNorm computes in float32 whatever its input is.
TOLERANCE = {"gpt2": 1e-10, "bert": 1e-10, "bert-causal": 1e-10}


def check_gradients(ctx, tp, seed, name, changes):
    dense, model = twins(ctx, tp, seed, name, **changes)
    tolerance = TOLERANCE.get(name, 2e-6)
    ids, mask = random_ids(dense, ctx.device)
    labels = ids.masked_fill(mask == 0, -100)
    logits = dense(ids, attention_mask=mask).logits
    loss = dense_loss(dense, logits, labels)
    loss.backward()

    out = model(ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    own = out.logits.shape[-1]
    assert own == -(-VOCAB // tp) or ctx.rank % tp == tp - 1, "the logits were gathered"
    model.eval()
    with torch.no_grad():
        whole_logits = model(ids, attention_mask=mask).logits
        evaluated = model(ids, attention_mask=mask, labels=labels)
    actual = {"logits": whole_logits, "loss": out.loss, "loss in evaluation": evaluated.loss.double()}
    expected = {"logits": logits, "loss": loss, "loss in evaluation": loss}
    compare(actual, expected, max(tolerance, 1e-6) if tolerance > 1e-8 else 1e-6, str)
    compare({"logits": whole_logits, "loss": out.loss}, {"logits": logits, "loss": loss}, tolerance, str)
    assert evaluated.logits.shape[-1] == VOCAB

    grads = {param: p.grad for param, p in dense.named_parameters()}
    found = {param: p.grad for param, p in model.named_parameters()}
    for param, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.grad.placements == p.placements, param
    compare({p: whole(g, grads[p]) for p, g in found.items()}, grads, tolerance, lambda p: f"gradient of {p}")


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient(workers, tp, seed, name):
    workers.run(check_gradients, tp, seed, name, {})


@split
def test_one_key_value_head_is_on_all_ranks(workers, tp, seed):
    workers.run(check_gradients, tp, seed, "llama", {"num_key_value_heads": 1, "attention_bias": True})


def check_cross_attention(ctx, tp, seed):
    dense, model = twins(ctx, tp, seed, "bert-causal", add_cross_attention=True)
    assert type(model.bert.encoder.layer[0].crossattention.self.key) is ColumnParallelLinear
    ids, mask = random_ids(dense, ctx.device)
    given = {"attention_mask": mask, "encoder_hidden_states": torch.randn(2, 5, 32, dtype=torch.float64).to(ctx.device)}
    loss = dense_loss(dense, dense(ids, **given).logits, ids)
    out = model(ids, **given, labels=ids)
    compare({"loss": out.loss}, {"loss": loss}, 1e-10, str)
    loss.backward()
    out.loss.backward()
    grads = {param: p.grad for param, p in dense.named_parameters()}
    compare({p: whole(v.grad, grads[p]) for p, v in model.named_parameters()}, grads, 1e-10, str)


@split
def test_cross_attention_of_bert(workers, tp, seed):
    workers.run(check_cross_attention, tp, seed)


def check_sharded(ctx, tp, seed):
    """The modules are this package's; their parameters are parts."""
    _, model = twins(ctx, tp, seed, "qwen2")
    layer = model.model.layers[0]
    assert type(layer.mlp.up_proj) is ColumnParallelLinear and type(layer.mlp.down_proj) is RowParallelLinear
    assert type(model.model.embed_tokens) is VocabParallelEmbedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert layer.mlp.up_proj.weight.placements == (Shard(0),) and layer.mlp.down_proj.weight.placements == (Shard(1),)
    assert layer.input_layernorm.weight.placements == (Replicate(),)
    if ctx.device.type == "cpu":  # on a GPU the overlapped operations communicate by themselves
        ids, _ = random_ids(model, ctx.device)
        with collectives_made() as names:
            model(ids, labels=ids)
        # The embedding's, two a layer, and the loss's two: the logits are not gathered.
        assert names == ["all_reduce"] * (1 + 2 * model.config.num_hidden_layers + 2)


@split
def test_modules_become_parallel_layers(workers, tp, seed):
    workers.run(check_sharded, tp, seed)


def check_generate(ctx, tp, seed, name):
    dense, model = twins(ctx, tp, seed, name, dtype=torch.float32)
    for m in (dense, model):
        m.eval()
    ids, mask = random_ids(dense, ctx.device)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected = dense.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    if name in ("llama", "gpt2"):
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


@split
@pytest.mark.parametrize("name", DECODERS)
def test_generates_the_dense_models_tokens(workers, tp, seed, name):
    workers.run(check_generate, tp, seed, name)


def check_vocabulary(ctx, tp, seed, name, vocab):
    dense, model = twins(ctx, tp, seed, name, vocab_size=vocab, **_THIN[name])
    ids = torch.tensor([[2, vocab - 1, vocab // 2, 3]], device=ctx.device)
    logits = dense(ids).logits
    loss = dense_loss(dense, logits, ids)
    loss.backward()
    out = model(ids, labels=ids)
    out.loss.backward()
    tables = [m.get_input_embeddings().weight for m in (dense, model)]
    actual = {"loss": out.loss, "table": whole(tables[1].grad, tables[0])}
    actual["logits"] = model(ids).logits
    expected = {"loss": loss, "table": tables[0].grad, "logits": logits}
    compare(actual, expected, TOLERANCE.get(name, 2e-6), lambda what: f"{what} of {vocab}")


_THIN = {
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_inner": 8},
    "bert": {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8},
    "qwen2": {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8},
}


@pytest.mark.parametrize("tp", [4], indirect=True)
@pytest.mark.parametrize("name, vocab", [("gpt2", 50257), ("bert", 30522), ("qwen2", 151936)])
def test_vocabularies_of_the_published_models(workers, tp, seed, name, vocab):
    workers.run(check_vocabulary, tp, seed, name, vocab)


def check_adamw(ctx, tp, seed, name):
    dense, model = twins(ctx, tp, seed, name)
    ids, mask = random_ids(dense, ctx.device)
    losses = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1) for m in (dense, model)]
    for _ in range(10):
        loss = dense_loss(dense, dense(ids, attention_mask=mask).logits, ids)
        own = model(ids, attention_mask=mask, labels=ids).loss
        losses.append((own.item(), loss.item()))
        for value, optimizer in zip((loss, own), optimizers, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1][1] < losses[0][1]
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in losses), losses
    if name in TOLERANCE:
        # The gradients of BERT's key biases are zero but for rounding, and Adam makes steps of them.
        expected = {p: v.detach() for p, v in dense.named_parameters() if not p.endswith("key.bias")}
        found = dict(model.named_parameters())
        compare({p: whole(found[p].detach(), v) for p, v in expected.items()}, expected, 1e-5, str)
    if dense.config.tie_word_embeddings:
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@split
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bert"])
def test_ten_steps_of_adamw(workers, tp, seed, name):
    workers.run(check_adamw, tp, seed, name)


def check_other_heads(ctx, tp, seed):
    """Losses that transformers does not compute in a place of their own: the logits are gathered for them."""
    dense, model = twins(ctx, tp, seed, "gpt2-double", dtype=torch.float32)
    ids = torch.randint(2, VOCAB, (2, 2, 7), device=ctx.device)
    given = {"labels": ids, "mc_labels": torch.tensor([0, 1], device=ctx.device)}
    given["mc_token_ids"] = torch.full((2, 2), 6, device=ctx.device)
    expected, out = dense(ids, **given), model(ids, **given)
    torch.testing.assert_close((out.loss, out.mc_loss), (expected.loss, expected.mc_loss), rtol=1e-4, atol=1e-5)

    dense, model = twins(ctx, tp, seed, "bert-base", dtype=torch.float32)
    ids, mask = random_ids(dense, ctx.device)
    expected, out = dense(ids, mask), model(ids, mask)
    torch.testing.assert_close(out.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)


@split
def test_models_without_a_sharded_loss(workers, tp, seed):
    workers.run(check_other_heads, tp, seed)


def check_loss_options(ctx, tp, seed, name):
    """The arguments that transformers' losses take, positional labels, and outputs that are tuples."""
    dense, model = twins(ctx, tp, seed, name, dtype=torch.float32)
    ids, mask = random_ids(dense, ctx.device)
    given = {"attention_mask": mask, "labels": ids}
    if name != "bert":  # whose loss takes no options
        given["num_items_in_batch"] = 5
    expected, (loss, logits) = dense(ids, **given).loss, model(ids, **given, return_dict=False)[:2]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert logits.shape[-1] < VOCAB
    out = model(ids, **given)
    assert list(out)[:2] == ["loss", "logits"] and out[0] is out.to_tuple()[0] is out.loss
    torch.testing.assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
    names = list(inspect.signature(type(dense).forward).parameters)[1:]
    positional = [{"input_ids": ids, "labels": ids}.get(n) for n in names[: names.index("labels") + 1]]
    out = model(*positional)
    torch.testing.assert_close(out.loss, dense(*positional).loss, rtol=1e-5, atol=1e-5)
    assert out.logits.shape[-1] < VOCAB
    for error, labels, told in ((ValueError, ids[:1], tuple(ids.shape)), (TypeError, [1], "list")):
        with refuses(error, "labels", told):
            model(ids, labels=labels)


@split
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_loss_options(workers, tp, seed, name):
    workers.run(check_loss_options, tp, seed, name)


def check_compiled(ctx, seed):
    """All of it in one graph, the loss of sharded logits too."""
    _, model = twins(ctx, ctx.world, seed, "llama", num_hidden_layers=1)
    ids, mask = random_ids(model, ctx.device)
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = call(ids, attention_mask=mask, labels=ids)
        out.loss.backward()
        assert out.logits.shape[-1] == -(-VOCAB // ctx.world) or ctx.rank == ctx.world - 1
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results.append({"loss": out.loss.detach(), "logits": out.logits.detach(), **grads})
    compare(results[1], results[0], 1e-6, lambda what: f"{what}, compiled")


def test_torch_compile(workers, seed):
    workers.run(check_compiled, seed)


def check_checkpointing(ctx, tp, seed):
    """Activation checkpointing with dropout: recomputation draws what forward drew."""
    drops = {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    _, model = twins(ctx, tp, seed, "gpt2", **drops)
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    ids, mask = random_ids(model, ctx.device)
    grads = []
    for m in (model, again):
        torch.manual_seed(seed)
        m(ids, attention_mask=mask, labels=ids).loss.backward()
        grads.append({name: p.grad.full_tensor() for name, p in m.named_parameters()})
    compare(grads[1], grads[0], 1e-10, str)


@split
def test_activation_checkpointing_draws_the_same_dropout(workers, tp, seed):
    workers.run(check_checkpointing, tp, seed)


def check_built_on_the_cpu(ctx, tp, seed):
    """The model may be elsewhere: its parts go to the mesh's devices."""
    import tpfused

    torch.manual_seed(seed + ctx.rank // tp)
    model = tpfused.parallelize(build("llama"), ctx.mesh(tp))
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {ctx.device.type}


@split
def test_a_model_on_the_cpu_goes_to_the_meshs_devices(workers, tp, seed):
    workers.run(check_built_on_the_cpu, tp, seed)


def check_pickle(ctx, tp, seed, name):
    """Pickle and torch.save, with dropout's hooks and the loss of sharded logits."""
    _, model = twins(ctx, tp, seed, name, **DROPOUT[name])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    ids, mask = random_ids(model, ctx.device)
    losses = []
    for m in (model, pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert [type(module) for module in m.modules()] == [type(module) for module in model.modules()]
        torch.manual_seed(seed)
        losses.append(m(ids, attention_mask=mask, labels=ids).loss)
        losses[-1].backward()
        grads = {p: v.grad.full_tensor() for p, v in m.named_parameters()}
        compare(grads, {p: v.grad.full_tensor() for p, v in model.named_parameters()}, 1e-10, str)
    assert losses[0] == losses[1] == losses[2]


DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "bert": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3},
}


@split
@pytest.mark.parametrize("name", DROPOUT)
def test_pickle(workers, tp, seed, name):
    workers.run(check_pickle, tp, seed, name)


def check_save_pretrained(ctx, tp, seed, folder):
    _, model = twins(ctx, tp, seed, "llama")
    for m in (model, model.model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="save_sharded"):
            m.save_pretrained(folder)


@split
def test_save_pretrained_is_refused(workers, tp, seed, tmp_path):
    workers.run(check_save_pretrained, tp, seed, tmp_path)
    assert not list(tmp_path.iterdir())
