"""Options, markers and fixtures shared by all tests."""

import os
import zlib

import pytest
import torch

from tests import interpreter
from tests.distributed import Workers

CPU_WORLD = 4
_asked: dict[str, int | None] = {"ranks": None}

interpreter.use_where_there_is_no_gpu()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="seed of all random test data; drawn anew when not given")
    parser.addoption("--ranks", type=int, choices=(1, 2, 4), help="on GPUs: so many, which share them where too few")


def pytest_configure(config):
    _asked["ranks"] = config.option.ranks
    if config.option.seed is None:
        config.option.seed = int.from_bytes(os.urandom(3), "big")


def pytest_report_header(config):
    return f"test data: --seed {config.option.seed}"


def gpu_world() -> int:
    """How many ranks the distributed tests have on GPUs: `--ranks`, or the largest of 1, 2 and 4 GPUs that there are;
    0 without a GPU."""
    gpus = torch.cuda.device_count()
    return (gpus and _asked["ranks"]) or max(n for n in (0, 1, 2, 4) if n <= gpus)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def workers(request):
    """Worker processes shared by a module's tests: 4 under gloo, or under NCCL one a GPU, or `--ranks`."""
    world = CPU_WORLD if request.param == "cpu" else gpu_world()
    if world == 0:
        pytest.skip("there is no GPU")
    with Workers(request.param, world) as pool:
        yield pool


@pytest.fixture(params=[1, 2, 4], ids="tp{}".format)
def tp(request, workers):
    """A tensor-parallel degree; the workers form world / tp such groups side by side.

    A test for some degrees only takes them with `pytest.mark.parametrize("tp", [2, 4], indirect=True)`.
    """
    if request.param > workers.world:
        pytest.skip(f"needs {request.param} ranks, there are {workers.world}")
    return request.param


@pytest.fixture
def seed(request):
    """Seed of one test's random data: differs between runs and tests, repeats under `--seed`."""
    return zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())
