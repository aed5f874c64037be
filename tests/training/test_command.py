"""The command as its users run it: `python -m tpfused train` and torchrun, on the CPU."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.signals import as_in_a_terminal
from tpfused.cli import main

COMMAND = [sys.executable, "-m", "tpfused", "train", "--device", "cpu"]
TINY = ["--preset", "quick", "--batch-size", "4", "--seq-len", "16", "--sample", "0"]
ENDLESS = [*COMMAND, *TINY, "--tp", "2", "--steps", "1000000"]
TIMEOUT = 200.0
SECONDS = 15.0  # the most that ending may take, on a busy machine


def run(*options, command=COMMAND) -> str:
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """20 steps of the quick preset on two workers, with everything it can write: (folder, standard output)."""
    folder = tmp_path_factory.mktemp("quick")
    files = ["--json", folder / "run.json", "--plot", folder / "run.png", "--save", folder / "runs"]
    return folder, run("--preset", "quick", "--tp", 2, "--steps", 20, "--sample", 20, *files)


def test_quick_matches_its_dense_twin(quick):
    result = json.loads((quick[0] / "run.json").read_text())
    dense, parallel = result["dense"], result["parallel"]
    assert (result["preset"], result["tp"], result["dp"], result["steps"]) == ("quick", 2, 1, 20)
    assert len(dense["loss"]) == len(dense["grad_norm"]) == len(parallel["loss"]) == len(parallel["grad_norm"]) == 20
    assert result["max_rel_loss_diff"] <= 1e-5 and result["max_rel_grad_norm_diff"] <= 1e-4
    assert dense["loss"][-1] < 0.7 * dense["loss"][0]
    assert dense["params"] == 803_968 and parallel["params_per_rank"] == [402_560, 402_560]
    assert result["memory"] == "counted" and dense["peak_bytes"] >= 16 * dense["params"]
    assert all(peak < 0.51 * dense["peak_bytes"] for peak in parallel["peak_bytes_per_rank"])
    assert dense["step_ms"] > 0 and parallel["step_ms"] > 0
    assert set(parallel["phases_ms"]) == {"forward", "backward", "optimizer", "communication"}
    assert abs(parallel["validation"]["loss"] - dense["validation"]["loss"]) < 1e-4


def test_the_report_shows_both_runs(quick):
    folder, out = quick
    for words in (
        "step 20/20",
        "dense twin",
        "tp 2",
        "held-out loss",
        "counted",
        "tokens/s",
        "backward",
        "continuation",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) < 120
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG") and (folder / "run.png").stat().st_size > 10_000


@pytest.mark.parametrize("option, path", [("json", "/dev/full"), ("plot", "/proc/x.png")])
def test_a_file_that_cannot_be_written_loses_no_result(option, path, capfd):
    assert (
        main(["train", "--device", "cpu", *TINY, "--tp", "1", "--steps", "1", "--no-dense", f"--{option}", path]) == 2
    )
    out, err = capfd.readouterr()
    assert "tokens/s" in out and "wrote" not in out
    assert err.startswith(f"tpfused train: --{option} {path} cannot be written: ") and err.count("\n") == 1


def test_a_run_resumes_at_another_degree(quick, tmp_path):
    out = run(
        "--resume",
        quick[0] / "runs",
        "--tp",
        1,
        "--steps",
        22,
        "--sample",
        0,
        "--no-dense",
        "--json",
        tmp_path / "more.json",
    )
    result = json.loads((tmp_path / "more.json").read_text())
    assert (result["first_step"], result["steps"], result["dense"]) == (20, 22, None)
    assert len(result["parallel"]["loss"]) == 2
    before = json.loads((quick[0] / "run.json").read_text())["parallel"]["loss"]
    assert result["parallel"]["loss"][0] < before[10]
    assert "resuming" in out and "dense twin: step" not in out


class Running:
    """An endless run in a process group of its own, once it has made a step."""

    def __init__(self, folder: Path):
        self.out = folder / "out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                ENDLESS, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=as_in_a_terminal
            )
        deadline = time.monotonic() + TIMEOUT
        while "step 1/" not in self.out.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.1)

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def end(self) -> tuple[int, str]:
        """(exit code, last line), once all processes of the group are gone; within seconds."""
        code = self.process.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while self._alive():
            assert time.monotonic() < deadline, "processes were left behind"
            time.sleep(0.1)
        return code, self.out.read_text().splitlines()[-1]

    def _alive(self) -> bool:
        listing = subprocess.run(["ps", "-o", "stat=", "-g", str(self.process.pid)], capture_output=True, text=True)
        return any(not state.startswith("Z") for state in listing.stdout.split())


@pytest.fixture
def running(tmp_path):
    run = Running(tmp_path)
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


def test_a_killed_worker_ends_the_run_with_the_reason(running):
    victim = running.workers()[1]
    os.kill(victim, signal.SIGKILL)
    code, line = running.end()
    assert code == 1
    assert line == f"tpfused train: worker 1 (process {victim}) was killed by SIGKILL (out of memory?)"


def test_ctrl_c_ends_everything_quietly(running):
    os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does: to all processes at once
    code, line = running.end()
    assert (code, line) == (130, "tpfused train: interrupted")
    assert "Traceback" not in running.out.read_text()


def test_two_torchrun_agents_train_one_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
        launcher += [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        options = [*COMMAND[1:], *TINY, "--tp", "2", "--steps", "3", "--json", str(tmp_path / f"{node}.json")]
        agents.append(
            subprocess.Popen([*launcher, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    (out, err), (other_out, other_err) = (agent.communicate(timeout=TIMEOUT) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], err + other_err
    assert "dense twin" in out and other_out == "" and not (tmp_path / "1.json").exists()
    result = json.loads((tmp_path / "0.json").read_text())
    assert result["max_rel_loss_diff"] <= 1e-5 and len(result["parallel"]["params_per_rank"]) == 2
