"""The public names, and what importing the package costs."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys

import pytest

import tpfused


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", tpfused.__all__)
def test_public_name(name):
    value = getattr(tpfused, name)
    assert value.__name__ == name
    assert inspect.getdoc(value)
    assert name in dir(tpfused)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(inspect.getsource(tpfused))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports if node.module.startswith("tpfused.") for alias in node.names}
    assert seen == tpfused._HOME


def test_an_operation_is_not_its_module():
    code = "import tpfused.overlap.NAME; from tpfused import NAME; import tpfused.overlap.NAME; print(tpfused.NAME)"
    for name in ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce"):
        assert run_python(code.replace("NAME", name)).startswith(f"<function {name} ")


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchLayer'"):
        _ = tpfused.NoSuchLayer


def test_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("tpfused")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed, only on the path")
    assert tpfused.__version__ == installed


def test_import_needs_no_torch():
    loaded = run_python("import sys, tpfused, tpfused.cli; print(*sys.modules)").split()
    assert not {"torch", "triton", "numpy"} & set(loaded)


def test_import_adds_little_to_torchs():
    code = "import time, torch; start = time.perf_counter(); import tpfused; print(time.perf_counter() - start)"
    for _ in range(3):  # a busy machine may delay one try
        seconds = float(run_python(code))
        if seconds < 0.3:
            return
    pytest.fail(f"import tpfused took {seconds:.2f} s after import torch")
