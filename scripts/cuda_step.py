"""Times the device alone: one step of decodes, its graph replayed again and again, without the host's work between.

The model is generated in memory, as for cuda_bench.py; every row has the same context, and what it keeps is zeros. Of a
mixture the experts that a layer read stand beside chance, since steps of few rows take the time of what they read. With
`--table` all multiples of 8 rows are timed, and pairs are named of which the larger number takes less time, or makes
fewer tokens a second, by more than 1 %.

    python scripts/cuda_step.py --shape llama-8b --rows 1,8,64,256 --context 192
    python scripts/cuda_step.py --shape qwen3-30b-a3b --table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import combinations

from cuda_bench import decodes, random_checkpoint

from realizar.backends.cuda.inspection.backend import InspectedCUDABackend
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.tuning.measure import median_ms
from realizar.backends.select import resolve_model
from realizar.batch import OpenedRow
from realizar.bench.throughput import by_chance
from realizar.config import EngineConfig
from realizar.models.generated.generate import file_type_of
from realizar.models.generated.shapes import SHAPES
from realizar.sampling_params import SamplingParams

REPLAYS, ROUNDS = 40, 5
TABLE = (1, 2, 4, *range(8, 257, 8))
_SLOWER = 1.01


def step_ms(backend: CUDABackend, rows: int, context: int) -> float:
    """Median of rounds of replays."""
    step = decodes(backend.capacity(), rows, context)
    for row in range(rows):
        backend.open(OpenedRow(row, row, SamplingParams(temperature=0.0), (1,), 1, 0))
    backend.submit(step).result()
    kind = backend._kind(step)
    backend.forget_experts_read()
    if not backend.model.graphs.replay(kind):
        raise SystemExit(f"{rows} rows have no graph")
    ms = median_ms(lambda: [backend.model.graphs.replay(kind) for _ in range(REPLAYS)], ROUNDS) / REPLAYS
    for row in range(rows):
        backend.close(row)
    return ms


def experts_read(backend: CUDABackend, rows: int) -> str:
    """Of the replays of a step of so many rows."""
    read = backend.experts_read()
    if read is None:
        return ""
    _, experts = backend.model.spec.mixtures()[0]
    return f"; {read:.1f} experts a layer, by chance {by_chance(experts, rows):.1f}"


def print_pairs(times: Mapping[int, float]) -> None:
    """Name each pair of numbers of rows of which the larger one is faster, and each for which it does not pay."""
    for few, many in combinations(sorted(times), 2):
        longer, rate = times[few] / times[many], times[few] * many / (times[many] * few)
        if longer > _SLOWER:
            print(f"{few} rows take {longer:.3f} of the time of {many}")
        if rate * _SLOWER < 1:
            print(f"{many} rows make {rate:.3f} of the tokens a second of {few}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--type", help="by default that of the files that people run")
    parser.add_argument("--rows", default="1,8,16,64,256")
    parser.add_argument("--table", action="store_true", help="1, 2, 4 and all multiples of 8 rows up to 256")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args()
    counts = TABLE if arguments.table else [int(text) for text in arguments.rows.split(",")]
    checkpoint = random_checkpoint(arguments.shape, arguments.type or file_type_of(arguments.shape))
    config = EngineConfig(
        device="cuda", max_running=max(counts), max_step_tokens=512, context_length=arguments.context + 64,
        kv_cache_dtype=arguments.kv_cache_dtype, prefix_cache=False,
    )  # fmt: skip
    backend = InspectedCUDABackend()
    spec, resolved = resolve_model(checkpoint, config)
    backend.load(spec, checkpoint, resolved)
    times = {}
    for rows in counts:
        times[rows] = step_ms(backend, rows, arguments.context)
        print(
            f"{rows:4d} rows after {arguments.context} tokens: {times[rows]:.4f} ms,"
            f" {rows / times[rows] * 1e3:.0f} a second{experts_read(backend, rows)}", flush=True,
        )  # fmt: skip
    if arguments.table:
        print_pairs(times)
    backend.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
