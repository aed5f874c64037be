"""A communicator that one rank cannot make, and what ranks learn of an operation that was given up: none waits without
end. On a CPU, with a fake of the compiled extension.
"""

import re
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.distributed import Workers
from tpfused import agreement, extension
from tpfused.group import resolve_group
from tpfused.overlap import calls, communicator

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def workers():
    with Workers("cpu", 4) as pool:
        yield pool


@contextmanager
def fakes(load):
    """As on a GPU, in a process without communicators."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(extension, "load", load)
        patch.setattr(communicator, "_communicators", {})
        patch.setattr(communicator, "_left", [])
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield caught


def fake_module(**replaced):
    names = ("group_destroy", "group_timeout", "group_disconnect", "group_connect", "group_connect_nccl")
    made = {name: Mock(return_value=None) for name in names}
    made |= {name: Mock(return_value=b"7") for name in ("group_create", "group_allocate", "nccl_unique_id")}
    return SimpleNamespace(**made | replaced)


def fails(error):
    return Mock(side_effect=error)


def check_no_extension(ctx, error):
    """Two groups of two ranks; the last rank of each has no extension."""
    group, unlucky = resolve_group(ctx.group(2)), ctx.rank // 2 * 2 + 1
    module = fake_module()
    with fakes(fails(error) if ctx.rank == unlucky else lambda: module) as caught:
        assert communicator.communicator_of(group, DEVICE) is None
    (warning,) = caught
    told = str(error) or type(error).__name__
    assert f"rank {unlucky} lacks the compiled extension: {told}" in str(warning.message)
    assert ctx.rank == unlucky or module.group_destroy.call_count == 1


@pytest.mark.parametrize(
    "error",
    [
        extension.NotBuildable("there is no nvcc"),
        PermissionError(13, "no lock file"),
        ImportError("libcudart.so is missing"),
        ValueError("8.x is no architecture"),
        RuntimeError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_rank_without_the_extension(workers, error):
    workers.run(check_no_extension, error, timeout=30)


def check_no_memory(ctx, step):
    group, unlucky = resolve_group(ctx.group(2)), ctx.rank // 2 * 2 + 1
    module = fake_module(**{step: fails(ValueError("no memory"))} if ctx.rank == unlucky else {})
    with fakes(lambda: module) as caught:
        made = communicator.communicator_of(group, DEVICE)
    assert made.tiers == ("nccl",)
    told = [str(warning.message) for warning in caught]
    assert any(f"rank {unlucky}: no memory that peers can write: no memory" in text for text in told) == (
        ctx.rank == unlucky
    )


def check_memory_that_torch_held(ctx):
    """On one rank of each group there is room once torch has emptied its cache; then there is none, and later again."""
    group, emptied, full = resolve_group(ctx.group(2)), Mock(), RuntimeError("out of memory")
    module = fake_module()
    with fakes(lambda: module), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", emptied)
        if ctx.rank % 2:
            module.group_allocate.side_effect = [full, b"7", full, full, b"7"]
        made = communicator.communicator_of(group, DEVICE)
        assert made.tiers == ("p2p", "nccl") and made.has_peers
        with pytest.raises(RuntimeError, match="could not get 3 MiB of memory for its peers"):
            made.reserve(3 * 2**20, "op")
        assert not made.has_peers and emptied.call_count == ctx.rank % 2 * 2
        made.reserve(1, "op")  # gets what small sums need
        assert made.has_peers and module.group_allocate.call_args.args[1] == communicator.FIRST_SLOT


def test_memory_that_torch_held(workers):
    workers.run(check_memory_that_torch_held, timeout=30)


@pytest.mark.parametrize("step", ["group_disconnect", "group_allocate", "group_connect"])
def test_a_rank_without_memory_for_its_peers(workers, step):
    workers.run(check_no_memory, step, timeout=30)


def check_no_nccl(ctx, step, unlucky):
    """`unlucky`: in its group."""
    group, rank = resolve_group(ctx.group(2)), ctx.rank // 2 * 2 + unlucky
    module = fake_module(**{step: fails(OSError("no NCCL"))} if ctx.rank == rank else {})
    with fakes(lambda: module):
        made = communicator.communicator_of(group, DEVICE)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"rank {rank} could not make an NCCL communicator: no NCCL"):
                made.connect_nccl("op")
        setattr(module, step, Mock(return_value=b"7"))
        made.connect_nccl("op")


@pytest.mark.parametrize("step, unlucky", [("nccl_unique_id", 0), ("group_connect_nccl", 0), ("group_connect_nccl", 1)])
def test_a_rank_without_nccl(workers, step, unlucky):
    workers.run(check_no_nccl, step, unlucky, timeout=30)


def check_missing_ranks(ctx, silent, broken):
    """All ranks but the `silent` ones have given up an operation, of which one was `broken` off."""
    group, head = resolve_group(ctx.group(4)), f"op on rank {ctx.rank} of 4 has not ended after 1 s"
    own = "op was broken off: no room" if ctx.rank == broken else f"{head}{communicator.UNSEEN} while memory is freed"
    with fakes(lambda: fake_module(group_check_alive=fails(RuntimeError(own)))):
        made = communicator.communicator_of(group, DEVICE)
        if ctx.rank in silent:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator, "HEARD_AFTER", 3.0 if silent else 60.0)
            for check in (made.check_alive, communicator.check_alive):
                with pytest.raises(RuntimeError) as failure:
                    check()
    if ctx.rank == broken:
        assert str(failure.value) == own
    elif silent:
        ranks = "rank 2" if silent == [2] else "ranks 0, 2"
        assert str(failure.value) == f"{head}; nothing has been heard of {ranks}"
    else:
        assert str(failure.value).startswith(f"{head}; on rank ") and str(failure.value).count("op ") == 4
        assert (f"; on rank {broken}: op was broken off: no room" in str(failure.value)) == (broken is not None)


@pytest.mark.parametrize("silent, broken", [([2], None), ([0, 2], 1), ([], 3), ([], None)])
def test_what_is_given_up_names_who_is_missing(workers, silent, broken):
    """In one group after another of the same name, whose store remembers them all."""
    workers.run(check_missing_ranks, silent, broken, timeout=30)


def test_a_store_that_does_not_answer(monkeypatch):
    """Its owner may have been stopped: what is known of a failure is not held back."""
    going_on = threading.Event()
    monkeypatch.setattr(agreement, "_announce", lambda *arguments: going_on.wait(60))
    start = time.monotonic()
    assert agreement.announce(None, "word", "value", 0.0) is None and time.monotonic() - start < 0.5
    assert agreement.announce(None, "word", "value", 0.1) is None and time.monotonic() - start < 10
    going_on.set()


def test_why_a_call_of_the_extension_fails():
    made = SimpleNamespace(handle=7, module=SimpleNamespace(op=fails(RuntimeError("no room"))), check_alive=Mock())
    with pytest.raises(RuntimeError, match="^no room"):
        calls._call(made, "op", 1, 2)
    made.module.op.assert_called_once_with(7, 1, 2)
    made.check_alive.side_effect = RuntimeError("op was broken off: no room")
    with pytest.raises(RuntimeError, match="^op was broken off: no room"):
        calls._call(made, "op", 1, 2)


def check_device_of_exchanges(ctx):
    current, met = [], []

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    exchanged = communicator.by_rank

    def by_rank(*args):
        met.append(list(current))
        return exchanged(*args)

    with fakes(fake_module), pytest.MonkeyPatch.context() as patch:
        made = communicator.communicator_of(resolve_group(ctx.group(2)), DEVICE)
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(communicator, "by_rank", by_rank)
        made.connect_nccl("op")
        made.reserve(communicator.FIRST_SLOT + 1, "op")
    assert met and all(each == [DEVICE] for each in met)


def test_exchanges_are_on_the_group_s_device(workers):
    """By NCCL, they are of the current device, which may be another than the operands'."""
    workers.run(check_device_of_exchanges, timeout=30)


def check_calls_that_differ(ctx):
    first = ctx.rank // 2 * 2
    with pytest.raises(ValueError, match=f"rank {first}: op, {first} rows.*; rank {first + 1}: op, {first + 1} rows"):
        communicator.check_agreement(resolve_group(ctx.group(2)), "op", (ctx.rank, 3, 4), torch.float32, "p2p")


def test_calls_that_differ_are_told_by_global_ranks(workers):
    workers.run(check_calls_that_differ)


def check_calls_of_unknown_sizes(ctx):
    shape = 8, None if ctx.rank else 3, None
    with pytest.raises(ValueError, match=r"rank 0: op, 8 rows, 3 -> \? features.*; rank 1: op, 8 rows, \? -> \? feat"):
        communicator.check_agreement(resolve_group(), "op", shape, torch.float32, "p2p")


def test_a_size_that_a_rank_does_not_know_is_a_question_mark(workers):
    workers.run(check_calls_of_unknown_sizes)


@pytest.mark.parametrize(
    "seconds, error",
    [("x", TypeError), (None, TypeError), (True, TypeError), ([1], TypeError)]
    + [(seconds, ValueError) for seconds in (-1, 0, float("nan"), float("inf"))],
)
def test_a_time_out_that_is_none_is_refused(monkeypatch, seconds, error):
    monkeypatch.setattr(communicator, "_timeout", 600.0)
    with pytest.raises(error, match=f"time-out.*{re.escape(repr(seconds))}"):
        communicator.set_timeout(seconds)
    assert communicator._timeout == 600.0
    communicator.set_timeout(30)
    assert communicator._timeout == 30.0


def check_a_group_that_is_gone(ctx, folder):
    """Its memory is freed when all ranks of the next group have let go of it."""
    events = []

    module = fake_module(
        group_disconnect=Mock(side_effect=lambda handle, graphs_too: events.append(f"left, graphs too: {graphs_too}")),
        group_create=Mock(side_effect=lambda *place: events.append("met") or 7),
        group_destroy=Mock(side_effect=lambda handle: events.append("freed")),
    )
    with fakes(lambda: module):
        gone = communicator.communicator_of(resolve_group(ctx.group(2)), DEVICE)
        gone.workspaces[0] = torch.empty(10, dtype=torch.uint8)
        assert gone.workspace_bytes == 10
        ctx.rejoin(folder)
        events.clear()
        assert communicator.communicator_of(resolve_group(ctx.group(2)), DEVICE) is not None
    assert events[:2] == ["left, graphs too: True", "met"] and events[-1] == "freed" and events.count("freed") == 1
    assert gone.workspace_bytes == gone.handle == 0


def test_a_group_that_is_gone(workers, tmp_path):
    workers.run(check_a_group_that_is_gone, str(tmp_path))


def check_a_large_group_that_is_gone(ctx, folder):
    """Ranks of the next group know nothing of the others, which may have its memory open still."""
    module = fake_module(group_peer_bytes=Mock(return_value=100))
    with fakes(lambda: module):
        assert communicator.communicator_of(resolve_group(ctx.group(4)), DEVICE) is not None
        ctx.rejoin(folder)
        for made, size in ((2, 2), (2, 4)):  # how many there are then
            assert communicator.communicator_of(resolve_group(ctx.group(size)), DEVICE) is not None
            assert len(communicator.all_made()) == made and communicator.peer_bytes() == 100 * made
            assert module.group_destroy.call_count == (size == 4)


def test_a_large_group_that_is_gone(workers, tmp_path):
    workers.run(check_a_large_group_that_is_gone, str(tmp_path))


def check_a_large_group(ctx):
    module = fake_module()
    with fakes(lambda: module) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "MOST_RANKS", 1)
        assert communicator.communicator_of(resolve_group(ctx.group(2)), DEVICE) is None
    assert "a group of 2 ranks: the extension takes up to 1" in str(caught[0].message)


def test_a_group_of_more_ranks_than_the_extension_takes(workers):
    workers.run(check_a_large_group)
