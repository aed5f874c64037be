"""Which back end `linear_act` takes: the fastest at the nearest measured shape, and a safe one without measurements."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tpfused.kernels import choices

WAYS = ("cublas", "triton", "cublaslt")


@pytest.fixture
def table(monkeypatch):
    """A card of compute capability 9.0 and the measurements that are to be found."""
    found = {}
    monkeypatch.setattr(choices, "_table", lambda: found)
    monkeypatch.setattr(choices, "capability", lambda device: found.get("capability", (9, 0)))
    monkeypatch.setattr(choices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this card")
    choices._choose.cache_clear()
    yield found
    choices._choose.cache_clear()


def row(m, us, k=4096, n=4096, activation=1, gated=False, keeps_pre=False):
    return {"m": m, "k": k, "n": n, "activation": activation, "gated": gated, "keeps_pre": keeps_pre, "us": us}


def choose(m, possible=WAYS, half=True, activation=1, gated=False, keeps_pre=False):
    choices._choose.cache_clear()
    return choices._choose(possible, "cuda:0", half, m, 4096, 4096, activation, gated, keeps_pre)


def test_the_fastest_at_the_nearest_shape(table):
    table["this card"] = [row(256, {"cublas": 1, "triton": 2}), row(8192, {"cublas": 9, "triton": 8})]
    assert choose(200) == "cublas" and choose(6000) == "triton"
    assert choose(6000, possible=("cublas",)) == "cublas"
    assert choose(200, activation=2) == "cublas"  # not measured: what was for another activation
    assert choose(8192, half=False) == "cublas"  # the table is of half precision


def test_another_card_of_the_kind_and_none(table):
    table["another card"] = [row(8192, {"cublas": 9, "triton": 8})]
    assert choose(8192) == "triton"
    assert choose(8192, gated=True, possible=("cublas", "triton")) == "triton"  # large, and nothing measured
    assert choose(8, gated=True, possible=("cublas", "triton")) == "cublas"
    table.clear()
    assert choose(8192) == "cublaslt"


def test_the_committed_table():
    table = json.loads(choices.TABLE.read_text())
    for rows in table.values():
        assert all(set(one) == set(row(1, {})) and "cublas" in one["us"] for one in rows)


def test_on_the_cpu_the_kernel_is_what_tests_run():
    x = SimpleNamespace(is_cuda=False)
    assert choices.choose(WAYS, x, 4, 0, False, False) == "triton"
    assert choices.choose(("cublas",), x, 4, 0, False, False) == "cublas"


@pytest.mark.parametrize("options, code", [(["--help"], 0), ([], 1), (["--card"], 2)])
def test_the_script_without_a_gpu(options, code):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "choices.py"
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr
    if code == 0:
        assert "linear_act" in done.stdout
    if code == 1:
        assert "needs a CUDA GPU" in done.stderr and done.stderr.count("\n") == 1
