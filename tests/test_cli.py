"""The command line around the subcommands: help, wrong uses, exit codes."""

import subprocess
import sys

import pytest

import tpfused
from tpfused import cli
from tpfused.cli.errors import UserError


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


def test_unknown_option(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["info", "--jsn"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "--jsn" in err and err.count("\n") == 1


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
