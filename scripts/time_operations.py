"""Time of a CPU step by kernel: each operation is walked alone, by one thread, and the best of several counts.

    python scripts/time_operations.py MODEL [TOKENS] [CONTEXT]

TOKENS in the step (default 512) after CONTEXT tokens (default 0), whose keys and values are whatever memory holds.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import numpy as np

from realizar.backends.base import ForwardInput, RowInput
from realizar.backends.cpu import CPUBackend
from realizar.backends.cpu.bind import BoundProgram
from realizar.backends.cpu.kernel_library import kernel_names
from realizar.backends.cpu.threads import ThreadTeam
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.hub.pull import resolve
from realizar.models.registry import build_spec
from realizar.sampling_params import SamplingParams

REPEATS = 10


def one_row(backend: CPUBackend, tokens: int, context: int) -> ForwardInput:
    """A step of one row whose blocks lie in order."""
    capacity = backend.capacity()
    groups = len(capacity.num_blocks)
    positions = np.arange(context, context + tokens, dtype=np.int32)
    blocks = np.arange(-(-(context + tokens) // capacity.block_size), dtype=np.int32)[None]
    row = RowInput(0, 0, tokens, context, sample=True)
    ids = np.arange(tokens, dtype=np.int32) % 1000
    return ForwardInput(ids, positions, (positions,) * groups, (blocks,) * groups, (row,))


def time_program(program: BoundProgram, seconds: dict[str, float]) -> None:
    """Add each operation's best time to its kernel's."""
    names, team = kernel_names(), ThreadTeam(1)
    for index, kernel in enumerate(program.table[:, 0]):
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            team.run(program.at + index * OPERATION_FIELDS * 8, 1)
            best = min(best, time.perf_counter() - start)
        seconds[names[int(kernel)]] += best


def main(model: str, tokens: int = 512, context: int = 0) -> None:
    checkpoint = open_checkpoint(resolve(model))
    backend = CPUBackend()
    length = tokens + context
    config = EngineConfig(context_length=length, max_step_tokens=tokens, threads=1, max_running=1)
    backend.load(build_spec(checkpoint, length), checkpoint, config)
    backend.open(0, SamplingParams(temperature=0.0), [0], 1, 0)
    backend.submit(one_row(backend, tokens, context)).result()
    seconds: dict[str, float] = defaultdict(float)
    for program in backend.programs:
        time_program(program, seconds)
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{name:32} {value * 1e3:10.3f} ms")
    print(f"{'all':32} {sum(seconds.values()) * 1e3:10.3f} ms")
    backend.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:4]))
