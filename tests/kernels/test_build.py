"""The kernels compile for Hopper: the one thing about `matmul_hopper` that a machine without a GPU can tell."""

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_compiles_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.build_for_hopper"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("_kernel") == 8  # matmul_hopper's and rotary's
