"""One pool of workers for the folder: each imports transformers once."""

import pytest

from tests.conftest import CPU_WORLD, gpu_world
from tests.distributed import Workers


@pytest.fixture(scope="package", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def workers(request):
    world = CPU_WORLD if request.param == "cpu" else gpu_world()
    if world == 0:
        pytest.skip("there is no GPU")
    with Workers(request.param, world) as pool:
        yield pool
