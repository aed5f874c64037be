"""The command line around the subcommands: help, wrong uses, exit codes."""

import os
import subprocess
import sys
import time

import pytest

import tpfused
from tpfused import cli
from tpfused.cli.errors import UserError
from tpfused.overlap.tiers import NAMES


def test_help_teaches_and_needs_no_torch():
    code = "import sys; from tpfused.cli import main; sys.modules['torch'] = None; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert command in done.stdout
    assert "examples:" in done.stdout


def test_python_m():
    done = subprocess.run([sys.executable, "-m", "tpfused", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.strip() == f"tpfused {tpfused.__version__}"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: tpfused {command}" in capsys.readouterr().out


@pytest.mark.parametrize("wrong, hint", [("trian", "did you mean 'train'?"), ("xyz", "the commands are info, train")])
def test_unknown_command(wrong, hint, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([wrong])
    assert end.value.code == 2
    assert f"there is no command {wrong!r}; {hint}" in capsys.readouterr().err


def test_no_command(capsys):
    assert cli.main([]) == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["", *cli.COMMANDS, "bench kernels", "bench overlap", "bench comm", "bench model"], ids=str
)
def test_unknown_option(command, capsys):
    """The help that has the options is the subcommand's own."""
    whole = " ".join(["tpfused", *command.split()])
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--jsn", "x"] if command != "bench" else ["bench", "--jsn", "kernels"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{whole}: ") and err.endswith(f"(see {whole} --help)\n") and err.count("\n") == 1
    assert not command or "--jsn" in err


@pytest.mark.parametrize(
    "outcome, code, stderr",
    [
        (UserError("no such file: x"), 2, "tpfused info: no such file: x\n"),
        (KeyboardInterrupt(), 130, "tpfused info: interrupted\n"),
    ],
)
def test_exit_code(monkeypatch, capsys, outcome, code, stderr):
    def run(args):
        raise outcome

    monkeypatch.setattr("tpfused.cli.info.run", run)
    assert cli.main(["info"]) == code
    assert capsys.readouterr().err == stderr


def test_other_errors_keep_their_traceback(monkeypatch):
    def run(args):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("tpfused.cli.info.run", run)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["info"])


@pytest.mark.parametrize("command", ["check --list", "bench comm --cpu --list", "train --steps 1", "plan --model gpt2"])
def test_a_tier_that_there_is_not(command, monkeypatch, capsys):
    monkeypatch.setenv("TPFUSED_TIER", "ncll")
    assert cli.main(command.split()) == 2
    err = capsys.readouterr().err
    assert "TPFUSED_TIER" in err and "'ncll'" in err and all(name in err for name in NAMES) and err.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", "9" * 26])
@pytest.mark.parametrize("command", ["check --cpu", "train", "bench kernels", "bench comm --cpu"])
def test_a_seed_that_no_generator_takes(command, seed, capsys):
    assert cli.main([*command.split(), "--seed", seed]) == 2
    told = f"--seed must be at least 0 and below 2**63, not {seed}\n"
    assert capsys.readouterr().err == f"tpfused {command.split()[0]}: {told}"


@pytest.mark.parametrize("command", ["check --json x.json", "bench kernels --csv x.csv", "bench comm --plot plots"])
def test_a_list_takes_no_files(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command.split(), "--list"]) == 2
    *_, option, _ = command.split()
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"tpfused {command.split()[0]}: --list only prints, and takes no {option}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command, options",
    [
        ("train", ["json", "plot", "text", "save", "resume"]),
        ("check --cpu", ["json"]),
        ("plan --model gpt2 --gpus 1", ["json", "from"]),
    ],
)
def test_a_name_that_is_empty(command, options, capsys):
    for option in options:
        assert cli.main([*command.split(), f"--{option}", ""]) == 2
        told = f"tpfused {command.split()[0]}: --{option} needs a name, and '' is empty\n"
        assert capsys.readouterr().err == told


@pytest.mark.parametrize("command", ["info", "check --list", "bench comm --cpu --sizes 1K"])
def test_output_that_nobody_reads(command):
    """As for any program before `| head`: no traceback, and the exit code of SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "tpfused", *command.split()], stdout=out, stderr=subprocess.PIPE, timeout=120
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_no_worker_outlives_its_reader():
    command = [sys.executable, "-m", "tpfused", "check", "--cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while "ok" not in process.stdout.readline():
            pass
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            workers = children.read().split()
        process.stdout.close()
        assert process.wait(120) == 141 and process.stderr.read() == ""
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(workers) >= 2 and not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def test_another_broken_pipe_is_not_hidden(monkeypatch):
    def run(args):
        raise BrokenPipeError("to a worker, say")

    monkeypatch.setattr("tpfused.cli.info.run", run)
    with pytest.raises(BrokenPipeError, match="to a worker"):
        cli.main(["info"])
