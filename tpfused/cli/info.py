"""`tpfused info`: what is installed, which GPUs there are and how they are linked, and what tpfused will use.

Works on every machine: what cannot be found out is shown as "unknown", what is not there as "none".
"""

import importlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import tpfused
from tpfused import extension
from tpfused.cli.errors import UserError
from tpfused.overlap import saved
from tpfused.overlap.tiers import why_invalid

UNKNOWN = "unknown"
KERNELS = "embedding, rotary positions, attention to a cache, gated activation, masked softmax, cross entropy"


def add_arguments(parser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    what.add_argument("--choices", action="store_true", help="print every measured choice of overlapped operations")
    what.add_argument("--clear-choices", action="store_true", help="delete what was measured of overlapped operations")


def run(args) -> int:
    if args.clear_choices:
        return _clear_choices()
    if args.choices:
        print("\n".join(_choices(saved.load())) or f"none are kept in {_where(saved.path)}")
        return 0
    info = collect()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0


def collect() -> dict:
    """Everything that `tpfused info` shows, as JSON values; the keys are those of `--json`."""
    torch = _import_torch()
    gpus = _gpus(torch)
    smi = _nvidia_smi_gpus()
    built = _extension(torch, gpus)
    forced = os.environ.get("TPFUSED_TIER") or None
    invalid = why_invalid(forced) if forced else ""
    return {
        "versions": {
            "tpfused": tpfused.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__ if torch else None,
            "cuda": torch.version.cuda if torch else None,
            "nccl": _nccl_version(torch),
            "triton": _installed_version("triton"),
            "driver": next((gpu["driver"] for gpu in smi), UNKNOWN if gpus else None),
        },
        "gpus": gpus,
        "links": _links(torch, gpus, smi),
        "extension": built,
        "choices": {
            "kept_in": _where(saved.path),
            "measured": saved.load(),
            "forced_tier": forced,
            **({"invalid": invalid} if invalid else {}),
        },
        "uses": _uses(torch, gpus, built),
    }


def render(info: dict) -> str:
    """`collect()`'s answer as text for a terminal."""
    lines = [f"{name:<10}{version or 'none'}" for name, version in info["versions"].items()]
    lines += ["", "GPUs"]
    for gpu in info["gpus"]:
        memory = f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        lines.append(f"  {gpu['index']}  {gpu['name']}, compute capability {gpu['capability']}, {memory}")
    if not info["gpus"]:
        lines.append("  none")
    if info["links"]:
        lines += ["", "Links between GPUs"]
        for link in info["links"]:
            first, second = link["gpus"]
            peer = {True: "peer access", False: "no peer access"}[link["peer_access"]]
            lines.append(f"  {first} and {second}  {peer}, NVLink: {link['nvlink']}")
    lines += ["", "Extension"]
    lines += [f"  {key.replace('_', ' ')}: {_plain(value)}" for key, value in info["extension"].items()]
    choices = info["choices"]
    lines += ["", "Measured choices of overlapped operations", f"  kept in: {choices['kept_in']}"]
    lines += [f"  {len(cases)} on {place}" for place, cases in choices["measured"].items()] or ["  none yet"]
    if "invalid" in choices:
        lines.append(f"  forced tier: none, operations raise: {choices['invalid']}")
    elif choices["forced_tier"]:
        lines.append(f"  forced tier: {choices['forced_tier']} (TPFUSED_TIER)")
    lines += ["", "Will be used"]
    lines += [f"  {key}: {value}" for key, value in info["uses"].items()]
    return "\n".join(lines)


def _choices(measured: dict[str, dict[str, saved.Times]]) -> list[str]:
    """Operation, activation, batches if several, dtype, rows, features in and out of all ranks, and the microseconds of
    each way, the fastest first."""
    lines = []
    for place, cases in measured.items():
        lines.append(place)
        for case, us in sorted(cases.items()):
            times = (f"{name} {us[name]:,.1f} us" for name in sorted(us, key=us.__getitem__))
            lines.append(f"  {case}: {', '.join(times)}")
    return lines


def _clear_choices() -> int:
    try:
        count = saved.clear()
    except (OSError, RuntimeError) as error:  # the latter: no home
        raise UserError(f"--clear-choices: {error}") from error
    print(f"measured choices deleted: {count} ({saved.path()})")
    return 0


def _where(path: Callable[[], Path]) -> str:
    """A path in the cache folder."""
    try:
        return str(path())
    except RuntimeError as error:  # as Path.home() says
        return f"nowhere: {error} XDG_CACHE_HOME, or HOME, would say where"


def _plain(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _import_torch():
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):  # OSError: a library of its own that torch cannot load
        return None


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl_version(torch) -> str | None:
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpus(torch) -> list[dict]:
    if torch is None or not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "uuid": str(properties.uuid).removeprefix("GPU-"),
            }
        )
    return gpus


def _nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _nvidia_smi_gpus() -> list[dict]:
    table = _nvidia_smi("--query-gpu=index,uuid,driver_version", "--format=csv,noheader")
    rows = re.findall(r"^(\d+), (?:GPU-)?(\S+), (\S+)$", table, re.MULTILINE)
    return [{"index": index, "uuid": uuid, "driver": driver} for index, uuid, driver in rows]


def _links(torch, gpus: list[dict], smi: list[dict]) -> list[dict]:
    if len(gpus) < 2:
        return []
    topology = parse_topology(_nvidia_smi("topo", "-m"))
    # nvidia-smi numbers all of the host's GPUs, torch the visible ones in an order of its own: match by uuid.
    numbers = {gpu["uuid"]: gpu["index"] for gpu in smi}
    links = []
    for first, second in combinations(gpus, 2):
        pair = (numbers.get(first["uuid"]), numbers.get(second["uuid"]))
        i, j = first["index"], second["index"]
        peer_access = torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i)
        links.append({"gpus": [i, j], "peer_access": peer_access, "nvlink": _nvlink(topology.get(pair))})
    return links


def _nvlink(connection: str | None) -> str:
    """Says "4 links" for nvidia-smi's NV4; "none" for its names of PCIe paths."""
    if connection is None:
        return UNKNOWN
    nvlink = re.fullmatch(r"NV(\d+)", connection)
    return f"{nvlink[1]} links" if nvlink else f"none ({connection})"


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """`nvidia-smi topo -m` -> {("0", "1"): "NV18", ...}: what links two GPUs, by nvidia-smi's numbers."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    topology = {}
    for row in rows:
        if row and row is not header and row[0] in columns:
            for column, connection in zip(columns, row[1:], strict=False):
                topology[row[0].removeprefix("GPU"), column.removeprefix("GPU")] = connection
    return topology


def _extension(torch, gpus: list[dict]) -> dict:
    if torch is None:
        return {"built": False, "usable": False, "can_be_built": False, "reason": "torch cannot be imported"}
    found = extension.find()
    installed = {"installed": f"not used, for {found.passed_over}"} if found.passed_over else {}
    if found.module is None:
        reason = found.not_buildable
        answer = {"built": bool(installed), "usable": False, "can_be_built": not reason, **installed}
        if not reason and gpus:
            reason = f"not yet: it will be compiled at first use, into {_where(extension.cache_folder)}"
        elif not reason:
            install = 'pip install "setuptools>=77" && pip install --no-build-isolation -e .'
            reason = f"not yet, but it can be: {install} (in the source folder)"
        return answer | {"reason": reason}
    compiled = found.module
    built = compiled.build_info()
    answer = {
        "built": True,
        "usable": True,
        "file": compiled.__file__,
        **installed,
        "cuda": _cuda_version(built["cuda"]),
        "architectures": built["architectures"].split(),
        "nccl_compiled": _dotted_nccl(built["nccl_compiled"]),
        "nccl_loaded": _dotted_nccl(built["nccl_loaded"]),
    }
    if gpus:
        answer["runs_on_gpus"] = [_kernels_on(compiled, gpu["index"]) for gpu in gpus]
    return answer


def _kernels_on(compiled, index: int) -> str:
    """The architecture whose machine code this GPU runs, or why it runs none of it."""
    try:
        architecture = compiled.kernel_architecture(index)
    except RuntimeError as error:
        return str(error)
    return f"{architecture // 10}.{architecture % 10}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted_nccl(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _matmuls(gpus: list[dict], built: dict, backend: str) -> str:
    if len(gpus) > 1 and (built["usable"] or built["can_be_built"]):
        return "overlapped with their collectives, where that is the faster"
    return f"plain path: torch's, then {backend} collectives"


def _kernels(gpus: list[dict]) -> str:
    if find_spec("triton") is None:
        return "none: the layers cannot be imported without Triton"
    if not gpus:
        return "plain path: Triton's kernels need a GPU"
    old = any(int(gpu["capability"].split(".")[0]) < 8 for gpu in gpus)
    return "plain path on GPUs older than Ampere, else Triton kernels" if old else "Triton kernels"


def _uses(torch, gpus: list[dict], built: dict) -> dict:
    if torch is None:
        return {"device": "none: torch cannot be imported"}
    backend = "nccl" if gpus and _nccl_version(torch) else "gloo"
    return {
        "device": f"cuda ({len(gpus)})" if gpus else "cpu",
        "backend": backend,
        "matmuls": _matmuls(gpus, built, backend),
        KERNELS: _kernels(gpus),
    }
