"""The masked embedding against a dense table, shard by shard."""

import pytest
import torch

from tpfused.kernels import embedding as module
from tpfused.kernels.embedding import accumulate_gradient, embedding

SHARDS = [(0, 5), (5, 5), (5, 13)]  # one is empty


@pytest.mark.parametrize("features", [1, 5, 40])
def test_shards_together_are_the_dense_table(device, dtypes, features, monkeypatch):
    monkeypatch.setattr(module, "FEW", 4)
    monkeypatch.setattr(module, "FREQUENT_PROGRAMS", 2)
    monkeypatch.setattr(module, "FREQUENT_BLOCK", 16)
    monkeypatch.setattr(module, "SCAN", 16)
    monkeypatch.setattr(module, "TOGETHER", 2)
    for dtype in dtypes:
        table = torch.randn(13, features, device=device, dtype=dtype)
        ids = torch.randint(13, (3, 7), device=device)
        ids[0, :3] = 4  # a row with several tokens
        ids[1:, :5] = 7  # and one with many
        dy = torch.randn(3, 7, features, device=device, dtype=dtype)
        expected = torch.zeros(13, features, device=device, dtype=torch.float64)
        expected.index_add_(0, ids.flatten(), dy.flatten(0, 1).double())
        expected[6] = 0
        total = 0
        for start, stop in SHARDS:
            weight = table[start:stop].clone().requires_grad_()
            out = embedding(ids, weight, start, 13, padding_idx=6)
            out.backward(dy)
            total = total + out.detach()
            # One rounding; the sum of some ten tokens has more in its own precision.
            roundings = 1 if dtype.itemsize == 2 else 8
            rounding = roundings * torch.finfo(dtype).eps * expected.abs().max()
            assert (weight.grad.double() - expected[start:stop]).abs().le(rounding).all()
            main_grad = torch.ones(stop - start, features, device=device, dtype=torch.float32)
            if dtype != torch.float64:
                accumulate_gradient(main_grad, ids, dy, start, padding_idx=6)
                torch.testing.assert_close(main_grad.double(), 1 + expected[start:stop], rtol=1e-5, atol=1e-5)
        assert torch.equal(total, table[ids])


def test_ids_outside_the_vocabulary_give_nan(device):
    weight = torch.randn(5, 4, device=device)
    ids = torch.tensor([13, -1, 7, 0], device=device)
    assert embedding(ids, weight, 0, 13).isnan().all(1).tolist() == [True, True, False, False]
    assert embedding(ids, weight, 0, 13, check=False)[:3].eq(0).all()


def test_operator_strides_and_nothing_to_do(device):
    weight = torch.randn(5, 8, device=device)
    ids = torch.tensor([[0, 4], [9, 2]], device=device)
    ids = ids.clamp(max=4)
    assert torch.equal(embedding(ids.t(), weight[:, ::2]), embedding(ids, weight)[..., ::2].transpose(0, 1))
    assert embedding(ids[:0], weight).shape == (0, 2, 8)
    torch.library.opcheck(torch.ops.tpfused.embedding.default, (ids, weight.requires_grad_(), None, 0, 13, -1, True))


def test_gradient_for_strided_ids(device):
    pairs = torch.randint(9, (4, 6, 2), device=device)
    weight = torch.randn(9, 8, device=device, requires_grad=True)
    dy = torch.randn(4, 6, 8, device=device)
    for ids in (pairs[..., 0], pairs[..., 1].t()):
        dy_of = dy if ids.shape[0] == 4 else dy.transpose(0, 1)
        (grad,) = torch.autograd.grad(embedding(ids, weight), weight, dy_of)
        expected = torch.zeros_like(grad).index_add_(0, ids.flatten(), dy_of.reshape(-1, 8))
        torch.testing.assert_close(grad, expected)
        main_grad = torch.zeros(9, 8, device=device)
        accumulate_gradient(main_grad, ids, dy_of)
        torch.testing.assert_close(main_grad, expected)
        for _ in range(2):
            out = embedding(ids, weight, main_grad=main_grad)
            assert torch.autograd.grad(out, weight, dy_of, allow_unused=True) == (None,)
        torch.testing.assert_close(main_grad, 3 * expected)
    with pytest.raises(ValueError, match=r"\(8, 9\)"):
        accumulate_gradient(main_grad.t().contiguous(), pairs[..., 0], dy)


def test_bad_input_is_refused(device):
    weight, ids = torch.randn(5, 4, device=device), torch.tensor([1], device=device)
    for error, told, arguments in (
        (TypeError, "float32", {"ids": ids.float()}),
        (ValueError, r"\(5,\)", {"weight": weight[:, 0]}),
        (ValueError, "meta", {"ids": ids.to("meta")}),
        (ValueError, "rows 10 to 15", {"vocab_start": 10, "vocab_size": 13}),
        (ValueError, "padding_idx -1", {"padding_idx": -1}),
        (ValueError, "padding_idx 5", {"padding_idx": 5}),
    ):
        with pytest.raises(error, match=told):
            embedding(**{"ids": ids, "weight": weight} | arguments)
    dy = torch.ones(1, 4, device=device)
    for told, arguments in (("float32", (weight, ids.float(), dy)), ("int64", (weight.long(), ids, dy))):
        with pytest.raises(TypeError, match=told):
            accumulate_gradient(*arguments)


def test_accumulation_compiles_into_one_graph(device):
    ids, dy = torch.randint(9, (6,), device=device), torch.randn(6, 8, device=device)
    main_grad, expected = torch.ones(2, 9, 8, device=device).unbind()
    accumulate_gradient(expected, ids, dy)
    torch._dynamo.reset()
    torch.compile(accumulate_gradient, fullgraph=True, backend="aot_eager")(main_grad, ids, dy)
    assert torch.equal(main_grad, expected)
