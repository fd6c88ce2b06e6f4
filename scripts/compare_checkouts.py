"""Decode and prefill on the CPU of two checkouts of this project, in turn, a fraction of a second each.

    python scripts/compare_checkouts.py BEFORE AFTER MODEL [--pairs 150]

BEFORE and AFTER are folders with src/; MODEL is a model's file. Each checkout is loaded by a process of its own, and
the two work by turns, so that a machine's slow moments meet both. Prints the ratio of their speeds: the median of all
pairs, and the mean without the outer fifths with its standard error.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    from realizar.bench.throughput import measure
except ImportError:  # where it was before
    from realizar.engine.measure import measure
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from realizar.scheduler.pace import Policy
config = EngineConfig(device="cpu", context_length=600, max_running=1, prefix_cache=False)
core = load_core(open_checkpoint(sys.argv[2]), config, policy=Policy("prefill"))
for line in sys.stdin:
    prompt, gen = map(int, line.split())
    times = measure(core, batch=1, prompt_tokens=prompt, gen_tokens=gen)
    print(times.decode_tokens_per_s if gen else times.prefill_tokens_per_s, flush=True)
"""


class Checkout:
    """A process with one checkout's engine, and a cache of compiled kernels of its own."""

    def __init__(self, folder: Path, model: Path, cache: str) -> None:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, "-c", _CHILD, str(folder / "src"), str(model)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def speed(self, prompt: int, gen: int) -> float:
        """Tokens per second of one run: of the decode, or of the prompt where `gen` is 0."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{prompt} {gen}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a checkout's process has ended; its error is above")
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(before: Checkout, after: Checkout, prompt: int, gen: int, pairs: int) -> str:
    """One line of the table: speeds before and after, and their ratio."""
    ratios, speeds = [], ([], [])  # type: tuple[list[float], tuple[list[float], list[float]]]
    for index in range(pairs):
        found = {}
        for place in (0, 1) if index % 2 == 0 else (1, 0):  # neither is always the first
            found[place] = (before, after)[place].speed(prompt, gen)
            speeds[place].append(found[place])
        ratios.append(found[1] / found[0])
    ratios.sort()
    middle = ratios[pairs // 5 : pairs - pairs // 5]
    error = statistics.stdev(middle) / math.sqrt(len(middle))
    medians = [statistics.median(each) for each in speeds]
    return (
        f"{medians[0]:10.1f} {medians[1]:10.1f} tokens/s, ratio {statistics.median(ratios):.4f},"
        f" mean {statistics.mean(middle):.4f} +- {error:.4f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=150)
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("--pairs must be at least 5")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        checkouts = [
            Checkout(folder, arguments.model, cache)
            for folder, cache in ((arguments.before, one), (arguments.after, two))
        ]
        for checkout in (*checkouts, *checkouts):
            checkout.speed(64, 32)
        for name, prompt, gen in (("decode", 8, 24), ("prefill", 512, 0)):
            sys.stdout.write(f"{name:8} {compare(checkouts[0], checkouts[1], prompt, gen, arguments.pairs)}\n")
            sys.stdout.flush()
        for checkout in checkouts:
            checkout.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
