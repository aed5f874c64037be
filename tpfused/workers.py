"""Worker processes: start them, listen to them, and end all of them when one fails or the user stops the run.

The parent owns a loopback TCP store (its port is free by construction) and one pipe a worker. A worker reports
through `Worker.emit`; what it raises travels the same way, so the terminal shows one line instead of a traceback
from every process.
"""

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any

from tpfused.cli.errors import UserError

if TYPE_CHECKING:
    import torch

# Workers that die together within this time are looked at together, so that the first cause is the one reported.
SETTLE_S = 0.5
# Of these a process dies without unwinding; Ctrl-C is an exception.
ENDING = (signal.SIGTERM, signal.SIGHUP)
# A terminated worker that has not ended by then is killed.
GRACE_S = 3.0
# A collective that a lost peer leaves waiting ends with an error after this time, on every node.
COLLECTIVE_TIMEOUT_S = 120.0
# Each imports torch: so many a core, or in all.
PROCESSES_A_CORE, LEAST_ROOM = 4, 16
# What torchrun sets for its workers; a process started here has a place of its own.
TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Worker:
    """A process's place in the run, and its way to report.

    `port`: the parent's store on this host; None when torchrun's environment describes the group.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    port: int | None
    emit: Callable[[str, Any], None]


class WorkerFailed(Exception):
    """A worker ended early. `code` is the exit code the command should end with, `details` a traceback or ''."""

    def __init__(self, message: str, code: int = 1, details: str = ""):
        super().__init__(message)
        self.code = code
        self.details = details


def torchrun_worker(emit: Callable[[str, Any], None]) -> Worker | None:
    """This process's place in a group that torchrun (or any launcher that sets its variables) made, or None."""
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        port = int(os.environ["MASTER_PORT"])
    except ValueError as error:
        raise UserError(f"{', '.join(TORCHRUN_NAMES)} in the environment: {error}") from error
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world and 0 < port < 2**16):
        raise UserError(
            f"the environment makes no group: RANK {rank} of WORLD_SIZE {world}, LOCAL_RANK {local_rank} of "
            f"LOCAL_WORLD_SIZE {local_world}, MASTER_PORT {port}"
        )
    return Worker(rank=rank, world=world, local_rank=local_rank, local_world=local_world, port=None, emit=emit)


def run_workers(function: Callable, argument: Any, world: int, on_event: Callable[[str, Any], None]) -> None:
    """Run `function(argument, worker)` in `world` new processes on this host and wait for all of them.

    `function` must be importable by name. Each `worker.emit(name, payload)` becomes `on_event(name, payload)` here.
    Raises `WorkerFailed` as soon as one worker fails; whatever ends this call, no worker outlives it. More processes
    than a host can be meant to run are a `UserError`: ranks of a plan, say, that were asked for where there is no GPU.
    """
    from torch.distributed import TCPStore

    most = max(LEAST_ROOM, PROCESSES_A_CORE * (os.cpu_count() or 1))
    if world > most:
        raise UserError(
            f"{world} worker processes are too many for this host's {os.cpu_count()} CPU cores: {most} at most"
        )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], {}
    with _ending(processes):
        # Ctrl-C reaches the whole foreground group. The workers inherit this mask: only the parent acts on it.
        # (Starting the tracker, which the first worker would do, lifts the mask.)
        resource_tracker.ensure_running()
        with _interrupts_blocked():
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                name = f"{function.__module__}:{function.__qualname__}"
                process = context.Process(
                    target=_worker_main,
                    args=(name, argument, rank, world, store and store.port, sender),
                    name=f"tpfused-{rank}",
                )
                process.start()
                processes.append(process)
                sender.close()
                pipes[receiver] = rank
        with _signals() as signals:
            _listen(processes, pipes, signals, on_event)


def take_gpu(local_rank: int, local_world: int) -> "torch.device":
    """The GPU of this process, one of so many ranks on the host. Of fewer GPUs each serves several ranks, slowly, to
    see whether they are right: NCCL, which takes no two ranks of one host on one GPU, is told then, by the environment,
    that ranks which share none are a host of their own.
    """
    import torch  # not above: a worker may need no torch

    gpus = torch.cuda.device_count()
    if local_world > gpus:
        os.environ["NCCL_HOSTID"] = f"host{local_rank // gpus}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return torch.device("cuda", local_rank % gpus)


def join_group(worker: Worker, device: "torch.device", timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Make the default process group of all workers: NCCL for a GPU, gloo for a CPU."""
    import torch.distributed as dist  # not above: a worker may need no torch

    timeout, place = timedelta(seconds=timeout_s), {}
    if worker.port is not None:
        # Given outright, the store and the rank leave nothing to environment variables.
        store = dist.TCPStore("127.0.0.1", worker.port, is_master=False, timeout=timeout)
        place = dict(store=store, rank=worker.rank, world_size=worker.world)
    elif worker.world == 1:
        place = dict(store=dist.HashStore(), rank=0, world_size=1)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None, **place
    )


def _listen(processes, pipes, signals, on_event) -> None:
    """Pass the workers' events on until all have ended well; raise the first cause once one has not. `signals`: what
    `_signals` gives."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    failures = {}  # rank -> (order, WorkerFailed)
    deadline = None
    while waiting or pipes:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait([*waiting, *pipes, signals], timeout)
        for item in ready:
            if item is signals:
                signals.recv(4096)
            elif item in waiting:
                rank = waiting.pop(item)
                failure = _exit_failure(rank, processes[rank])
                if failure is not None:
                    failures.setdefault(rank, failure)
            else:
                try:
                    name, payload = item.recv()
                except (EOFError, OSError):  # ended, or killed in the middle of a message
                    pipes.pop(item)
                    continue
                if name == "failed":
                    failures[pipes[item]] = payload
                else:
                    on_event(name, payload)
        if failures and deadline is None:
            deadline = time.monotonic() + SETTLE_S
        if failures and (time.monotonic() >= deadline or not ready):
            break
    if failures:
        # A lost worker makes its peers' collectives fail as well: the kill, else the earliest exception, is the cause.
        _, message, code, details = min(failures.values())
        raise WorkerFailed(message, code, details)


def _exit_failure(rank, process):
    """What a worker's exit status alone says, or None when it ended well."""
    process.join()
    status = process.exitcode
    if status == 0:
        return None
    if status > 0:
        return (time.monotonic(), f"worker {rank} ended with exit code {status}", 1, "")
    name = _signal_name(-status)
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    # An abort is how a native library reacts to a lost peer; any other signal came from outside and comes first.
    order = time.monotonic() if name == "SIGABRT" else 0.0
    return (order, f"worker {rank} (process {process.pid}) was killed by {name}{hint}", 1, "")


def _stop(processes) -> None:
    """End every process that still runs: politely, then not."""
    with _interrupts_blocked():
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@contextmanager
def _ending(processes):
    """Whatever ends this, no process outlives it. Of `ENDING` this one dies as it would, but last: a worker that is
    stopped (SIGSTOP) would not see its parent end."""

    def end(number, frame):
        _stop(processes)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # A program's own handlers, and what nohup has set, stay; and only the main thread may set any.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in ENDING if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        _stop(processes)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _signals():
    """A socket that can be read once a signal has come. Its handler runs between two steps of Python in the main
    thread, and a wait ends only by a signal that this thread gets in it: not just before, and not another thread."""
    receiver, sender = socket.socketpair()
    is_main = threading.current_thread() is threading.main_thread()
    with receiver, sender:
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False) if is_main else -1
        try:
            yield receiver
        finally:
            if is_main:
                signal.set_wakeup_fd(before)


@contextmanager
def _interrupts_blocked():
    """Hold SIGINT back; one that arrives meanwhile is delivered at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_main(name, argument, rank, world, port, sender) -> None:
    """The first function of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for variable in TORCHRUN_NAMES:
        os.environ.pop(variable, None)

    def emit(event, payload=None):
        sender.send((event, payload))

    worker = Worker(rank, world, local_rank=rank, local_world=world, port=port, emit=emit)
    module, function = name.split(":")
    try:
        getattr(importlib.import_module(module), function)(argument, worker)
    except Exception as error:
        emit("failed", (time.monotonic(), *describe(error, worker)))
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End this process without its destructors: those of a broken process group can wait for its lost peers, and those
    of a sound one abort now and then ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe(error: Exception, worker: Worker) -> tuple[str, int, str]:
    """(one line, exit code, traceback) for what a worker raised."""
    if isinstance(error, UserError):
        return str(error), 2, ""
    reason = next((line for line in str(error).splitlines() if line.strip()), "no message")
    where = f"worker {worker.rank}: " if worker.world > 1 else ""
    return f"{where}{type(error).__name__}: {reason.strip()}", 1, traceback.format_exc()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
