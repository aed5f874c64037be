"""A timer that measures nothing."""

from contextlib import nullcontext

from tpfused.bench.measure import Timed

US = {"the floor": 10.0, "ours": 11.0, "eager": 40.0, "compile": 15.0}
OTHERS = 20.0


class FakeTimer:
    """Each variant takes what `US` says, and in round r of that r per cent more, as if the clock fell.

    A call among `uncapturable` is one that no graph can hold.
    """

    def __init__(self):
        self.uncapturable = []

    def session(self):
        return nullcontext()

    def recover(self) -> None:
        pass

    def extra_bytes(self, call) -> int:
        call()
        return 2**20

    def prepare(self, call) -> Timed:
        call()
        return Timed(call, 3, call not in self.uncapturable)

    def interleave(self, timed, rounds: int):
        return {name: [US.get(name, OTHERS) * (1 + r / 100) for r in range(rounds)] for name in timed}

    def waits(self, calls, rounds: int):
        return {name: [100.0] * rounds for name in calls}

    def copy_gbps(self) -> float:
        return 3000.0
