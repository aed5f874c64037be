"""compute-sanitizer's memcheck of an overlapped operation by each tier: no rank reaches beyond what is its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from math import prod

import pytest
import torch

from tpfused.checking.cases import SIZES, Case
from tpfused.overlap.tiers import TIERS

TIMEOUT = 240  # seconds: instrumented kernels, cuBLAS's and NCCL's too, take their time to load
# Of one token and three features, one rank has less than the other: what is cut unevenly is what goes astray.
SMALLEST = min(range(len(SIZES)), key=lambda size: prod(SIZES[size][:3]))
UNEVEN = 1  # 66 features out: of rows that are no multiple of 16 bytes, copy engines bring even a few
CASES = [(tier, "all_gather_matmul", SMALLEST) for tier in TIERS] + [("p2p", "matmul_reduce_scatter", UNEVEN)]
UNSUPPORTED = re.compile(r"Device not supported.*|unsupported driver version.*", re.IGNORECASE)


def find_tool() -> str:
    from torch.utils.cpp_extension import CUDA_HOME  # warns where there is no GPU

    folders = os.environ.get("PATH", ""), f"{CUDA_HOME}/bin"
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders)) or pytest.skip("no compute-sanitizer")


def run(command, out):
    """The exit code, and what all processes printed; none of them is left."""
    with out.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        code = f"none after {TIMEOUT} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, out.read_text(errors="replace")


@pytest.mark.gpu
@pytest.mark.parametrize(("tier", "operation", "size"), CASES)
def test_no_access_beyond_a_tensor(tier, operation, size, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    case = Case("operation", operation, 2, "bf16", tier, size)
    memcheck = "--tool memcheck --report-api-errors no --target-processes all --error-exitcode 1"
    check = ["-m", "tpfused", "check", "--ranks", "2", "--case", case.label]
    code, told = run([find_tool(), *memcheck.split(), sys.executable, *check], tmp_path / "out")
    errors = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", told)]
    if not any(errors) and (unsupported := UNSUPPORTED.search(told)):
        pytest.skip(f"compute-sanitizer: {unsupported[0]}")
    assert code == 0 and errors and not any(errors), f"exit code {code}\n{told[-8000:]}"
