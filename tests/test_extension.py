"""When the compiled extension is built, and that the build works where it can."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tpfused import extension
from tpfused.overlap import calls, communicator


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a CUDA 13.0 torch and everything else that a build needs, and means to change it."""

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def nvcc(release: str, codes: str = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"):
        script = f'case $1 in --version) echo "tools, release {release}, V{release}.1";; *) echo "{codes}";; esac'
        write("cuda/bin/nvcc", f"#!/bin/sh\n{script}\n").chmod(0o755)

    def torch(version: str, cuda: str | None):
        write("torch/version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\n")

    nvcc("13.0")
    torch("2.14.1+cu130", "13.0")
    write("nvidia.nccl/include/nccl.h", "")
    write("nvidia.cublas/include/cublasLt.h", "")
    write("python/Python.h", "")
    monkeypatch.setattr(
        extension, "_package_folder", lambda name: tmp_path / name if (tmp_path / name).exists() else None
    )
    monkeypatch.setattr(extension, "_python_include", lambda: tmp_path / "python")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("NVCC_CCBIN", "c++")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return SimpleNamespace(nvcc=nvcc, torch=torch, remove=lambda path: (tmp_path / path).rename(tmp_path / "removed"))


def test_buildable(machine, tmp_path):
    found = extension.find_toolchain()
    assert found.nvcc == tmp_path / "cuda/bin/nvcc"
    assert found.nccl == tmp_path / "nvidia.nccl"
    assert found.cublas == tmp_path / "nvidia.cublas" and found.cuda == 13
    assert found.architectures == ("8.0", "9.0", "10.0", "12.0+PTX")


def test_the_libraries_of_cuda_13_share_a_folder(machine, tmp_path):
    (tmp_path / "nvidia.cu13/include").mkdir(parents=True)
    (tmp_path / "nvidia.cu13/include/cublasLt.h").touch()
    assert extension.find_toolchain().cublas == tmp_path / "nvidia.cu13"


@pytest.mark.parametrize("nvcc, torch", [("13.2", "13.0"), ("13.0", "13.10"), ("9.2", "9.1")])
def test_same_major_version_is_enough(machine, nvcc, torch):
    machine.nvcc(nvcc)
    machine.torch("2.20.0", torch)
    extension.find_toolchain()


@pytest.mark.parametrize("nvcc, torch", [("12.9", "13.0"), ("13.0", "12.8"), ("1.3", "13.0"), ("130.0", "13.0")])
def test_another_major_version_is_named(machine, nvcc, torch):
    machine.nvcc(nvcc)
    machine.torch("2.20.0", torch)
    with pytest.raises(extension.NotBuildable, match=f"CUDA {nvcc} and torch is built with CUDA {torch}"):
        extension.find_toolchain()


@pytest.mark.parametrize(
    "missing, reason",
    [
        ("torch", "torch is not installed"),
        ("nvidia.nccl", "NCCL wheel"),
        ("nvidia.cublas", "cuBLAS wheel"),
        ("python/Python.h", "Python's header files"),
    ],
)
def test_missing_part_is_named(machine, missing, reason):
    machine.remove(missing)
    with pytest.raises(extension.NotBuildable, match=reason):
        extension.find_toolchain()


def test_torch_without_cuda(machine):
    machine.torch("2.13.0+cpu", None)
    with pytest.raises(extension.NotBuildable, match=r"2\.13\.0\+cpu is not a CUDA build"):
        extension.find_toolchain()


def test_no_nvcc(machine, monkeypatch):
    monkeypatch.setattr(extension.shutil, "which", lambda name, path=None: None)
    with pytest.raises(extension.NotBuildable, match="nvcc is not installed"):
        extension.find_toolchain()


def test_no_host_compiler(machine, monkeypatch):
    which = extension.shutil.which
    monkeypatch.delenv("NVCC_CCBIN")
    monkeypatch.setattr(
        extension.shutil, "which", lambda name, path=None: None if name == "g++" else which(name, path=path)
    )
    with pytest.raises(extension.NotBuildable, match=r"no g\+\+"):
        extension.find_toolchain()


def test_broken_nvcc(machine, tmp_path):
    (tmp_path / "cuda/bin/nvcc").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(extension.NotBuildable, match="does not run"):
        extension.find_toolchain()


def test_older_nvcc_offers_fewer_architectures(machine):
    machine.nvcc("13.0", codes="sm_75 sm_80 sm_90")
    assert extension.find_toolchain().architectures == ("8.0", "9.0+PTX")


def test_architectures_by_hand(machine, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0; 9.0a 12.0+PTX")
    assert extension.find_toolchain().architectures == ("8.0", "9.0a", "12.0+PTX")


def test_code_flags():
    assert extension._code_flags(("9.0a", "12.0+PTX")) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    with pytest.raises(ValueError, match="'Hopper'"):
        extension._code_flags(("Hopper",))


@pytest.mark.parametrize("ninja", [True, False])
def test_build_steps_run_in_order(tmp_path, monkeypatch, ninja):
    if not ninja:
        monkeypatch.setattr(extension.shutil, "which", lambda name, path=None: None)
    folder = tmp_path / "a folder: $x"
    folder.mkdir()
    source, first, second = folder / "source", folder / "first", folder / "second"
    source.write_text("text with $HOME")
    steps = [
        (first, [source], ["cp", str(source), str(first)]),
        (second, [first], ["cp", str(first), str(second)]),
    ]
    extension._run(steps, folder, quiet=False)
    assert second.read_text() == "text with $HOME"


@pytest.mark.parametrize("ninja", [True, False])
def test_failing_build_step_raises(tmp_path, monkeypatch, ninja):
    if not ninja:
        monkeypatch.setattr(extension.shutil, "which", lambda name, path=None: None)
    with pytest.raises(subprocess.CalledProcessError):
        extension._run([(tmp_path / "out", [], ["false"])], tmp_path, quiet=False)


def test_real_build(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    try:
        toolchain = extension.find_toolchain()
    except extension.NotBuildable as reason:
        pytest.skip(str(reason))
    extension.build(toolchain, tmp_path / "_C.abi3.so", tmp_path / "objects", in_tree=True)
    code = "import _C; info = _C.build_info(); assert info['architectures'] == '8.0'; print(info['nccl_loaded'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20000


LOAD = """
import torch
torch.cuda.get_device_capability = lambda: (8, 0)
from tpfused import extension
from tpfused.overlap import calls
print(extension.load().build_info()["architectures"])
"""


def test_compiled_once_at_first_use(tmp_path, monkeypatch):
    """By two processes at the same time, say; where a build is possible."""
    try:
        extension.find_toolchain()
    except extension.NotBuildable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", "import sys; sys.modules['tpfused._C'] = None" + LOAD]  # as if it had none
    answers = [each.communicate() for each in [subprocess.Popen(command, **options) for _ in range(2)]]
    assert [out for out, _ in answers] == ["8.0\n"] * 2, answers
    assert sum("compiling its extension" in err for _, err in answers) == 1


@pytest.fixture
def found(machine, tmp_path, monkeypatch):
    """Calls `find` with an installed module, or what importing it raises, where there is a GPU or not."""
    compiled = SimpleNamespace(name="from the cache")

    def load():
        assert list(cache.glob("*/_C.abi3.so")), "it would compile"
        return compiled

    def find(installed, capability=(9, 0)):
        def import_module(name):
            if isinstance(installed, ImportError):
                raise installed
            return SimpleNamespace(build_info=lambda: {"sources": installed})

        with monkeypatch.context() as patch:
            patch.setattr(extension.importlib, "import_module", import_module)
            patch.setattr(extension, "load", load)
            patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
            patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
            return extension.find()

    def keep(capability):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
            target = extension._at_first_use()[1]
        target.parent.mkdir(parents=True)
        target.touch()

    cache = tmp_path / "cache" / "tpfused"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SimpleNamespace(find=find, keep=keep, compiled=compiled, cache=cache)


NONE = ModuleNotFoundError("No module named 'tpfused._C'")
BROKEN = ImportError("libnccl.so.2: cannot open shared object file")


def test_finds_the_installed_one_of_these_sources(found):
    found.keep((9, 0))
    for capability in ((9, 0), None):
        told = found.find(extension.source_hash(), capability)
        assert told.module is not None and told.module is not found.compiled and not told.passed_over


@pytest.mark.parametrize("installed, why", [("0123", "other sources"), (None, "other"), (BROKEN, "nccl"), (NONE, "")])
def test_finds_what_load_would_use_instead_of_the_installed_one(found, machine, installed, why):
    told = found.find(installed)
    assert told.module is None and why in told.passed_over and bool(why) == bool(told.passed_over)
    assert not told.not_buildable and not found.cache.exists()
    found.keep((8, 0))
    assert found.find(installed).module is None  # it is for another card
    found.keep((9, 0))
    kept = found.find(installed)
    assert kept.module is found.compiled and kept.passed_over == told.passed_over
    assert found.find(installed, None) == told  # no GPU, nothing that is kept for it
    machine.remove("python/Python.h")
    assert "header files" in found.find(installed).not_buildable


def test_load_uses_what_find_finds(found, monkeypatch):
    """Nothing is compiled where the cache has it."""
    found.keep((9, 0))
    monkeypatch.setitem(sys.modules, "tpfused._C", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(extension, "build", lambda *arguments, **options: pytest.fail("it compiles"))
    with pytest.raises(ImportError, match="_C.abi3.so"):  # an empty file
        extension.load.__wrapped__()


def sources() -> str:
    return "\n".join(file.read_text() for file in sorted(extension.source_folder().glob("*.*")))


def test_constants_that_python_and_the_extension_share():
    """What Python allocates is what the extension takes."""
    text = sources()

    def constant(name):
        return eval(re.search(rf"constexpr \w+ {name} = ([\d< ]+)[;,]", text)[1])  # like 8 << 20

    assert calls.ALL_REDUCE_BLOCKS == constant("most")
    assert calls.MOST_NORMALIZED == constant("most_normalized")
    assert communicator.MOST_RANKS == constant("most_ranks")
    of_float32, of_others = map(int, re.search(r"Type::float32 \? (\d+) : (\d+)\) << 20", text).groups())
    wanted = {
        code: 2 * (of_float32 if code == communicator.TYPES[torch.float32] else of_others) << 20 for code in range(4)
    }
    assert communicator.WORKSPACE == wanted
    assert calls.MOST_GATHERED == 2 * constant("most_gathered")
    assert calls.MOST_FEATURES_GATHERED == constant("most_features_gathered")
    assert calls.MOST_MESSAGES == constant("most_messages")
    assert calls.MOST_REDUCED == constant("one_shot_bytes")


def test_nothing_uses_multicast():
    """Nor libraries that do: not every machine has NVLink's, and the operations need none."""
    assert not re.search(r"multicast|multimem|nvshmem|nvls", sources(), re.IGNORECASE)
