"""Checkpoints by slices: into models on the meta device and real ones, between degrees, and what does not fit."""

import hashlib
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import tpfused
from tests.compare import refuses
from tests.parallelize.models import build, random_ids, whole
from tpfused import parts as of_models
from tpfused import sharded

pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

split = pytest.mark.parametrize("tp", [2, 4], indirect=True)
MODELS = ["llama", "qwen3", "gpt2", "bert"]


@pytest.fixture
def folder(tmp_path):
    """Checkpoints as transformers writes them, in several files, one for each model of `MODELS`."""
    torch.manual_seed(11)
    for name in MODELS:
        build(name).save_pretrained(tmp_path / name, max_shard_size="20KB")
        assert (tmp_path / name / sharded.INDEX).exists()
    return tmp_path


def on_meta(ctx, tp, name):
    with torch.device("meta"):
        model = build(name)
    return tpfused.parallelize(model, ctx.mesh(tp)).eval()


def stored(path: Path) -> dict:
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def digest(state: dict) -> str:
    """A checksum of names, shapes and bits."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(f"{name} {tuple(state[name].shape)}".encode())
        whole.update(state[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def check_load(ctx, tp, folder, name):
    """Each rank reads its slices and no more; put together they are the file's bits; the logits are the dense ones."""
    import transformers

    path = folder / name
    model, read = on_meta(ctx, tp, name), []
    original = sharded.StoredTensor.__getitem__

    def counted(self, box):
        part = original(self, box)
        read.append(part.nbytes)
        return part

    # What the ranks compare beforehand is not counted: in tensors as small as these it is all of them.
    with (
        mock.patch.object(sharded.StoredTensor, "__getitem__", counted),
        mock.patch.object(of_models, "_first_bytes", lambda tensor: b""),
    ):
        tpfused.load_sharded(model, path)
    parts = {id(p): p.to_local() for p in model.parameters()}
    own = sum(part.nbytes for part in parts.values())
    assert sum(read) <= 1.2 * own, (sum(read), own)
    assert max(read) <= max(part.nbytes for part in parts.values())
    assert all(p.to_local().device.type == ctx.device.type for p in model.parameters())

    file = stored(path)
    names = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in file}
    assert names.keys() == file.keys()
    assert digest({name: whole(p.detach(), file[name]).cpu() for name, p in names.items()}) == digest(file)
    if model.config.tie_word_embeddings:
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight

    dense = getattr(transformers, type(model).__name__).from_pretrained(path).to(ctx.device).eval()
    torch.manual_seed(3)
    ids, mask = random_ids(dense, ctx.device)
    with torch.no_grad():
        expected, actual = (m(ids, attention_mask=mask).logits for m in (dense, model))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@split
@pytest.mark.parametrize("name", MODELS)
def test_loads_its_slices_into_a_model_on_meta(workers, tp, folder, name):
    workers.run(check_load, tp, folder, name)


def check_save(ctx, folder, out, name):
    """Saved on all ranks, loaded at every other degree, and by transformers: the same bits all the way."""
    import transformers

    model = on_meta(ctx, ctx.world, name)
    tpfused.load_sharded(model, folder / name)
    tpfused.save_sharded(model, out, max_file_bytes=30_000)
    index = json.loads((out / sharded.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1 and set(index.values()) == {p.name for p in out.glob("*.safetensors")}
    expected = stored(folder / name)
    assert digest(stored(out)) == digest(expected)
    again = on_meta(ctx, max(1, ctx.world // 2), name)
    tpfused.load_sharded(again, out)
    state = tpfused.full_state_dict(again)
    if dist.get_rank() == 0:
        assert digest({key: state[key] for key in expected}) == digest(expected)
        plain = getattr(transformers, type(model).__name__).from_pretrained(out)
        assert digest({key: plain.state_dict()[key] for key in expected}) == digest(expected)
    dist.barrier()
    tpfused.save_sharded(again, out)  # in one file: those of the first save are gone
    assert [p.name for p in out.glob("model*")] == [sharded.SINGLE] and digest(stored(out)) == digest(expected)


@pytest.mark.parametrize("name", MODELS)
def test_saves_what_transformers_and_other_degrees_load(workers, folder, tmp_path, name):
    workers.run(check_save, folder, tmp_path / "out", name)


def check_distributed_checkpoint(ctx, folder, out, name):
    torch.manual_seed(5)
    model = on_meta(ctx, ctx.world, name)
    tpfused.load_sharded(model, folder / name)
    dcp.save(model.state_dict(), checkpoint_id=out)
    again = tpfused.parallelize(build(name).to(ctx.device), ctx.mesh(max(1, ctx.world // 2)))
    state = again.state_dict()
    dcp.load(state, checkpoint_id=out)
    again.load_state_dict(state)
    first, second = tpfused.full_state_dict(model), tpfused.full_state_dict(again)
    assert digest(first) == digest(second)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_torchs_distributed_checkpoints_between_degrees(workers, folder, tmp_path, name):
    workers.run(check_distributed_checkpoint, folder, tmp_path / "dcp", name)


def check_fully_sharded(ctx, folder, name):
    """FSDP2 splits the parts again: of GPT-2's packed bias, some ranks get nothing."""
    tp = max(1, ctx.world // 2)
    model = on_meta(ctx, tp, name)
    fully_shard(model, mesh=ctx.grid(tp)["dp"])
    tpfused.load_sharded(model, folder / name)
    state = tpfused.full_state_dict(model)
    if dist.get_rank() == 0:
        expected = stored(folder / name)
        assert digest({key: state[key] for key in expected}) == digest(expected)
    ids = torch.full((2, 4), 5, device=ctx.device)
    model(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loads_a_fully_sharded_model(workers, folder, name):
    workers.run(check_fully_sharded, folder, name)


def check_own_model(ctx, tp, mode, out):
    """A `ParallelTransformer`: its packed weights are read from their parts."""
    config = tpfused.TransformerConfig.llama(
        vocab_size=37, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=28, max_positions=8
    )
    place = {"mesh": ctx.mesh(tp)} if mode == "mesh" else {"group": ctx.group(tp)}
    torch.manual_seed(1)
    model = tpfused.ParallelTransformer(config, device=ctx.device, **place)
    tpfused.save_sharded(model, out)
    with torch.device("meta"):
        empty = tpfused.ParallelTransformer(config, **place, device="meta")
    tpfused.load_sharded(empty, out, device=ctx.device)
    for (name, a), b in zip(model.named_parameters(), empty.parameters(), strict=True):
        a, b = (p.to_local() if hasattr(p, "to_local") else p for p in (a, b))
        assert torch.equal(a, b), name
    first, second = tpfused.full_state_dict(model), tpfused.full_state_dict(empty)  # plain parts know their whole
    assert digest(first) == digest(second)


@split
@pytest.mark.parametrize("mode", ["mesh", "group"])
def test_packed_weights_of_the_packages_own_model(workers, tp, mode, tmp_path):
    workers.run(check_own_model, tp, mode, tmp_path / "own")


def check_misfits(ctx, folder):
    model = on_meta(ctx, ctx.world, "gpt2")
    told = ["4 tensors missing, 2 extra, 2 of another shape"]
    told += ["missing: transformer.h.1.mlp.c_fc.weight (32, 54)", "missing: transformer.ln_f.bias"]
    told += ["extra: odd.one", "extra: odd.two", "transformer.wpe.weight (32, 31), not (32, 32)"]
    told += ["transformer.h.0.attn.c_attn.weight (32, 95), not (32, 96)"]
    with refuses(ValueError, *told):
        tpfused.load_sharded(model, folder / "misfit.safetensors")
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(FileNotFoundError, match=re.escape(str(folder / "nowhere"))):
        tpfused.load_sharded(model, folder / "nowhere")
    empty = folder / "llama" / "empty"
    empty.mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        tpfused.load_sharded(model, empty)


def test_all_that_does_not_fit_is_named(workers, folder):
    state = stored(folder / "gpt2")
    for name in ("transformer.h.1.mlp.c_fc.weight", "transformer.h.0.ln_1.weight", "transformer.ln_f.bias"):
        del state[name]
    del state["transformer.h.1.ln_2.weight"]
    state |= {"odd.one": torch.zeros(2), "odd.two": torch.zeros(3)}
    state["transformer.wpe.weight"] = torch.zeros(32, 31)
    state["transformer.h.0.attn.c_attn.weight"] = torch.zeros(32, 95)
    save_file(state, folder / "misfit.safetensors")
    workers.run(check_misfits, folder)


def check_dtypes(ctx, folder):
    """Between floating-point dtypes the file's entries are cast; what is of others must be of the model's."""
    with torch.device("meta"):
        model = build("llama")
        model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    tpfused.parallelize(model, ctx.mesh(ctx.world))
    told = ["0 of another shape, 2 of another dtype", "model.embed_tokens.weight torch.int32, not torch.float32"]
    told += ["steps torch.float32, not torch.int64"]
    with refuses(ValueError, *told):
        tpfused.load_sharded(model, folder / "integers.safetensors")
    assert all(param.is_meta for param in model.parameters())
    tpfused.load_sharded(model, folder / "halves.safetensors")
    state, expected = tpfused.full_state_dict(model), load_file(folder / "halves.safetensors")
    for name, tensor in state.items():
        assert tensor.dtype == (torch.int64 if name == "steps" else torch.float32)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    for path in (None, 3, [folder]):
        with refuses(TypeError, f"path must be a str or a Path, not {path!r}"):
            tpfused.load_sharded(model, path if ctx.rank == ctx.world - 1 else folder / "halves.safetensors")


def test_dtypes_and_paths(workers, folder):
    state = stored(folder / "llama") | {"steps": torch.arange(3)}
    halves = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_file(halves, folder / "halves.safetensors")
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].int()
    state["steps"] = state["steps"].float()
    save_file(state, folder / "integers.safetensors")
    workers.run(check_dtypes, folder)


def check_names(ctx, path, name):
    model = on_meta(ctx, ctx.world, name)
    tpfused.load_sharded(model, path)
    return digest(tpfused.full_state_dict(model)) if ctx.rank == 0 else tpfused.full_state_dict(model) and None


def test_names_as_published_checkpoints_have_them(workers, folder):
    """GPT-2's, without the prefix and with masks; a tied table under the head's name, or under both."""
    expected = workers.run(check_names, folder / "gpt2", "gpt2")[0]
    state = {key.removeprefix("transformer."): value for key, value in stored(folder / "gpt2").items()}
    published = folder / "published.safetensors"
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(state | masks, published)
    assert workers.run(check_names, published, "gpt2")[0] == expected
    save_file(state | {"lm_head.weight": state["wte.weight"].clone()}, published)
    assert workers.run(check_names, published, "gpt2")[0] == expected
    state["lm_head.weight"] = state.pop("wte.weight")
    save_file(state, published)
    assert workers.run(check_names, published, "gpt2")[0] == expected


def check_wrapped(ctx, path, expected):
    for wrap in torch.nn.parallel.DistributedDataParallel, torch.compile, checkpoint_wrapper:
        model = build("gpt2").to(ctx.device)
        tpfused.load_sharded(wrap(model), path)
        assert all(torch.equal(model.state_dict()[name].cpu(), each) for name, each in expected.items())


def test_a_wrapped_model_has_the_prefix_of_its_own(workers, folder):
    state = stored(folder / "gpt2")
    published = folder / "published.safetensors"
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file({key.removeprefix("transformer."): value for key, value in state.items()} | masks, published)
    workers.run(check_wrapped, published, state)


class Computing(torch.nn.Sequential):
    """Fills what its modules have, as transformers' models do."""

    def _init_weights(self, module):
        if torch.is_tensor(module.angles):
            module.angles.copy_(torch.arange(4.0))
        module.weight.fill_(7)
        module.scale.fill_(7)


class Turned(tpfused.ColumnParallelLinear):
    def __init__(self, **place):
        super().__init__(4, 4, **place)
        self.register_buffer("angles", torch.arange(4.0, device="meta"), persistent=False)
        self.register_buffer("scale", torch.ones(1))


def check_nothing_changes(ctx, folder):
    """Buffers are computed once all ranks can load, and put into the model once all have computed theirs."""
    last, computed = ctx.rank == ctx.world - 1, []
    model = Computing(Turned(mesh=ctx.mesh(ctx.world), device=ctx.device))
    tpfused.save_sharded(model, folder)
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}

    def check_same_as_before():
        assert model[0].angles.is_meta
        for name, tensor in model[0].state_dict().items():
            assert torch.equal(tensor, before[name]), name

    original = Computing._init_weights
    with mock.patch.object(Computing, "_init_weights", lambda *args: computed.append(original(*args))):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            tpfused.load_sharded(model, folder / "nowhere" if last else folder)
        assert not computed
        check_same_as_before()
        tpfused.load_sharded(model, folder)
        assert computed and torch.equal(model[0].angles.cpu(), torch.arange(4.0))
    assert not any((tensor == 7).any() for tensor in model[0].state_dict().values())

    model[0].angles = model[0].angles.to("meta")
    with mock.patch.object(Computing, "_init_weights", lambda *args: last or original(*args)):
        with pytest.raises(ValueError, match=r"0\.angles"):
            tpfused.load_sharded(model, folder)
    check_same_as_before()


def test_nothing_changes_where_one_rank_cannot_load(workers, tmp_path):
    workers.run(check_nothing_changes, tmp_path)


def check_broken_read(ctx, folder):
    model = on_meta(ctx, ctx.world, "llama")
    last = ctx.rank == ctx.world - 1

    def broken(self, box):
        raise OSError("the disk is gone")

    with mock.patch.object(sharded.StoredTensor, "__getitem__", broken if last else sharded.StoredTensor.__getitem__):
        with pytest.raises(
            OSError, match=f"rank {ctx.world - 1} raised OSError: the disk" if not last else "^the disk"
        ):
            tpfused.load_sharded(model, folder / "llama")


def test_a_read_that_fails_on_one_rank_is_told_to_all(workers, folder):
    workers.run(check_broken_read, folder)


def check_failed_save(ctx, folder, path, kept):
    model = on_meta(ctx, ctx.world, "llama")
    tpfused.load_sharded(model, folder / "llama")
    with pytest.raises(OSError, match="blocked"):
        tpfused.save_sharded(model, path)
    with pytest.raises(TypeError, match="path must be a str or a Path, not None"):
        tpfused.save_sharded(model, path.parent / "out" if ctx.rank else None)
    with pytest.raises(OSError, match=r"\.partial"):
        tpfused.save_sharded(model, kept)
    with mock.patch.object(type(model.config), "save_pretrained", mock.Mock(side_effect=KeyError("a setting"))):
        with pytest.raises(KeyError if ctx.rank == 0 else RuntimeError, match="a setting"):
            tpfused.save_sharded(model, path.parent / "out")


def test_a_failed_save_is_told_to_all_ranks(workers, folder, tmp_path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    kept = tmp_path / "kept"
    (kept / f".{sharded.SINGLE}.7.partial").mkdir(parents=True)  # which unlink refuses
    workers.run(check_failed_save, folder, tmp_path / "blocked", kept)
    assert digest(stored(kept)) == digest(stored(folder / "llama"))


NUMBERED = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
OLD = ["old.safetensors", "model-00001-of-00003.safetensors"]


@pytest.mark.parametrize("named", [[sharded.SINGLE], [sharded.SINGLE, *OLD], NUMBERED, [*NUMBERED, *OLD]])
@pytest.mark.parametrize("new", [[sharded.SINGLE], NUMBERED])
@pytest.mark.parametrize("missing", [[], NUMBERED, [sharded.SINGLE]])
def test_what_an_old_index_names_and_is_new_stays(tmp_path, named, new, missing):
    """Some converters write an index beside a single file; of a download that was cut off, files are missing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    others = [folder / "config.json", tmp_path / "other.safetensors", folder / "vae.safetensors"]
    for file in (*(folder / name for name in named if name not in missing), *others):
        file.write_text("old")
    named = [*named, "config.json", "../other.safetensors", sharded.INDEX]
    homes = {f"tensor.{number}": name for number, name in enumerate(named)}
    (folder / sharded.INDEX).write_text(json.dumps({"weight_map": homes}))

    model = torch.nn.Linear(4, 4)
    expected = digest(model.state_dict())
    tpfused.save_sharded(model, folder, max_file_bytes=1000 if new == [sharded.SINGLE] else 64)
    torch.nn.init.zeros_(model.weight)
    tpfused.load_sharded(model, folder)
    assert digest(model.state_dict()) == expected
    assert all(file.read_text() == "old" for file in others)
    files = {file.name for file in folder.iterdir()} - {"config.json", "vae.safetensors", sharded.INDEX}
    assert len(files) == len(new) and files.isdisjoint(OLD), files
    assert (folder / sharded.INDEX).exists() == (len(new) > 1)


def test_a_file_holds_what_its_metadata_says(workers, folder, tmp_path):
    """Transformers refuses files without a format."""
    workers.run(check_metadata, folder, tmp_path / "out")


def check_metadata(ctx, folder, out):
    model = on_meta(ctx, ctx.world, "llama")
    tpfused.load_sharded(model, folder / "llama")
    tpfused.save_sharded(model, out)
    with safe_open(out / sharded.SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
