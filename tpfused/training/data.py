"""The two tasks' data. The global batch of a step depends on the seed and the step alone, so resuming is exact."""

import random
from pathlib import Path

import torch
from torch import Tensor

from tpfused.cli.errors import UserError
from tpfused.training.presets import PRESETS, RunConfig

MEMORY_SEQUENCES = 100
MEMORY_SEED = 42
HELD_OUT_SHARE = 0.05
MAX_HELD_OUT_WINDOWS = 64


def make_data(run: RunConfig):
    """The data of the run's task: `batch(step)` gives the global batch, (ids, labels), both [batch, seq] int64."""
    return MemoryData(run) if run.task == "memory" else TextData(run)


class MemoryData:
    """A fixed set of random sequences to learn by heart: the labels are the inputs themselves."""

    def __init__(self, run: RunConfig):
        vocab = PRESETS[run.preset].model["vocab_size"]
        generator = torch.Generator().manual_seed(MEMORY_SEED)
        self.sequences = torch.randint(vocab, (MEMORY_SEQUENCES, run.seq_len), generator=generator)
        self.seed, self.batch_size = run.seed, run.batch_size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        ids = self.sequences[_choices(self.seed, step, len(self.sequences), self.batch_size)]
        return ids, ids


class TextData:
    """Windows of a text's bytes, each labelled with the byte that follows; the text's tail is held out."""

    def __init__(self, run: RunConfig):
        data = read_text(run.text)
        window = run.seq_len + 1
        name = run.text or "the text"
        if len(data) < 2 * window:
            raise UserError(
                f"{name} holds {len(data)} bytes: sequences of {run.seq_len} need at least {2 * window}, "
                f"one to train on and one held out"
            )
        tail = min(max(window, int(len(data) * HELD_OUT_SHARE)), len(data) - window)
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.train, self.tail = tokens[:-tail], tokens[-tail:]
        self.seed, self.batch_size, self.window = run.seed, run.batch_size, window

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        starts = _choices(self.seed, step, len(self.train) - self.window + 1, self.batch_size)
        windows = torch.stack([self.train[start : start + self.window] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """(ids, labels) of consecutive windows of the tail, [windows, seq]."""
        count = min(MAX_HELD_OUT_WINDOWS, (len(self.tail) - 1) // (self.window - 1))
        end = count * (self.window - 1)
        ids, labels = self.tail[:end].long(), self.tail[1 : end + 1].long()
        return ids.view(count, -1), labels.view(count, -1)

    def prompt(self, length: int) -> Tensor:
        """`length` tokens of the held-out tail, from where a paragraph begins if one does."""
        _, gap, rest = bytes(self.tail[:-length].tolist()).partition(b"\n\n")
        start = len(self.tail) - length - len(rest) if gap else 0
        return self.tail[start : start + length].long()


def read_text(path: str | None) -> bytes:
    """The bytes of a file, or of the documentation that comes with Python."""
    if path is None:
        return _python_topics()
    try:
        if not Path(path).is_file():
            problem = "is not a regular file" if Path(path).exists() else "does not exist"
            raise UserError(f"--text {path} {problem}")
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"--text {path} cannot be read: {error.strerror}") from error
    if not data:
        raise UserError(f"--text {path} is empty")
    return data


def _python_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("this Python comes without its documentation (pydoc_data): give a --text FILE") from error
    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def _choices(seed: int, step: int, upper: int, count: int) -> list[int]:
    """`count` numbers below `upper`, drawn with replacement. A string seeds all of the generator's state."""
    return random.Random(f"{seed} {step}").choices(range(upper), k=count)
