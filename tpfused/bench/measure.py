"""GPU time, honestly: CUDA graphs replayed in turn, between events, with the floor in the same rounds."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from tpfused.bench.results import error_line

REPLAY_US = 200  # a replay shorter than this would time its launch
MOST_CALLS = 500  # in one graph
WARM_UP = 2  # rounds that are not counted
COPIED, COPY_PAIRS = 256 * 2**20, 4  # bytes
EAGER_US = 2000  # a loop of eager calls ends with a synchronisation, which this makes small

Call = Callable[[], object]


class Uncapturable(RuntimeError):
    """A CUDA graph cannot hold what was to be captured."""


@dataclass(frozen=True)
class Timed:
    """What a round runs once: `calls` calls, as a CUDA graph or, where that cannot be captured, one by one."""

    run: Call
    calls: int
    graph: bool


def median_and_iqr(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return middle, upper - lower


class GpuTimer:
    """Times calls on the current GPU, on a stream of its own.

    Everything happens on that one stream, forwards included: autograd runs a backward on the stream of its forward,
    and a capture sees one stream only. `capture_error_mode` is that of `torch.cuda.graph`.
    """

    def __init__(self, capture_error_mode: str = "global"):
        self.stream = torch.cuda.Stream()
        self._mode = capture_error_mode
        self._captures = True

    @contextmanager
    def session(self) -> Iterator[None]:
        """One case: all its tensors are made, used and given back inside."""
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()  # the next case is compiled for its own shapes
            gc.collect()
            self.recover()

    def recover(self) -> None:
        """After whatever happened: raises if the GPU cannot go on."""
        torch.cuda.synchronize()
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            # A capture that a CUDA call has broken off stays open in torch's allocator (pytorch #180395): there can be
            # no other in this process.
            self._captures = False

    def extra_bytes(self, call: Call) -> int:
        """The most memory that one eager call holds at a time beyond what was there before, its outputs included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, call: Call, calls: int) -> Call:
        """Replays a graph of the calls.

        Raises:
            Uncapturable: they cannot be captured.
        """
        if not self._captures:
            raise Uncapturable("an earlier capture was broken off: this process can have no other")
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode=self._mode),
                _synchronising_raises(),
                _no_collection(),
            ):
                for _ in range(calls):
                    call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each library has its own way to say it
            del graph
            self.recover()
            _mend_generator()
            raise Uncapturable(f"no CUDA graph can hold it: {error_line(error)}") from error
        return graph.replay

    def prepare(self, call: Call) -> Timed:
        """`call`, which has run before, as a graph of so many calls that its launch does not matter."""
        try:
            graph = self.capture(call, 1)
        except Uncapturable:
            graph = None
        if graph is None:  # not above, where the error still holds what the capture took
            calls = _enough(call, 1)
            return Timed(_repeated(call, calls), calls, False)
        calls = 1
        for _ in range(2):  # a short graph's time is mostly its launch, and asks for too few calls
            wanted = _enough(graph, calls)
            if wanted <= calls:
                break
            graph = None  # its memory goes back before more is taken
            graph, calls = self.capture(call, wanted), wanted
        return Timed(graph, calls, True)

    def interleave(self, timed: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
        """Microseconds a call of each, round by round; each round runs all of them, `in_turn`.

        Nothing waits for the host before the end, so that each replay starts when the one before it ends: an idle GPU
        would let its clock fall, and would count the launch.
        """
        events: dict[str, list] = {name: [] for name in timed}
        for number, name in in_turn(timed, rounds, WARM_UP):
            pair = _between_events(timed[name].run)
            if number >= 0:
                events[name].append(pair)
        return {name: [us / timed[name].calls for us in _elapsed(pairs)] for name, pairs in events.items()}

    def waits(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """Microseconds a call that the host sees in a loop that ends with a synchronisation, round by round."""

        def loop(call: Call, times: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                call()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) * 1e6 / times

        once = {name: min(loop(call, 1) for _ in range(3)) for name, call in calls.items()}
        waited: dict[str, list[float]] = {name: [] for name in calls}
        for _, name in in_turn(calls, rounds):
            waited[name].append(loop(calls[name], max(1, math.ceil(EAGER_US / once[name]))))
        return waited

    def copy_gbps(self, rounds: int = 11) -> float:
        """GB/s, read and written together, of the copy that is the floor of what moves memory."""
        source, target = copy_buffers(torch.device("cuda"))
        with self.session():
            return 2 * source.numel() / statistics.median(_copy_times(source, target, rounds)) / 1e3


@lru_cache
def copy_buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a copy is timed with: larger than any cache, and the fastest of a few pairs.

    Where the driver puts them matters: some pairs copied at 2.7 TB/s on an H200, and others at 4.2.
    """
    if device.type != "cuda":
        return torch.empty(1, dtype=torch.uint8, device=device), torch.empty(1, dtype=torch.uint8, device=device)
    pairs = [
        [torch.empty(COPIED, dtype=torch.uint8, device=device).random_() for _ in range(2)] for _ in range(COPY_PAIRS)
    ]
    source, target = min(pairs, key=lambda pair: statistics.median(_copy_times(*pair, rounds=5)))
    return source, target


def _copy_times(source: torch.Tensor, target: torch.Tensor, rounds: int) -> list[float]:
    copy = partial(target.copy_, source)
    _repeated(copy, WARM_UP)()
    return _elapsed([_between_events(copy) for _ in range(rounds)])


@contextmanager
def _synchronising_raises() -> Iterator[None]:
    """Inside a capture, most calls that cannot be captured raise in Python before CUDA breaks the capture off.

    What is broken off cannot be tidied up (see `GpuTimer.recover`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, the garbage collector frees no earlier graph, which would break a capture off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _mend_generator() -> None:
    """A capture that was broken off may keep torch's generator, which then draws nothing outside: put in another."""
    try:
        torch.rand(1, device="cuda")
    except RuntimeError:
        fresh = torch.Generator("cuda")
        fresh.seed()
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh.graphsafe_get_state())


def in_turn(names, rounds: int, warm_up: int = 0) -> Iterator[tuple[int, str]]:
    """(round, name) for each name in each round, whose order is another each time.

    What ran just before leaves a GPU's caches and its clock as they are: in as many rounds as there are names, or twice
    as many of an odd number, each comes right after each other one equally often (E. J. Williams, "Experimental designs
    balanced for the estimation of residual effects of treatments", 1949).
    """
    names = list(names)
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(len(names))]  # 0, 1, -1, 2, -2 ...
    for number in range(-warm_up, rounds):
        backwards = len(names) % 2 and number % 2
        for place in reversed(zigzag) if backwards else zigzag:
            yield number, names[(place + number) % len(names)]


def _repeated(call: Call, times: int) -> Call:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def _enough(run: Call, calls: int) -> int:
    """How many calls take `REPLAY_US`, when `run` makes `calls` of them."""
    run()
    times = _elapsed([_between_events(run) for _ in range(5)])
    return max(calls, min(MOST_CALLS, math.ceil(calls * REPLAY_US / statistics.median(times))))


def _between_events(run: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    return start, end


def _elapsed(pairs) -> list[float]:
    """Microseconds."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]
