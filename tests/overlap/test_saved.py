"""The file of measured choices: broken ones, folders that can't be written, processes that write at once."""

import json
import os
import subprocess
import sys

import pytest

from tpfused.overlap import saved


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"7", b'{"a": 1}', b'{"a": {"b": {"p2p": "fast"}}}', b"[" * 100_000]
)
def test_a_broken_file_is_written_anew(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved.path().parent.mkdir()
    saved.path().write_bytes(content)
    assert not any(saved.load().values())
    saved.save("here", "op", {"p2p": 1.0})
    assert saved.load()["here"] == {"op": {"p2p": 1.0}}
    assert saved.clear() == 1 and saved.load() == {} and saved.clear() == 0


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "tpfused").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved.save("here", "op", {"p2p": 1.0})
    assert saved.load() == {}


def test_the_oldest_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(saved, "PLACES", 2)
    monkeypatch.setattr(saved, "CASES", 2)
    for place in "abac":
        for case in "xyxz":
            saved.save(place, case, {"p2p": 1.0})
    assert {place: list(cases) for place, cases in saved.load().items()} == {"a": ["x", "z"], "c": ["x", "z"]}


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    code = (
        "import sys; from tpfused.overlap import saved\n"
        "for i in range(60): saved.save('here', f'{sys.argv[1]} {i}', {'p2p': 1.0}); assert saved.load()"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(i)], env=environment) for i in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(json.loads((tmp_path / "tpfused" / "choices.json").read_text())["here"]) == 180
