"""`tpfused info`: what it finds here, and what it makes of other machines."""

import json
import platform
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import tpfused
from tpfused import extension
from tpfused.cli import info, main
from tpfused.overlap import saved

# Underlined as nvidia-smi prints it; the host's third GPU hangs on PCIe.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
SMI_GPUS = "0, GPU-aaaa, 580.159.04\n1, GPU-bbbb, 580.159.04\n2, GPU-cccc, 580.159.04\n"


def gpu(index: int, uuid: str) -> dict:
    return {"index": index, "name": "GPU", "capability": "9.0", "memory_bytes": 80 * 2**30, "uuid": uuid}


@pytest.fixture
def smi(monkeypatch):
    answers = {"--query-gpu=index,uuid,driver_version": SMI_GPUS, "topo": TOPOLOGY}
    monkeypatch.setattr(info, "_nvidia_smi", lambda *arguments: answers[arguments[0]])
    return answers


@pytest.fixture
def two_gpus(monkeypatch, smi):
    """torch sees two of the host's three GPUs, in another order than nvidia-smi."""
    monkeypatch.setattr(info, "_gpus", lambda torch: [gpu(0, "cccc"), gpu(1, "aaaa")])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)


def test_json_here(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["tpfused"] == tpfused.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["cuda"] == torch.version.cuda
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["extension"]["built"] or found["extension"]["reason"]
    assert found["uses"]["backend"] == ("nccl" if found["gpus"] else "gloo")
    kernels = found["uses"][info.KERNELS]
    assert kernels.startswith("Triton" if found["gpus"] else "plain path")
    assert found["uses"]["matmuls"].startswith("overlapped" if len(found["gpus"]) > 1 else "plain path")


def test_text_here(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, "GPUs", "Extension", "backend: ", "plain path"):
        assert part in text


def test_without_torch(monkeypatch, capsys):
    monkeypatch.setattr(info, "_import_torch", lambda: None)
    assert main(["info"]) == 0
    assert "torch cannot be imported" in capsys.readouterr().out


def test_links_follow_the_uuid(two_gpus, capsys):
    found = info.collect()
    assert found["links"] == [{"gpus": [0, 1], "peer_access": True, "nvlink": "none (SYS)"}]
    assert found["versions"]["driver"] == "580.159.04"
    assert "0 and 1  peer access, NVLink: none (SYS)" in info.render(found)


def test_links_without_nvidia_smi(two_gpus, smi):
    smi.update({name: "" for name in smi})
    found = info.collect()
    assert found["links"] == [{"gpus": [0, 1], "peer_access": True, "nvlink": "unknown"}]
    assert found["versions"]["driver"] == "unknown"


def test_peer_access_needs_both_directions(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i < j)
    assert info.collect()["links"][0]["peer_access"] is False


def test_topology():
    topology = info.parse_topology(TOPOLOGY)
    assert topology["0", "1"] == topology["1", "0"] == "NV18"
    assert topology["1", "2"] == "PHB"
    assert len(topology) == 9
    assert info.parse_topology("") == {}


def test_nvlink_wording():
    assert info._nvlink("NV18") == "18 links"
    assert info._nvlink("PIX") == "none (PIX)"
    assert info._nvlink(None) == "unknown"


@pytest.mark.parametrize("outcome", [OSError, info.subprocess.TimeoutExpired("nvidia-smi", 60), None])
def test_nvidia_smi_that_fails(monkeypatch, outcome):
    def run(*args, **kwargs):
        if outcome is not None:
            raise outcome
        return SimpleNamespace(returncode=9, stdout="it has failed")

    monkeypatch.setattr(info.subprocess, "run", run)
    assert info._nvidia_smi("topo", "-m") == ""


@pytest.fixture
def finds(monkeypatch):
    """Makes `extension.find` answer what the test says."""
    return lambda found: monkeypatch.setattr(extension, "find", lambda: found)


def compiled(file: str = "tpfused/_C.abi3.so") -> SimpleNamespace:
    def kernel_architecture(device):
        if device == 1:
            raise RuntimeError("CUDA device 1: no kernel image is available for execution on the device")
        return 90

    built = {"cuda": 13000, "architectures": "8.0 12.0+PTX", "nccl_compiled": 23007, "nccl_loaded": 22809}
    return SimpleNamespace(build_info=lambda: built, kernel_architecture=kernel_architecture, __file__=file)


TWO = [gpu(0, "aaaa"), gpu(1, "bbbb")]
OTHER = "it was compiled from other sources than these"


def matmuls(found: dict) -> str:
    return info._matmuls(TWO, found, "nccl").split(",")[0].split(":")[0]


def test_extension_not_built(finds):
    finds(extension.Found(None, not_buildable="nvcc is not installed"))
    found = info._extension(torch, TWO)
    assert found == {"built": False, "usable": False, "can_be_built": False, "reason": "nvcc is not installed"}
    assert matmuls(found) == "plain path"


def test_extension_that_cannot_be_loaded(finds):
    why = "it cannot be imported: libnccl.so.2: cannot open shared object file"
    finds(extension.Found(None, why, "nvcc is not installed"))
    found = info._extension(torch, TWO)
    assert found == {
        "built": True,
        "usable": False,
        "can_be_built": False,
        "installed": f"not used, for {why}",
        "reason": "nvcc is not installed",
    }
    assert matmuls(found) == "plain path"


def test_extension_of_other_sources(finds, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finds(extension.Found(None, OTHER))
    found = info._extension(torch, TWO)
    assert found["built"] and not found["usable"] and found["installed"] == f"not used, for {OTHER}"
    assert "at first use" in found["reason"] and str(tmp_path) in found["reason"]
    assert matmuls(found) == "overlapped with their collectives"
    assert "pip install" in info._extension(torch, [])["reason"]


def test_extension_compiled_at_first_use(finds):
    finds(extension.Found(compiled("cache/_C.abi3.so"), OTHER))
    found = info._extension(torch, TWO)
    assert found["built"] and found["usable"] and found["file"] == "cache/_C.abi3.so"
    assert found["installed"] == f"not used, for {OTHER}" and matmuls(found) == "overlapped with their collectives"


def test_extension_built(finds):
    finds(extension.Found(compiled()))
    found = info._extension(torch, TWO)
    assert found["built"] and found["usable"] and "installed" not in found
    assert found["cuda"] == "13.0"
    assert found["architectures"] == ["8.0", "12.0+PTX"]
    assert (found["nccl_compiled"], found["nccl_loaded"]) == ("2.30.7", "2.28.9")
    assert found["runs_on_gpus"][0] == "9.0"
    assert "no kernel image" in found["runs_on_gpus"][1]


def test_names_what_has_kernels(capsys):
    main(["info"])
    told = capsys.readouterr().out.split("Will be used")[1]
    for name in ("embedding", "rotary", "attention to a cache", "gated", "masked softmax", "cross entropy"):
        assert name in told, name


@pytest.fixture
def choices(monkeypatch, tmp_path):
    """An empty cache folder, and no tier forced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TPFUSED_TIER", raising=False)
    return tmp_path / "tpfused" / "choices.json"


def test_choices(choices, monkeypatch, capsys):
    found = info.collect()
    assert found["choices"] == {"kept_in": str(choices), "measured": {}, "forced_tier": None}
    assert f"  kept in: {choices}\n  none yet\n\n" in info.render(found)
    for place, case in (("2 x GPU", "a"), ("2 x GPU", "b"), ("4 x GPU", "a")):
        saved.save(place, case, {"p2p": 1.0, "reference": 2.0})
    monkeypatch.setenv("TPFUSED_TIER", "nccl")
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = {"p2p": 1.0, "reference": 2.0}
    assert found["choices"]["measured"] == {"2 x GPU": {"a": times, "b": times}, "4 x GPU": {"a": times}}
    assert found["choices"]["forced_tier"] == "nccl"
    assert "  2 on 2 x GPU\n  1 on 4 x GPU\n  forced tier: nccl (TPFUSED_TIER)\n\n" in info.render(found)


def test_a_forced_tier_that_does_not_exist(choices, monkeypatch, capsys):
    """It is shown as what it is, and the package can be imported."""
    monkeypatch.setenv("TPFUSED_TIER", "typo")
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choices"]["forced_tier"] == "typo" and "'nccl', 'p2p'" in found["choices"]["invalid"]
    text = info.render(found)
    assert f"  forced tier: none, operations raise: {found['choices']['invalid']}\n" in text
    assert "TPFUSED_TIER must be one of" in text and "'typo'" in text and "typo (TPFUSED_TIER)" not in text


def test_every_choice(choices, capsys):
    assert main(["info", "--choices"]) == 0
    assert capsys.readouterr().out == f"none are kept in {choices}\n"
    saved.save("2 x GPU", "op bfloat16 1 2 3", {"p2p": 1234.5, "nccl": 1.0})
    assert main(["info", "--choices"]) == 0
    assert capsys.readouterr().out == "2 x GPU\n  op bfloat16 1 2 3: nccl 1.0 us, p2p 1,234.5 us\n"


def test_clear_choices(choices, monkeypatch, capsys):
    saved.save("2 x GPU", "a", {"p2p": 1.0, "reference": 2.0})
    assert main(["info", "--clear-choices"]) == 0
    assert capsys.readouterr().out == f"measured choices deleted: 1 ({choices})\n" and not choices.exists()
    assert main(["info", "--clear-choices"]) == 0
    assert capsys.readouterr().out == f"measured choices deleted: 0 ({choices})\n"

    def clear():
        raise PermissionError("it is not yours")

    monkeypatch.setattr(saved, "clear", clear)
    assert main(["info", "--clear-choices"]) == 2
    assert capsys.readouterr().err == "tpfused info: --clear-choices: it is not yours\n"


def test_without_a_home(monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert main(["info"]) == 0 and main(["info", "--choices"]) == 0
    assert capsys.readouterr().out.count("nowhere: Could not determine home directory.") == 2
    assert main(["info", "--clear-choices"]) == 2
    assert capsys.readouterr().err == "tpfused info: --clear-choices: Could not determine home directory.\n"


@pytest.mark.gpu
def test_on_gpus():
    found = info.collect()
    count = torch.cuda.device_count()
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(count)) and count > 0
    assert all(gpu["memory_bytes"] > 2**30 for gpu in found["gpus"])
    assert len(found["links"]) == count * (count - 1) // 2
    assert found["versions"]["nccl"]
    assert found["uses"]["backend"] == "nccl"
    if found["extension"]["usable"]:
        assert len(found["extension"]["runs_on_gpus"]) == count
