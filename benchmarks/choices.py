"""Measure which back end of `linear_act` is the fastest on this GPU, and note it in tpfused/kernels/choices.json.

    python benchmarks/choices.py

replaces the entries of this card, about a minute and a half on an H100. `linear_act` reads the table (see
tpfused/kernels/choices.py); a card without entries uses those of another of its kind, or the safe way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from tpfused.bench.measure import GpuTimer  # noqa: E402
from tpfused.kernels import choices  # noqa: E402
from tpfused.kernels.activations import ACTIVATIONS  # noqa: E402
from tpfused.kernels.linear_act import BACKENDS, _linear_act, _possible  # noqa: E402

TOKENS = (256, 1024, 2048, 8192)
FEATURES = ((4096, 3584), (4096, 14336), (8192, 7168), (2048, 8192))  # K, N
# activation, gated, keeps_pre
KINDS = [(name, False, False) for name in ACTIVATIONS]
KINDS += [(name, False, True) for name in ("gelu", "gelu_tanh", "silu")]
KINDS += [("silu", True, False), ("silu", True, True)]


def measure(timer: GpuTimer, m: int, k: int, n: int, rounds: int = 7) -> list[dict]:
    """One row of the table for each kind."""
    rows = []
    with timer.session():
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for activation, gated, keeps_pre in KINDS:
            timed = {}
            for backend in _possible(x, bias, ACTIVATIONS[activation], gated, keeps_pre):
                arguments = ACTIVATIONS[activation], gated, keeps_pre, BACKENDS.index(backend)

                def call(arguments=arguments):
                    with torch.no_grad():
                        return _linear_act(x, weight, bias, None, *arguments)

                call()
                timed[backend] = timer.prepare(call)
            times = timer.interleave(timed, rounds)
            us = {backend: round(statistics.median(values), 2) for backend, values in times.items()}
            kind = {"activation": ACTIVATIONS[activation], "gated": gated, "keeps_pre": keeps_pre}
            rows.append({"m": m, "k": k, "n": n, **kind, "us": us})
    return rows


def write(card: str, rows: list[dict], path: Path) -> None:
    """One measurement a line, so that a new one is a readable change."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[card] = rows
    cards = []
    for name, known in sorted(table.items()):
        lines = ",\n".join("  " + json.dumps(row) for row in known)
        cards.append(f" {json.dumps(name)}: [\n{lines}\n ]")
    path.write_text("{\n" + ",\n".join(cards) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("choices.py: this needs a CUDA GPU, and torch finds none here")
    timer = GpuTimer()
    rows = []
    for m, (k, n) in itertools.product(TOKENS, FEATURES):
        print(f"M {m}  K {k}  N {n}", flush=True)
        rows += measure(timer, m, k, n)
    write(torch.cuda.get_device_name(), rows, choices.TABLE)
    print(f"wrote {len(rows)} rows to {choices.TABLE}")


if __name__ == "__main__":
    main()
