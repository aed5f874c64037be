"""tpfused.compat.megatron against dense computation: outputs, all gradients, and what Megatron's programs look at."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import Block, compare, strided
from tpfused import full_state_dict
from tpfused.compat import megatron
from tpfused.compat.megatron import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tpfused.layers import linear

TOKENS, BATCH, IN, OUT = 8, 2, 12, 16


def config_of(block, **settings):
    """On a machine with GPUs, a test on the CPU has to ask for it."""
    known = {"params_dtype": torch.float64, "use_cpu_initialization": block.device.type == "cpu"}
    return SimpleNamespace(**known | settings)


def make(kind, block, *sizes, sequence_parallel=False, fused=False, init=nn.init.normal_, **options):
    config = config_of(block, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused)
    if kind is RowParallelLinear:
        options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **options}
    return kind(*sizes, config=config, init_method=init, tp_group=block.group, **options)


def filling(whole):
    """An init_method that draws nothing: the weight is known."""
    return lambda weight: weight.copy_(whole)


def linear_case(kind, block, sequence_parallel, own_weight=True, **options):
    """A layer's output (a returned bias added) and gradients against `F.linear`."""
    weight, bias = block.randn(OUT, IN), block.randn(OUT)
    x, grad = block.randn(TOKENS, BATCH, IN), block.randn(TOKENS, BATCH, OUT)
    column = kind is ColumnParallelLinear
    weight_dim, bias_dim = (0, 0) if column else (1, None)
    tokens_dim = 0 if sequence_parallel else None
    runtime = options.pop("runtime_gather_output", None)
    gathered = options.get("gather_output", False) if runtime is None else runtime
    input_dim = -1 if options.get("input_is_parallel", True) else None
    x_dim, out_dim = (tokens_dim, None if gathered else -1) if column else (input_dim, tokens_dim)

    layer = make(kind, block, IN, OUT, sequence_parallel=sequence_parallel, init=filling(weight.float()), **options)
    with torch.no_grad():
        layer.bias.copy_(block.own(bias, bias_dim))
    if own_weight:
        assert torch.equal(layer.weight, block.own(weight.float(), weight_dim).double())
    given = nn.Parameter(block.own(weight, weight_dim).clone())
    if own_weight:
        layer.weight = given  # replaced, as programs do
    mine = strided(block.own(x, x_dim)).detach().requires_grad_()
    extra = ({} if own_weight else {"weight": given}) | ({} if runtime is None else {"runtime_gather_output": runtime})
    out, returned = layer(mine, **extra)
    assert (returned is not None) == options.get("skip_bias_add", False)
    if returned is not None:
        assert torch.equal(returned, layer.bias)
        if column and gathered:  # as in Megatron, the bias is this rank's
            returned = megatron.gather_from_tensor_model_parallel_region(returned, group=block.group)
        out = out + returned
    out.backward(strided(block.own(grad, out_dim)))
    dims = {"out": out_dim, "x": x_dim, "weight": weight_dim, "bias": bias_dim}
    compare(
        {"out": out.detach(), "x": mine.grad, "weight": given.grad, "bias": layer.bias.grad},
        F.linear,
        {"x": x, "weight": weight, "bias": bias},
        grad,
        lambda name, tensor: block.own(tensor, dims[name]),
        f"{kind.__name__}, {sequence_parallel=}, {own_weight=}, {options}",
    )


def check_column(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    torch.manual_seed(block.seed)
    for sequence_parallel in (False, True):
        for options in (
            {},
            {"skip_bias_add": True},
            {"gather_output": True},
            {"gather_output": True, "skip_bias_add": True},
            {"runtime_gather_output": True},
            {"gather_output": True, "runtime_gather_output": False},
        ):
            linear_case(ColumnParallelLinear, block, sequence_parallel, **options)
        linear_case(ColumnParallelLinear, block, sequence_parallel, own_weight=False, skip_weight_param_allocation=True)


def check_row(ctx, tp, mode, seed):
    block = Block(ctx, tp, mode, seed)
    torch.manual_seed(block.seed)
    for sequence_parallel in (False, True):
        for options in ({}, {"skip_bias_add": True}, {"input_is_parallel": False}):
            linear_case(RowParallelLinear, block, sequence_parallel, **options)


@pytest.mark.parametrize("mode", ["group", "strided"])
def test_column_equals_dense(workers, tp, mode, seed):
    workers.run(check_column, tp, mode, seed)


@pytest.mark.parametrize("mode", ["group", "strided"])
def test_row_equals_dense(workers, tp, mode, seed):
    workers.run(check_row, tp, mode, seed)


def check_model(ctx, tp, seed):
    """Embedding, feed-forward, and the embedding's weight again as output layer, as Megatron's models call them."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    vocabulary, hidden, ffn = 16, 8, 24
    table, w1, w2 = block.randn(vocabulary, hidden), block.randn(ffn, hidden), block.randn(hidden, ffn)
    b2 = block.randn(hidden)
    ids = torch.randint(vocabulary, (BATCH, TOKENS), device=block.device)
    labels = torch.randint(vocabulary, (TOKENS, BATCH), device=block.device)
    grad = block.randn(TOKENS, BATCH)
    dims = {"table": 0, "w1": 0, "w2": 1}

    def dense(table, w1, w2, b2):
        x = F.embedding(ids, table).transpose(0, 1)
        x = x + F.linear(F.gelu(F.linear(x, w1)), w2, b2)
        return F.cross_entropy(F.linear(x, table).permute(0, 2, 1), labels, reduction="none")

    for sequence_parallel in (False, True):
        place = {"sequence_parallel": sequence_parallel}
        embedding = make(
            VocabParallelEmbedding,
            block,
            vocabulary,
            hidden,
            reduce_scatter_embeddings=sequence_parallel,
            init=filling(table.float()),
        )
        fc1 = make(ColumnParallelLinear, block, hidden, ffn, bias=False, init=filling(w1.float()), **place)
        fc2 = make(RowParallelLinear, block, ffn, hidden, skip_bias_add=True, init=filling(w2.float()), **place)
        head = make(
            ColumnParallelLinear, block, hidden, vocabulary, bias=False, skip_weight_param_allocation=True, **place
        )
        with torch.no_grad():
            for param, whole, dim in ((embedding.weight, table, 0), (fc1.weight, w1, 0), (fc2.weight, w2, 1)):
                param.copy_(block.own(whole, dim))
            fc2.bias.copy_(b2)
        x = embedding(ids)
        x = x if sequence_parallel else x.transpose(0, 1).contiguous()
        out, bias = fc2(F.gelu(fc1(x)[0]))
        logits, _ = head(x + (out + bias), weight=embedding.weight, runtime_gather_output=False)
        loss = megatron.vocab_parallel_cross_entropy(logits, labels, tp_group=block.group)
        loss.backward(grad)
        assert list(head.state_dict()) == [] and head.bias is None
        compare(
            {
                "out": loss.detach(),
                "table": embedding.weight.grad,
                "w1": fc1.weight.grad,
                "w2": fc2.weight.grad,
                "b2": fc2.bias.grad,
            },
            dense,
            {"table": table, "w1": w1, "w2": w2, "b2": b2},
            grad,
            lambda name, tensor: block.own(tensor, dims.get(name)),
            f"a model with {place}",
        )


def test_a_model_with_a_tied_output_layer(workers, tp, seed):
    workers.run(check_model, tp, seed)


def check_partial_gradients(ctx, tp, seed):
    """Without their reduction, the gathered tokens of sequence parallelism sum the gradients, as adapters have it."""
    block = Block(ctx, tp, "group", seed)
    torch.manual_seed(block.seed)
    x, weight, bias = block.randn(TOKENS, BATCH, IN), block.randn(OUT, IN), block.randn(OUT)
    grad = block.randn(TOKENS, BATCH, OUT)
    for gather, sequence_parallel in ((False, False), (True, False), (False, True)):
        layer = make(
            ColumnParallelLinear,
            block,
            IN,
            OUT,
            sequence_parallel=sequence_parallel,
            init=filling(weight.float()),
            gather_output=gather,
            disable_grad_reduce=True,
        )
        with torch.no_grad():
            layer.weight.copy_(block.own(weight, 0))
            layer.bias.copy_(block.own(bias, 0))
        mine = block.own(x, 0).clone().requires_grad_()
        whole = mine if sequence_parallel else megatron.gather_from_sequence_parallel_region(mine, group=block.group)
        out, _ = layer(whole)
        out.backward(block.own(grad, None if gather else -1))
        dims = {"out": None if gather else -1, "x": 0, "weight": 0, "bias": 0}
        compare(
            {"out": out.detach(), "x": mine.grad, "weight": layer.weight.grad, "bias": layer.bias.grad},
            F.linear,
            {"x": x, "weight": weight, "bias": bias},
            grad,
            lambda name, tensor, dims=dims: block.own(tensor, dims[name]),
            f"disable_grad_reduce, {gather=}, {sequence_parallel=}",
        )


def test_disable_grad_reduce(workers, tp, seed):
    workers.run(check_partial_gradients, tp, seed)


def check_main_grads(ctx, tp, seed):
    """As Megatron's ``gradient_accumulation_fusion``: `main_grad` takes the weight's gradient, and `grad` zeros."""
    block = Block(ctx, tp, "group", seed)
    for kind, given in ((ColumnParallelLinear, False), (ColumnParallelLinear, True), (RowParallelLinear, False)):
        for sequence_parallel, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
            torch.manual_seed(block.seed)
            place = {"sequence_parallel": sequence_parallel}
            layer = make(kind, block, 16, 16, fused=True, **place).to(dtype)
            plain = make(kind, block, 16, 16, **place).to(dtype)
            plain.load_state_dict(layer.state_dict())
            weight = nn.Parameter(layer.weight.detach().clone()) if given else layer.weight
            weight.main_grad = torch.ones_like(weight)
            weight.grad_added_to_main_grad = False
            x = block.randn(8 // tp if sequence_parallel and kind is ColumnParallelLinear else 8, 2, 16).to(dtype)
            x = block.own(x, -1) if kind is RowParallelLinear else x
            for _ in range(2):
                layer(x, **({"weight": weight} if given else {}))[0].sum().backward()
            plain(x)[0].sum().backward()
            assert weight.grad_added_to_main_grad and not weight.grad.any()
            assert weight.main_grad.dtype == dtype
            eps = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(weight.main_grad, 1 + 2 * plain.weight.grad, rtol=eps, atol=eps * 16)
            torch.testing.assert_close(layer.bias.grad, 2 * plain.bias.grad)
    without = make(ColumnParallelLinear, block, 16, 16, fused=True)
    without(block.randn(8, 2, 16))[0].sum().backward()
    assert without.weight.grad.any()
    without.backward_dw()  # which Megatron's models call


def test_gradient_accumulation_fusion(workers, tp, seed):
    workers.run(check_main_grads, tp, seed)


def check_what_native_layers_have(ctx, tp, seed):
    """`backend` and `save_gathered` are the native layers', and a program may set them."""
    block, seen = Block(ctx, tp, "group", seed), []
    column = make(ColumnParallelLinear, block, 8, 16, sequence_parallel=True)
    column.backend, column.save_gathered = "reference", True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "column_forward", lambda *args, **options: seen.append(options))
        column(block.randn(8, 1, 8))
    assert (seen[0]["backend"], seen[0]["save_gathered"]) == ("reference", True)


def test_what_native_layers_have(workers, tp, seed):
    workers.run(check_what_native_layers_have, tp, seed)


def check_attributes(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    options = {"sequence_parallel": True}
    column = make(ColumnParallelLinear, block, 8, 16, stride=2, **options)
    row = make(RowParallelLinear, block, 8, 16, **options)
    embedding = make(VocabParallelEmbedding, block, 16, 8)
    assert (column.input_size, column.output_size, column.output_size_per_partition) == (8, 16, 16 // tp)
    assert (row.input_size, row.output_size, row.input_size_per_partition) == (8, 16, 8 // tp)
    own = 16 // tp
    assert (embedding.vocab_start_index, embedding.vocab_end_index) == (block.rank * own, block.rank * own + own)
    assert embedding.num_embeddings_per_partition == own
    for layer in (column, row):
        assert not (layer.is_expert or layer.expert_parallel or layer.explicit_expert_comm)
        assert layer.sequence_parallel and not layer.gradient_accumulation_fusion
    for settings, reduces in (({}, tp > 1), (options, False), ({"disable_grad_reduce": True}, False)):
        assert make(ColumnParallelLinear, block, 8, 16, **settings).allreduce_dgrad is reduces
    assert column.embedding_activation_buffer is column.grad_output_buffer is None and not column.disable_grad_reduce
    column.weight = nn.Parameter(column.weight.detach().clone())  # a replacement is marked too
    for layer in (column, row, embedding):
        assert layer.tp_group is block.group
        for module in (layer, copy.deepcopy(layer), copy.deepcopy(layer).float()):
            for name, param in module.named_parameters():
                assert param.allreduce
                if module.partition_dims.get(name) is None:
                    assert not hasattr(param, "tensor_model_parallel") and not param.sequence_parallel
                else:
                    marks = param.tensor_model_parallel, param.partition_dim, param.partition_stride
                    assert marks == (True, 1 if layer is row else 0, 2 if layer is column else 1)


def test_attributes_of_layers_and_parameters(workers, tp, seed):
    workers.run(check_attributes, tp, seed)


def check_init(ctx, tp, seed):
    """One seed gives one model at every degree; blocks of a strided layer are split one by one."""
    block = Block(ctx, tp, "group", seed)

    def drawn(shape):
        torch.manual_seed(block.seed)
        dtype, device = (torch.float32, None) if block.device.type == "cpu" else (torch.float64, block.device)
        return torch.randn(shape, dtype=dtype, device=device).double()

    gate, up = drawn((16, 8)).chunk(2)
    for stride, whole in ((1, torch.cat((gate, up))), (2, None)):
        torch.manual_seed(block.seed)
        layer = make(ColumnParallelLinear, block, 8, 16, stride=stride)
        mine = torch.cat((block.own(gate, 0), block.own(up, 0))) if whole is None else block.own(whole, 0)
        assert torch.equal(layer.weight, mine) and not layer.bias.any()
    torch.manual_seed(block.seed)
    row = make(RowParallelLinear, block, 8, 16)
    assert torch.equal(row.weight, block.own(drawn((16, 8)), 1)) and not row.bias.any()
    state = full_state_dict(row)
    assert not state or torch.equal(state["weight"].cpu(), drawn((16, 8)).cpu())  # on the first rank
    torch.manual_seed(block.seed)
    embedding = make(VocabParallelEmbedding, block, 16, 8)
    assert torch.equal(embedding.weight, block.own(drawn((16, 8)), 0))

    def fail(weight):
        raise AssertionError("perform_initialization=False called the init_method")

    torch.manual_seed(block.seed)  # None: as if it were not there
    config = config_of(block, perform_initialization=None, sequence_parallel=None)
    column = ColumnParallelLinear(8, 16, config=config, init_method=nn.init.normal_, tp_group=block.group)
    assert torch.equal(column.weight, block.own(drawn((16, 8)), 0)) and column.sequence_parallel is False

    config = config_of(block, perform_initialization=False)
    ColumnParallelLinear(8, 16, config=config, init_method=fail, tp_group=block.group)
    VocabParallelEmbedding(16, 8, config=config, init_method=fail, tp_group=block.group)


def test_initial_weights(workers, tp, seed):
    workers.run(check_init, tp, seed)


def check_state(ctx, tp, seed):
    block = Block(ctx, tp, "group", seed)
    model = nn.ModuleDict(
        {"column": make(ColumnParallelLinear, block, 8, 16), "row": make(RowParallelLinear, block, 16, 8)}
    )
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    assert set(state) == {"column.weight", "column.bias", "row.weight", "row.bias"}
    for extra in ({}, {"column._extra_state": None, "row._extra_state": None}):
        model.load_state_dict(state | extra, strict=True)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model["row"].load_state_dict({"_extra_state": None, "weight": state["row.weight"], "bias": state["row.bias"]})
    with pytest.raises(RuntimeError, match="other_state"):
        model.load_state_dict(state | {"row.other_state": torch.ones(1)})


def test_state_dicts(workers, tp, seed):
    workers.run(check_state, tp, seed)


def test_one_process_honours_torchs_defaults():
    cpu = SimpleNamespace(use_cpu_initialization=True)
    torch.set_default_dtype(torch.float64)
    try:
        layer = ColumnParallelLinear(4, 6, config=cpu, init_method=nn.init.normal_)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    with torch.device("meta"):
        layer = RowParallelLinear(
            4, 6, config=config, init_method=nn.init.normal_, bias=True, input_is_parallel=True, skip_bias_add=True
        )
        table = VocabParallelEmbedding(4, 6, config=config, init_method=nn.init.normal_)
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in (*layer.parameters(), table.weight))
    layer.to_empty(device="cpu").reset_parameters()
    assert not layer.bias.any() and layer.weight.isfinite().all() and layer.weight.partition_dim == 1
