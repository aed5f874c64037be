"""The commit that results name."""

import subprocess

import pytest

import tpfused
from tpfused import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of a package, committed once; gives its folder and the commit's first digits."""

    def git(*arguments):
        author = ["-c", "user.name=Someone", "-c", "user.email=someone@example.org"]
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    for name in ("tpfused/__init__.py", "benchmarks/results/kernels.json", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as committed\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "All")
    monkeypatch.setattr(tpfused, "__file__", str(tmp_path / "tpfused" / "__init__.py"))
    return tmp_path, git("rev-parse", "HEAD")[:12]


def test_what_benchmarks_write_is_no_change(checkout):
    folder, commit = checkout
    assert provenance.commit() == commit
    (folder / "benchmarks/results/kernels.json").write_text("measured again\n")
    (folder / "README.md").write_text("with other tables\n")
    (folder / "plots").mkdir()
    (folder / "plots/kernels.png").write_text("new\n")
    assert provenance.commit() == commit
    (folder / "tpfused/__init__.py").write_text("changed\n")
    assert provenance.commit() == f"{commit}-dirty"


def test_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(tpfused, "__file__", str(tmp_path / "tpfused" / "__init__.py"))
    assert provenance.commit() is None
    (tmp_path / ".git").mkdir()  # an empty one is no repository
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() is None
