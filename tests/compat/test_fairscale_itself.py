"""Programs on fairscale's names against fairscale itself."""

import inspect
from importlib import import_module

import pytest
import torch
from torch import nn

from tests.compare import assert_close, collectives_made, refuses
from tests.compat.fairscale_groups import THEIRS, default_type, model_parallel
from tpfused.checks import AssertedError
from tpfused.compat import fairscale as compat
from tpfused.compat.fairscale import initialize

pytest.importorskip(THEIRS)


def program(library, ctx, seed):
    """A training step in a program's words; `library` is the package that its imports name."""
    nn_layers = import_module(f"{library}.layers")
    maps = import_module(f"{library}.mappings")
    loss = import_module(f"{library}.cross_entropy").vocab_parallel_cross_entropy
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "tokens": nn_layers.VocabParallelEmbedding(12, 8, init_method=nn.init.normal_),
            "kinds": nn_layers.ParallelEmbedding(4, 8),
            "fc1": nn_layers.ColumnParallelLinear(8, 16, gather_output=False),
            "fc2": nn_layers.RowParallelLinear(16, 8, input_is_parallel=True),
            "whole": nn_layers.ColumnParallelLinear(8, 8),
            "back": nn_layers.RowParallelLinear(8, 8),
            "head": nn_layers.ColumnParallelLinear(8, 12, False, False, nn.init.kaiming_normal_),
        }
    )
    ids = torch.randint(12, (5, 3))
    x = model["tokens"](ids) + model["kinds"](ids % 4)
    x = x + model["fc2"](model["fc1"](x).tanh())
    x = x + model["back"](model["whole"](x).sin())
    x = x + maps.gather_from_model_parallel_region(maps.scatter_to_model_parallel_region(x).sin())
    x = maps.copy_to_model_parallel_region(x)
    x = x + maps.reduce_from_model_parallel_region(x.cos())
    losses = loss(model["head"](x), ids.roll(1, 0))
    losses.mean().backward()
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    found |= {f"gradient of {name}": param.grad for name, param in model.named_parameters()}
    return found | {"losses": losses.detach()}


def check_against_fairscale(ctx, tp, seed):
    theirs = import_module(f"{THEIRS}.initialize")
    with default_type(ctx.device, "Double"):
        with model_parallel(tp, theirs):
            expected = program(THEIRS, ctx, seed)
            # The program's library still makes the groups.
            assert initialize.model_parallel_is_initialized()
            assert initialize.get_model_parallel_group() is theirs.get_model_parallel_group()
            assert initialize.get_data_parallel_group() is theirs.get_data_parallel_group()
            assert initialize.get_pipeline_parallel_ranks() == theirs.get_pipeline_parallel_ranks()
            assert initialize.get_model_parallel_src_rank() == theirs.get_model_parallel_src_rank()
            found = [program(compat.__name__, ctx, seed)]
            with refuses(AssertedError, "exist already"):
                initialize.initialize_model_parallel(tp)
        assert not initialize.model_parallel_is_initialized()
        with model_parallel(tp):
            with collectives_made() as names:
                found.append(program(compat.__name__, ctx, seed))
            assert bool(names) == (tp > 1)
    for results in found:
        assert results.keys() == expected.keys()
        for name, value in results.items():
            if name in results and f"gradient of {name}" in results:
                assert torch.equal(value, expected[name]), name
            else:
                assert_close(value, expected[name], name)


def test_a_program_gets_fairscales_numbers(workers, tp, seed):
    workers.run(check_against_fairscale, tp, seed)


MODULES = "cross_entropy", "initialize", "layers", "mappings", "random", "utils"


@pytest.mark.parametrize("name", MODULES)
def test_names_that_modules_take_from_each_other(name):
    """Programs import them from there, too."""
    theirs, ours = (import_module(f"{library}.{name}") for library in (THEIRS, compat.__name__))
    taken = {
        key
        for key, value in vars(theirs).items()
        if getattr(value, "__module__", "").startswith(THEIRS) and value.__module__ != theirs.__name__
    }
    assert taken <= vars(ours).keys()
    for key in taken:
        at_home = import_module(compat.__name__ + getattr(theirs, key).__module__.removeprefix(THEIRS))
        assert getattr(ours, key) is getattr(at_home, key)


PROGRAMS_USE = ("_initialize_affine_weight", "_set_cuda_rng_state")
# Of fairscale after 0.4.13, its last release.
NEWER = ("context_parallel_size", "cp_backend", "timeout")


@pytest.mark.parametrize("name", MODULES)
def test_signatures_are_fairscales(name):
    theirs, ours = (import_module(f"{library}.{name}") for library in (THEIRS, compat.__name__))
    named = {
        key
        for key, value in vars(theirs).items()
        if (not key.startswith("_") or key in PROGRAMS_USE) and getattr(value, "__module__", None) == theirs.__name__
    }
    for key in named - {"CheckpointFunction"}:
        here, there = (inspect.signature(getattr(module, key)).parameters for module in (ours, theirs))
        here = [p for name, p in here.items() if name in there or name not in NEWER]
        assert [(p.name, p.kind, p.default) for p in here] == [(p.name, p.kind, p.default) for p in there.values()], key
