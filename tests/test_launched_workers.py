"""Worker processes: what they report arrives, and when one ends badly all end at once, with the reason."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.signals import as_in_a_terminal
from tpfused.cli.errors import UserError
from tpfused.workers import WorkerFailed, run_workers, torchrun_worker

FOREVER = 600.0
REAL_TIME = 40  # a signal without a name
SECONDS = 10.0  # the most that ending may take, on a busy machine


def report(argument, worker):
    for number in range(3):
        worker.emit("number", (worker.rank, argument + number))


def report_blocked_signals(argument, worker):
    worker.emit("blocked", signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def report_environment(argument, worker):
    worker.emit("environment", {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")})


def fail_on_one(argument, worker):
    """Rank 1 ends as told. The others wait, or for "kill late" fail just before it does, as in a broken collective."""
    ending, folder = argument
    worker.emit("ready", os.getpid())
    doomed = folder / "doomed"
    if worker.rank != 1:
        while not (ending == "kill late" and doomed.exists()):
            time.sleep(0.01)
        raise ConnectionError("lost a peer")
    if ending == "raise":
        raise ZeroDivisionError("one\ntwo")
    if ending == "user error":
        raise UserError("look here")
    if ending == "exit":
        os._exit(7)
    doomed.touch()
    time.sleep(0.1)
    os.kill(os.getpid(), REAL_TIME if ending == "real-time signal" else signal.SIGKILL)


def wait_forever(argument, worker):
    worker.emit("ready", os.getpid())
    time.sleep(FOREVER)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pids) -> bool:
    deadline = time.monotonic() + SECONDS
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_events_arrive_in_the_order_each_worker_sent_them():
    events = []
    run_workers(report, 10, 2, lambda name, payload: events.append((name, *payload)))
    for rank in range(2):
        assert [event for event in events if event[1] == rank] == [("number", rank, 10 + n) for n in range(3)]


def test_workers_leave_ctrl_c_to_their_parent():
    events = []
    run_workers(report_blocked_signals, None, 2, lambda name, payload: events.append(payload))
    assert [signal.SIGINT in blocked for blocked in events] == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_inherits_no_place_in_another_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    events = []
    run_workers(report_environment, None, 1, lambda name, payload: events.append(payload))
    assert set(events[0].values()) == {None}


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"RANK": "4"}, "RANK 4 of WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK -1 of"),
        ({"WORLD_SIZE": "four"}, "'four'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2 of LOCAL_WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE 8"),
        ({"MASTER_PORT": "http"}, "'http'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT 65536"),
    ],
)
def test_an_environment_that_makes_no_group_is_refused(wrong, told, monkeypatch):
    """It would be waited for, in vain."""
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in (place | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    worker = torchrun_worker(print)
    assert (worker.rank, worker.world, worker.local_rank, worker.local_world) == (3, 4, 1, 2)
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        torchrun_worker(print)


def test_more_processes_than_a_host_can_run_are_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with pytest.raises(UserError, match="33 worker processes are too many for this host's 8 CPU cores: 32 at most"):
        run_workers(report, 10, 33, print)


@pytest.mark.parametrize(
    "ending, message, code",
    [
        ("raise", "worker 1: ZeroDivisionError: one", 1),
        ("user error", "look here", 2),
        ("exit", "worker 1 ended with exit code 7", 1),
        ("kill", "was killed by SIGKILL", 1),
        ("kill late", "worker 1 (process", 1),
        ("real-time signal", f"was killed by signal {REAL_TIME}", 1),
    ],
)
def test_one_failure_ends_all_with_its_reason(ending, message, code, tmp_path):
    pids = []
    with pytest.raises(WorkerFailed) as failure:
        run_workers(fail_on_one, (ending, tmp_path), 3, lambda name, payload: pids.append(payload))
    assert message in str(failure.value) and "\n" not in str(failure.value)
    assert failure.value.code == code
    assert ("ZeroDivisionError" in failure.value.details) == (ending == "raise")
    assert not any(map(alive, pids))


def test_an_error_in_the_parent_leaves_no_worker_behind():
    pids = []

    def stop(name, payload):
        pids.append(payload)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_workers(wait_forever, None, 2, stop)
    assert time.monotonic() - start < 3 * SECONDS
    assert not any(map(alive, pids))


@pytest.mark.parametrize("is_ignored", [False, True])
def test_signals_are_handled_while_workers_run_alone(is_ignored):
    """And not where the program has its own way with them, as under nohup."""
    before = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    seen, initial = [], signal.signal(signal.SIGHUP, before)
    try:
        run_workers(report, 0, 1, lambda name, payload: seen.append(signal.getsignal(signal.SIGHUP)))
        assert signal.getsignal(signal.SIGHUP) is before
        assert seen and all((handler is before) is is_ignored for handler in seen)
    finally:
        signal.signal(signal.SIGHUP, initial)


@pytest.mark.parametrize(
    "how, is_stopped",  # a stopped worker outlives SIGKILL: nobody is left to end it
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGHUP, True)],
)
def test_workers_end_with_their_parent(how, is_stopped):
    program = (
        "from tests.test_launched_workers import wait_forever\n"
        "from tpfused.workers import run_workers\n"
        "if __name__ == '__main__':\n"
        "    run_workers(wait_forever, None, 2, lambda name, payload: print(payload, flush=True))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
    )
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    if is_stopped:
        os.kill(pids[1], signal.SIGSTOP)
    parent.send_signal(how)
    assert parent.wait() == -how
    parent.stdout.close()
    assert ended(pids)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_interrupts_no_wait(how):
    """Another thread of the parent gets it, as that may that comes just before the parent waits."""
    program = (
        "import signal, threading, time\n"
        "from tests.test_launched_workers import wait_forever\n"
        "from tpfused.workers import run_workers\n"
        "def get_signal():\n"
        "    time.sleep(1)\n"
        f"    signal.pthread_kill(threading.get_ident(), {int(how)})\n"
        "    time.sleep(600)\n"
        "def tell(name, pid):\n"
        "    print(pid, flush=True)\n"
        "    threading.Thread(target=get_signal, daemon=True).start()\n"
        "if __name__ == '__main__':\n"
        "    run_workers(wait_forever, None, 1, tell)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
    try:
        out, _ = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode == -how and ended(map(int, out.split()))
