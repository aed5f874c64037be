"""LoRA by peft, put around the dense model's linear layers before it is split."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tpfused
from tests.compare import refuses
from tests.parallelize.models import build, compare, dense_loss, random_ids, whole
from tests.parallelize.test_models import TOLERANCE

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)
TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "bert-causal": ["query", "value", "dense"]}
_DECODER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(ctx, tp, seed, name, **changes):
    torch.manual_seed(seed + ctx.rank // tp)
    given = {"r": 3, "target_modules": TARGETS.get(name, _DECODER), "init_lora_weights": False}
    config = peft.LoraConfig(**given | {"fan_in_fan_out": name == "gpt2"} | changes)
    return peft.get_peft_model(build(name), config).to(ctx.device, torch.float64).train()


def check_gradients(ctx, tp, seed, name, inner):
    dense = adapted(ctx, tp, seed, name)
    model = copy.deepcopy(dense)
    tpfused.parallelize(model.base_model.model if inner else model, ctx.mesh(tp))
    tolerance = TOLERANCE.get(name, 2e-6)
    ids, mask = random_ids(dense, ctx.device)
    logits = dense(input_ids=ids, attention_mask=mask).logits
    loss = dense_loss(dense, logits, ids)
    loss.backward()
    out = model(input_ids=ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    whole_logits = model(input_ids=ids, attention_mask=mask).logits
    losses = {"logits": (whole_logits, logits), "loss": (out.loss.double(), loss)}
    for what, (mine, right) in losses.items():
        # Of gathered logits transformers computes the loss, in float32.
        compare({what: mine}, {what: right}, tolerance if inner or what == "logits" else max(tolerance, 1e-6), str)
    found = dict(model.named_parameters())
    grads = {param: p.grad for param, p in dense.named_parameters() if p.grad is not None}
    assert all("lora_" in param for param in grads) and grads
    assert grads.keys() == {param for param, p in found.items() if p.grad is not None}
    bound = tolerance if inner else max(tolerance, 2e-6)
    compare({p: whole(found[p].grad, g) for p, g in grads.items()}, grads, bound, lambda p: f"gradient of {p}")
    with model.disable_adapter(), dense.disable_adapter():
        logits = [m.eval()(input_ids=ids, attention_mask=mask).logits for m in (model, dense)]
    compare({"without": logits[0]}, {"without": logits[1]}, tolerance, str)


@split
@pytest.mark.parametrize("inner", [False, True], ids=["wrapper", "inner"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert-causal"])
def test_adapters_are_split_with_their_layers(workers, tp, seed, name, inner):
    workers.run(check_gradients, tp, seed, name, inner)


def check_dropout(ctx, tp, seed):
    """An adapter's dropout is on an input that is whole before columns: what is whole behind it stays in step."""
    group = ctx.group(tp)
    model = adapted(ctx, tp, seed, "llama", lora_dropout=0.5)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    tpfused.parallelize(model, ctx.mesh(tp))
    ids, mask = random_ids(model, ctx.device)
    torch.manual_seed(seed)
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    whole_grads = [
        p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor) and p.placements[0].is_replicate()
    ]
    assert whole_grads
    for grad in (*whole_grads, torch.rand(3, device=ctx.device, dtype=torch.float64)):
        of_all = [torch.empty_like(grad) for _ in range(tp)]
        dist.all_gather(of_all, grad.contiguous(), group)
        for other in of_all[1:]:
            torch.testing.assert_close(other, of_all[0], rtol=1e-9, atol=1e-12)


@split
def test_dropout_of_adapters(workers, tp, seed):
    workers.run(check_dropout, tp, seed)


def check_generate(ctx, tp, seed):
    dense = adapted(ctx, tp, seed, "llama").eval()
    model = tpfused.parallelize(copy.deepcopy(dense), ctx.mesh(tp))
    ids, mask = random_ids(dense, ctx.device)
    options = {"attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0}
    expected = dense.generate(input_ids=ids, do_sample=False, **options)
    for m in (model, model.base_model, model.base_model.model):
        assert torch.equal(m.generate(input_ids=ids, do_sample=False, **options), expected)
        torch.manual_seed(seed + ctx.rank)
        with refuses(ValueError, "generate draws tokens", "the random generator of rank"):
            m.generate(input_ids=ids, do_sample=True, **options)


@split
def test_generate(workers, tp, seed):
    workers.run(check_generate, tp, seed)


def check_refused(ctx, seed):
    mesh = ctx.mesh(ctx.world)
    for changes, told in (
        ({"use_dora": True}, "DoraLinearVariant"),
        ({"target_modules": ["embed_tokens"]}, "vocab_embedding"),
    ):
        with refuses(ValueError, told, "LoRA layer of peft"):
            tpfused.parallelize(adapted(ctx, ctx.world, seed, "llama", **changes), mesh)
    dense = adapted(ctx, ctx.world, seed, "llama")
    for model in (torch.nn.parallel.DistributedDataParallel(dense), tpfused.parallelize(dense, mesh)):
        with refuses(ValueError, "peft's adapters", "full_state_dict"):
            tpfused.save_sharded(model, "nowhere")


def test_what_is_refused_of_lora(workers, seed):
    workers.run(check_refused, seed)
