"""Worker processes for tests that need several ranks.

A test hands a module-level function, its check, to `Workers.run`, which calls `check(context, *args, **kwargs)`
in every worker and returns the results in rank order. Checks travel by reference and results by pickle, so
tensors in them are copied (return CPU tensors). Nothing here can hang: an error, a death or a silence in any
worker ends the call with a `WorkerFailure` that says which rank and why, and the next call starts fresh
processes, since the survivors of a failure may stand in different collectives.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpfused.workers import take_gpu

START_TIMEOUT = 120.0  # seconds for a worker to import and join the process group
ANSWER_TIMEOUT = 120.0  # seconds for all workers to answer one call
GRACE = 5.0  # seconds the others get once one worker has failed: they may wait for it in a collective


class WorkerFailure(AssertionError):
    """A check raised in some worker, or a worker died or did not answer in time."""


class Context:
    """What a check knows about the worker it runs in."""

    def __init__(self, rank: int, world: int, device: torch.device):
        self.rank, self.world, self.device = rank, world, device
        self._meshes: dict[int, tuple[DeviceMesh, DeviceMesh]] = {}

    def grid(self, size: int) -> DeviceMesh:
        """The `(world // size, size)` mesh named ("dp", "tp"), made when all workers first ask for it."""
        if size not in self._meshes:
            shape = (self.world // size, size)
            grid = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
            self._meshes[size] = grid, grid["tp"]
        return self._meshes[size][0]

    def mesh(self, size: int) -> DeviceMesh:
        """This rank's block of `size` consecutive ranks, as a one-dimensional mesh named "tp"."""
        self.grid(size)
        return self._meshes[size][1]

    def group(self, size: int) -> dist.ProcessGroup:
        """The process group of the same block."""
        return self.mesh(size).get_group()

    def rejoin(self, folder: str):
        """Leaves the process group and makes a new one of the same ranks, who all give the same new `folder`."""
        dist.destroy_process_group()
        self._meshes.clear()
        _join(self, folder)


class Workers:
    """`world` processes in one process group: gloo on "cpu", NCCL on "cuda", with a GPU each where there are so many.

    They start with the first call of `run` and stay until `close`.
    """

    def __init__(self, device: str, world: int, timeout: float = ANSWER_TIMEOUT):
        self.device, self.world, self.timeout = device, world, timeout
        gpus = torch.cuda.device_count() if device == "cuda" else world
        self.turns = max(1, -(-world // max(1, gpus)))  # that the ranks of one GPU take
        self._processes, self._connections, self._folder = [], [], None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def run(self, check, *args, timeout: float | None = None, **kwargs) -> list:
        """`check(context, *args, **kwargs)` in every worker; their results in rank order.

        `timeout`: seconds to wait for this call's answers, instead of the pool's; so many times longer as ranks
        take turns on a GPU.
        """
        if not self._processes:
            self._start()
        request = pickle.dumps((check, args, kwargs))
        for connection in self._connections:
            with suppress(BrokenPipeError):  # died while idle: found out, and told, by _collect
                connection.send_bytes(request)
        return self._collect(check.__qualname__, (timeout or self.timeout) * self.turns)

    def times(self, on_gpu: int, on_cpu: int | None = None) -> int:
        """How often to do what is to be done often: a tenth on a GPU whose ranks take turns, which are milliseconds."""
        if self.device == "cpu":
            return on_gpu if on_cpu is None else on_cpu
        return on_gpu // (1 if self.turns == 1 else 10)

    def close(self):
        """Ends all workers, by force those that do not leave at once."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(b"")
        for process in self._processes:
            process.join(GRACE)
        self._kill()

    def _start(self):
        # Forks of a server that has imported torch start in a fraction of a second. With CUDA every process is
        # a fresh one instead: an import that asks for the number of GPUs would spoil CUDA in all forks.
        method = multiprocessing.get_context("forkserver" if self.device == "cpu" else "spawn")
        if self.device == "cpu":
            method.set_forkserver_preload(["torch", "torch.distributed.tensor", "pytest"])
        self._folder = tempfile.TemporaryDirectory(prefix="tpfused-workers-")
        for rank in range(self.world):
            ours, theirs = method.Pipe()
            process = method.Process(
                target=_serve,
                args=(theirs, rank, self.world, self.device, self._folder.name),
                name=f"worker-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a worker's death is read here as the end of its pipe
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("start", START_TIMEOUT * self.turns)

    def _collect(self, what: str, timeout: float) -> list:
        results, problems = [None] * self.world, {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    results[rank], problem = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE)
                    problem = f"died with exit code {self._processes[rank].exitcode}\n{self._log(rank)}"
                if problem is not None:
                    problems[rank] = problem
                    deadline = min(deadline, time.monotonic() + GRACE)
        patience = f"{GRACE:.0f} s after another's failure" if problems else f"{timeout:.0f} s"
        for rank in pending.values():
            problems[rank] = f"had not answered after {patience}\n{self._stack(rank)}"
        if problems:
            self._kill()
            raise WorkerFailure(f"{what} on {self.device}\n{_report(problems, self.world)}")
        return results

    def _kill(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._connections, self._folder = [], [], None

    def _stack(self, rank: int) -> str:
        """Where a silent worker stands: it writes its Python stacks into its log when asked to, sooner or later."""
        logged, deadline = self._log(rank), time.monotonic() + GRACE
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        while self._log(rank) == logged and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)  # for the rest of it
        return self._log(rank)

    def _log(self, rank: int) -> str:
        log = Path(self._folder.name, f"rank{rank}.log")
        return log.read_text(errors="replace")[-4000:] if log.exists() else "(nothing logged)"


def connected(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group, when all its ranks have connected: `new_group` does not wait for that, and gloo fails on those that
    still connect when another rank destroys the group."""
    dist.barrier(group)
    return group


def _report(problems: dict[int, str], world: int) -> str:
    """Each problem once, after the ranks that have it."""
    ranks = {text: [rank for rank in sorted(problems) if problems[rank] == text] for text in problems.values()}
    return "\n".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} of {world} {text}" for text, who in ranks.items()
    )


def _serve(connection, rank: int, world: int, device_type: str, folder: str):
    """Life of one worker: join the group, then answer requests until an empty one or the end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
    with open(os.path.join(folder, f"rank{rank}.log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log)
        device = take_gpu(rank, world) if device_type == "cuda" else torch.device(device_type)
        context = Context(rank, world, device)
        _answer(connection, _join, context, folder)
        with suppress(EOFError):
            while request := connection.recv_bytes():
                _answer(connection, _call, context, request)
        dist.destroy_process_group()


def _join(context: Context, folder: str):
    torch.set_num_threads(1)
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(context.device)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=context.rank,
        world_size=context.world,
        timeout=timedelta(seconds=ANSWER_TIMEOUT / 2),
        device_id=context.device if on_gpu else None,
    )


def _call(context: Context, request: bytes):
    check, args, kwargs = pickle.loads(request)
    return check(context, *args, **kwargs)


def _answer(connection, function, *args):
    """Sends `(result, None)`, or `(None, traceback)` when the function raises."""
    try:
        answer = pickle.dumps((function(*args), None))
    except BaseException:  # pytest's own outcomes are not Exceptions
        answer = pickle.dumps((None, f"raised\n{traceback.format_exc()}"))
    connection.send_bytes(answer)
