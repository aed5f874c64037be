"""Building the compiled extension, tpfused._C, from csrc: whether that is possible here, why not, and how.

The extension uses CUDA, NCCL and Python's limited C API, and nothing of torch's C++ API, so one build serves
every Python from 3.11 on. This module imports no torch: setup.py runs it where there may be none, and torch's
version file says all that a build has to know.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

PYTHON_ABI = "0x030B0000"  # CPython 3.11's limited API

# Ampere, Hopper, Blackwell (data centre and desktop): machine code also runs on later minor versions of its
# own major version, so 8.0 serves 8.6 and 8.9. Those that this nvcc does not offer are left out.
DEFAULT_ARCHITECTURES = ("8.0", "9.0", "10.0", "12.0")


class NotBuildable(Exception):
    """The extension cannot be built here; the message is the reason, in one line."""


@dataclass(frozen=True)
class Toolchain:
    nvcc: Path
    nccl: Path  # the folder of torch's own NCCL wheel, with include/ and lib/
    cublas: Path  # the same of its cuBLAS wheel
    cuda: int  # major version, of all of them
    architectures: tuple[str, ...]  # "8.0", "9.0a", "12.0+PTX", as in TORCH_CUDA_ARCH_LIST


def find_toolchain() -> Toolchain:
    """What the extension is built with. Raises NotBuildable where something is missing or does not match."""
    torch_cuda = _torch_cuda_version()
    nvcc = _find_nvcc()
    nvcc_cuda = _nvcc_version(nvcc)
    # Within a major version CUDA's libraries are compatible, across major versions they are not.
    if _major(nvcc_cuda) != _major(torch_cuda):
        raise NotBuildable(f"nvcc is of CUDA {nvcc_cuda} and torch is built with CUDA {torch_cuda}")
    nccl = _package_folder("nvidia.nccl")
    if nccl is None or not (nccl / "include" / "nccl.h").exists():
        raise NotBuildable("torch's NCCL wheel (nvidia-nccl), which holds nccl.h, is not installed")
    # CUDA 13's libraries share a folder; each of CUDA 12's has its own.
    found = [_package_folder(f"nvidia.cu{_major(torch_cuda)}"), _package_folder("nvidia.cublas")]
    cublas = next((folder for folder in found if folder and (folder / "include" / "cublasLt.h").exists()), None)
    if cublas is None:
        raise NotBuildable("torch's cuBLAS wheel (nvidia-cublas), which holds cublasLt.h, is not installed")
    if not (_python_include() / "Python.h").exists():
        raise NotBuildable(f"Python's header files are not installed (no {_python_include() / 'Python.h'})")
    if shutil.which("g++") is None and "NVCC_CCBIN" not in os.environ:
        raise NotBuildable("nvcc needs a C++ compiler beside it, and there is no g++ on PATH")
    return Toolchain(nvcc, nccl, cublas, _major(torch_cuda), _architectures(nvcc))


def build(toolchain: Toolchain, target: Path, build_folder: Path, *, in_tree: bool, quiet: bool = False) -> None:
    """Compiles csrc into `target`. Raises subprocess.CalledProcessError where the compiler fails.

    The library finds NCCL and cuBLAS relative to its own place in site-packages; `in_tree`, for an editable
    install, adds the absolute paths, as the source folder has no such neighbours.
    """
    build_folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    compile_command = [
        str(toolchain.nvcc),
        "-O3",
        "-std=c++17",
        "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
        f"-DPy_LIMITED_API={PYTHON_ABI}",
        f'-DTPFUSED_ARCHITECTURES="{" ".join(toolchain.architectures)}"',
        f"-I{_python_include()}",
        f"-I{toolchain.nccl / 'include'}",
        # After nvcc's own headers, some of which that folder has too.
        f"-Xcompiler=-idirafter,{toolchain.cublas / 'include'}",
        *_code_flags(toolchain.architectures),
    ]
    folder = source_folder()
    headers = sorted(folder.glob("*.h"))
    steps = []
    for source in sorted([*folder.glob("*.cpp"), *folder.glob("*.cu")]):
        output = build_folder / f"{source.name}.o"
        command = [*compile_command, "-c", str(source), "-o", str(output)]
        if source.name == "module.cpp":
            command.append(f'-DTPFUSED_SOURCES="{source_hash()}"')
        steps.append((output, [source, *headers], command))
    objects = [output for output, _, _ in steps]
    libraries = [
        (toolchain.nccl / "lib", "libnccl.so.2"),
        (toolchain.cublas / "lib", f"libcublasLt.so.{toolchain.cuda}"),
    ]
    rpaths = [f"$ORIGIN/../nvidia/{folder.parent.name}/lib" for folder, _ in libraries]
    rpaths += [str(folder) for folder, _ in libraries] if in_tree else []
    # nvcc links the CUDA run-time library statically, and that opens libcuda when first used: importing the
    # extension needs neither a driver nor a GPU.
    link_command = [str(toolchain.nvcc), "-shared", "-o", str(target), *map(str, objects)]
    link_command += [option for folder, name in libraries for option in (f"-L{folder}", f"-l:{name}")]
    link_command += [f"-Xlinker=-rpath,{path}" for path in rpaths]
    steps.append((target, objects, link_command))
    _run(steps, build_folder, quiet)


@lru_cache
def load() -> ModuleType:
    """The compiled module, tpfused._C.

    Where the install has none, or one of other sources (after a `git pull`, say), it is compiled, once for a torch,
    nvcc, architecture and source, and kept in the user's cache folder; any number of processes may ask at a time.

    Raises:
        NotBuildable: it is not there and can't be built, with the reason.
    """
    installed, _ = _installed()
    if installed is not None:
        return installed
    toolchain, target = _at_first_use()
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(
                f"tpfused: compiling its extension into {folder}, once, for up to a minute", file=sys.stderr, flush=True
            )
            building = folder / "building" / target.name
            try:
                build(toolchain, building, folder / "objects", in_tree=True, quiet=True)
            except subprocess.CalledProcessError as error:
                told = "\n".join(f"{error.stdout}\n{error.stderr}".strip().splitlines()[-20:])
                raise NotBuildable(f"compiling csrc failed:\n{told}") from error
            os.replace(building, target)
    spec = importlib.util.spec_from_file_location("tpfused._C", target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Found:
    """What `load` would use.

    Attributes:
        module: the compiled module; None: there is none yet.
        passed_over: why the install's own is not used; "": it is, or there is none.
        not_buildable: why `load` could not compile one; "": it could, or need not. None is compiled without a GPU.
    """

    module: ModuleType | None
    passed_over: str = ""
    not_buildable: str = ""


def find() -> Found:
    """What `load` would use, the module in the user's cache folder included; nothing is compiled."""
    import torch

    installed, passed_over = _installed()
    if installed is not None:
        return Found(installed)
    try:
        if not torch.cuda.is_available():
            find_toolchain()
        elif _at_first_use()[1].exists():
            return Found(load(), passed_over)
    except (NotBuildable, ImportError) as error:
        return Found(None, passed_over, str(error))
    return Found(None, passed_over)


def _installed() -> tuple[ModuleType | None, str]:
    """The install's module, if `load` uses it, or else why not ("": there is none)."""
    import torch  # noqa: F401, first: it loads the NCCL and cuBLAS that the extension shares with it

    try:
        module = importlib.import_module("tpfused._C")
    except ModuleNotFoundError:
        return None, ""
    except ImportError as error:
        return None, f"it cannot be imported: {error}"
    if module.build_info().get("sources") != source_hash():
        return None, "it was compiled from other sources than these"
    return module, ""


def _at_first_use() -> tuple[Toolchain, Path]:
    """What `load` compiles with, for the current GPU alone, and the file that this is kept in."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    toolchain = replace(find_toolchain(), architectures=(f"{major}.{minor}",))
    told = [torch.__version__, _ask_nvcc(toolchain.nvcc, "--version"), *toolchain.architectures, PYTHON_ABI]
    key = hashlib.sha256("\0".join([*told, source_hash()]).encode()).hexdigest()[:16]
    return toolchain, cache_folder() / key / "_C.abi3.so"


def source_hash() -> str:
    """Tells one state of csrc from another."""
    files = sorted(file for file in source_folder().iterdir() if file.suffix in (".cpp", ".cu", ".h"))
    told = "\0".join(f"{file.name}\0{file.read_text()}" for file in files)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Where the extension compiled at first use is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpfused"


def source_folder() -> Path:
    """csrc, which lies inside an installed package and beside it in the repository."""
    package = Path(__file__).resolve().parent
    inside = package / "csrc"
    return inside if inside.exists() else package.parent / "csrc"


def _torch_cuda_version() -> str:
    folder = _package_folder("torch")
    if folder is None:
        raise NotBuildable("torch is not installed in this Python environment (an isolated build has none)")
    version = runpy.run_path(str(folder / "version.py"))
    if version.get("cuda") is None:
        raise NotBuildable(f"torch {version['__version__']} is not a CUDA build")
    return version["cuda"]


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a parent package is missing
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _find_nvcc() -> Path:
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else []
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise NotBuildable("nvcc is not installed (looked in CUDA_HOME, PATH and /usr/local/cuda)")
    return Path(nvcc)


def _ask_nvcc(nvcc: Path, option: str) -> str:
    try:
        return subprocess.run([nvcc, option], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotBuildable(f"{nvcc} does not run: {error}") from error


def _nvcc_version(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", _ask_nvcc(nvcc, "--version"))
    if found is None:
        raise NotBuildable(f"{nvcc} --version names no release")
    return found[1]


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _python_include() -> Path:
    return Path(sysconfig.get_path("include"))


def _architectures(nvcc: Path) -> tuple[str, ...]:
    wished = re.findall(r"[^;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if wished:
        return tuple(wished)
    codes = re.findall(r"sm_(\d+)(\d)\b", _ask_nvcc(nvcc, "--list-gpu-code"))
    offered = {f"{major}.{minor}" for major, minor in codes}
    *older, newest = [architecture for architecture in DEFAULT_ARCHITECTURES if architecture in offered]
    return (*older, f"{newest}+PTX")  # the driver compiles the PTX for cards newer than all of these


def _code_flags(architectures: tuple[str, ...]) -> list[str]:
    flags = []
    for architecture in architectures:
        parts = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", architecture)
        if parts is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: {architecture!r} is not like 9.0, 9.0a or 9.0+PTX")
        number = parts[1] + parts[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if parts[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _run(steps: list[tuple[Path, list[Path], list[str]]], build_folder: Path, quiet: bool) -> None:
    """Runs (output, inputs, command) steps: those out of date, in parallel, with ninja; else all in turn."""
    # ninja's wheel puts it beside the interpreter, which need not be on PATH.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ninja = shutil.which("ninja", path=search)
    if ninja is None:
        for _, _, command in steps:
            subprocess.run(command, check=True, capture_output=quiet, text=True)
        return

    def quoted(path):
        return re.sub(r"([$ :])", r"$\1", str(path))

    lines = ["rule run", "  command = $command"]
    for output, inputs, command in steps:
        lines.append(f"build {quoted(output)}: run {' '.join(map(quoted, inputs))}")
        lines.append(f"  command = {shlex.join(command).replace('$', '$$')}")
    (build_folder / "build.ninja").write_text("\n".join(lines) + "\n")
    subprocess.run([ninja, "-C", str(build_folder)], check=True, capture_output=quiet, text=True)
