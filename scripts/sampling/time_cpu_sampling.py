"""Times steps of decodes on the CPU whose rows sample in all ways, each kind in turn beside greedy rows.

    python scripts/sampling/time_cpu_sampling.py smollm2:135m --rows 16,64
    python scripts/sampling/time_cpu_sampling.py smollm2:135m --rows 64 --kinds greedy,top-p,logprobs --rounds 5

Prints medians of a step over all rounds: milliseconds of the whole, of the sampling kernel, and of Python, which is the
processor time of the engine's thread outside of all kernels, with the lowest tenth of it, as other programs spoil its
caches; and the rate beside that of greedy rows, by the clock and by the lowest tenth of the thread's processor time,
which is good with `--threads 1` where other programs run. Prompts are random ids, and no row ends before its last
token. Nothing is served: `cuda_mix.py --device cpu` sends such requests to a server.

    python scripts/sampling/time_cpu_sampling.py --vocab 49152

times the kernel alone beside the reference in numpy, on one thread: microseconds of processor time a row, of normal
logits whose standard deviation is 1 (as those of random weights), then 3.
"""

from __future__ import annotations

import argparse
import operator
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from backends.reference_sampler.sampler import RowSampler
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.cpu.sampling.kernel import SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.cpu.sampling.step_sampler import StepSampler
from realizar.backends.cpu.threads import ThreadTeam
from realizar.backends.devices import ChosenDevice
from realizar.backends.select import resolve_model
from realizar.batch import OpenedRow, StepRows
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.hub.pull import resolve
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.9},
    "sigma": {"temperature": 1.0, "top_n_sigma": 1.5},
    "xtc": {"temperature": 1.0, "xtc_probability": 0.5},
    "mirostat": {"temperature": 1.0, "mirostat": 2},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 1.0, 100: -3.0}},
    "dry": {"dry_multiplier": 0.8},
    "logprobs": {"logprobs": 5},
}
PROMPT = 64
ALONE, HISTORY = 16, 300  # rows of the kernel alone, and their tokens


def sampling_of(kind: str, row: int) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "seed": row, **KINDS[kind]})


class Timed:
    """Calls of a function with the seconds that they took, of the clock and of the thread's processor time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.wall_s = self.thread_s = 0.0

    def __call__(self, *arguments: Any) -> Any:
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        result = self._function(*arguments)
        self.wall_s += time.perf_counter() - wall_s
        self.thread_s += time.thread_time() - thread_s
        return result


class Steps:
    """An engine on the CPU, whose kernels' time is known.

    Args:
        tokens: that each request generates.
    """

    def __init__(self, model: str, rows: int, threads: int | None, tokens: int) -> None:
        checkpoint = open_checkpoint(resolve(model))
        config = EngineConfig(threads=threads, max_running=rows, context_length=PROMPT + tokens + 1)
        self._spec, resolved = resolve_model(checkpoint, config, ChosenDevice("cpu"))
        backend = CPUBackend()
        backend.load(self._spec, checkpoint, resolved)
        self._core = EngineCore(backend, self._spec, resolved, policy=Policy("prefill"))
        self._rows, self._tokens, self._number = rows, tokens, 0
        team, sampling = backend.model.team, backend.model.sampling
        self._walks, self._samplings = Timed(team.run), Timed(sampling.run)
        team.run, sampling.run = self._walks, self._samplings  # type: ignore[assignment, method-assign]

    def run(self, kind: str) -> list[tuple[float, float, float, float]]:
        """Seconds of each step in which all rows decode: of the whole, the sampling kernel, Python, and the thread."""
        for row in range(self._rows):
            rng = random.Random(row)
            prompt = tuple(rng.randrange(self._spec.vocab_size) for _ in range(PROMPT))
            self._core.add(Request(f"{self._number}-{row}", prompt, sampling_of(kind, row), self._tokens))
        self._number += 1
        found = []
        while self._core.has_work:
            self._walks.thread_s = self._samplings.wall_s = 0.0
            wall_s, thread_s = time.perf_counter(), time.thread_time()
            deltas = self._core.step()
            wall_s, thread_s = time.perf_counter() - wall_s, time.thread_time() - thread_s
            if len(deltas.number_list()) == self._rows:
                found.append((wall_s, self._samplings.wall_s, thread_s - self._walks.thread_s, thread_s))
        return found[1:]  # the first may have read prompts

    def close(self) -> None:
        self._core.close()


def time_alone(vocab: int, kinds: list[str], rounds: int) -> None:
    """Print the microseconds of a row by the kernel and by the reference, and how many of their tokens differ."""
    team = ThreadTeam(1)
    kernel = SamplingKernel(vocab, team)
    rng = np.random.default_rng(1)
    history = tuple(rng.integers(0, vocab, HISTORY).tolist())
    print("| deviation | kind | kernel us | numpy us | tokens | of which differ |\n|---|---|---|---|---|---|")
    for spread in (1.0, 3.0):
        logits = (rng.standard_normal((ALONE, vocab)) * spread).astype(np.float32)
        for kind in kinds:
            opened = [OpenedRow(row, row, sampling_of(kind, row), history, PROMPT, 0) for row in range(ALONE)]
            ours_us, ours = time_kernel(kernel, opened, logits, rounds)
            theirs_us, theirs = time_reference(opened, logits, rounds)
            differ = sum(map(operator.ne, ours, theirs))
            print(f"| {spread:g} | {kind} | {ours_us:.0f} | {theirs_us:.0f} | {len(ours)} | {differ} |", flush=True)
    team.close()


def time_kernel(
    kernel: SamplingKernel, opened: list[OpenedRow], logits: NDArray[np.float32], rounds: int
) -> tuple[float, list[int]]:
    """Microseconds of a row, in the median, and all sampled tokens."""
    rows = SamplingRows(ALONE, kernel.vocab_size, HISTORY + rounds + 1)
    for each in opened:
        rows.open(each)
    numbers, times, sampled = np.arange(ALONE), [], list[int]()
    for number in range(rounds):
        computed = np.full(ALONE, HISTORY - 1 + number, np.int32)
        step = StepSampler(kernel, rows, StepRows.of_decodes(numbers, numbers, computed, np.zeros(ALONE, np.int32)), {})
        start_s = time.thread_time()
        step.read(0, logits)
        times.append((time.thread_time() - start_s) / ALONE)
        sampled += step.sampled[:, 0].tolist()
    return 1e6 * statistics.median(times), sampled


def time_reference(opened: list[OpenedRow], logits: NDArray[np.float32], rounds: int) -> tuple[float, list[int]]:
    """The same by numpy, a row at a time."""
    samplers, times, sampled = [RowSampler(each, logits.shape[1]) for each in opened], [], list[int]()
    for number in range(rounds):
        start_s = time.thread_time()
        for sampler, row in zip(samplers, logits, strict=True):
            sampled.append(sampler.sample(row, HISTORY + number).token_id)
            sampler.accept(sampled[-1])
        times.append((time.thread_time() - start_s) / ALONE)
    return 1e6 * statistics.median(times), sampled


def low(values: Sequence[float]) -> float:
    """The value that a tenth of them do not exceed."""
    return sorted(values)[len(values) // 10]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="path or pulled name; without it, the kernel alone")
    parser.add_argument("--vocab", type=int, default=49152, help="ids of the kernel alone")
    parser.add_argument("--rows", default="16,64")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.model is None:
        time_alone(given.vocab, given.kinds.split(","), 4 * given.rounds)
        return 0
    print("| rows | kind | step ms | sampling ms | Python ms | lowest tenth | of greedy | by processor time |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in map(int, given.rows.split(",")):
        steps = Steps(given.model, rows, given.threads, given.tokens)
        found: defaultdict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for _ in range(given.rounds):
            for kind in given.kinds.split(","):
                found[kind] += steps.run(kind)
        steps.close()
        greedy = found.get("greedy", [(float("nan"),) * 4])
        for kind, each in found.items():
            whole, sampling, python, _ = (statistics.median(column) for column in zip(*each, strict=True))
            by_clock = statistics.median(step[0] for step in greedy) / whole
            by_processor = low([step[3] for step in greedy]) / low([step[3] for step in each])
            quick = low([step[2] for step in each])
            line = f"{1e3 * whole:.2f} | {1e3 * sampling:.2f} | {1e3 * python:.3f} | {1e3 * quick:.3f}"
            print(f"| {rows} | {kind} | {line} | {by_clock:.2f} | {by_processor:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
