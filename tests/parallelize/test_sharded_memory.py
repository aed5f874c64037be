"""What a load takes beside the model's own parts: little, whatever the whole checkpoint's size."""

import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tpfused
from tests.distributed import Workers

pytest.importorskip("safetensors")

SIZE, LAYERS = 2048, 8  # 16 MiB a weight


@contextmanager
def at_most(more: float):
    """This process gets `more` bytes than it has, and no more: Linux refuses what it asks for beyond."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + int(more), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def build() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))


def check_memory(ctx, folder):
    """Half of the parts are rows of the stored weights, half columns."""
    with torch.device("meta"):
        model = build()
    plan = {str(i): "rowwise" if i % 2 else "colwise" for i in range(LAYERS)}
    tpfused.parallelize(model, ctx.mesh(ctx.world), plan)
    own = sum(param.to_local().nbytes for param in model.parameters())
    # Linux counts the files too, which safetensors maps from the first to the last: pages of its cache, not memory.
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with at_most(files + 1.2 * own):
        tpfused.load_sharded(model, folder)
    assert not any(param.is_meta for param in model.parameters())
    with pytest.raises((RuntimeError, MemoryError)), at_most(0.2 * own):  # which is less than a whole weight
        torch.ones(SIZE, SIZE)


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_memory_while_loading(tmp_path):
    """In new processes: what others have freed, and keep, would count as free."""
    tpfused.save_sharded(build(), tmp_path, max_file_bytes=3 * SIZE * SIZE * 4)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with Workers("cpu", 4) as workers:
        workers.run(check_memory, tmp_path)
