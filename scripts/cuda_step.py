"""Times the device alone: one step of decodes, its graph replayed again and again, without the host's work between.

The model is generated in memory, as for cuda_bench.py; every row has the same context, and what it keeps is zeros.

    python scripts/cuda_step.py --shape llama-8b --rows 1,8,64,256 --context 192
"""

from __future__ import annotations

import argparse
import sys

from cuda_bench import decodes, random_checkpoint

from realizar.backends.cuda.inspection.backend import InspectedCUDABackend
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.tuning.measure import median_ms
from realizar.backends.select import resolve_model
from realizar.batch import OpenedRow
from realizar.config import EngineConfig
from realizar.models.generated.shapes import SHAPES
from realizar.sampling_params import SamplingParams

REPLAYS, ROUNDS = 40, 5


def step_ms(backend: CUDABackend, rows: int, context: int) -> float:
    """Median of rounds of replays."""
    step = decodes(backend.capacity(), rows, context)
    for row in range(rows):
        backend.open(OpenedRow(row, row, SamplingParams(temperature=0.0), (1,), 1, 0))
    backend.submit(step).result()
    kind = backend._kind(step)
    if not backend.model.graphs.replay(kind):
        raise SystemExit(f"{rows} rows have no graph")
    ms = median_ms(lambda: [backend.model.graphs.replay(kind) for _ in range(REPLAYS)], ROUNDS) / REPLAYS
    for row in range(rows):
        backend.close(row)
    return ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--rows", default="1,8,16,64,256")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.rows.split(",")]
    checkpoint = random_checkpoint(arguments.shape, arguments.type)
    config = EngineConfig(
        device="cuda", max_running=max(counts), max_step_tokens=512, context_length=arguments.context + 64,
        kv_cache_dtype=arguments.kv_cache_dtype, prefix_cache=False,
    )  # fmt: skip
    backend = InspectedCUDABackend()
    spec, resolved = resolve_model(checkpoint, config)
    backend.load(spec, checkpoint, resolved)
    for rows in counts:
        ms = step_ms(backend, rows, arguments.context)
        print(
            f"{rows:4d} rows after {arguments.context} tokens: {ms:.4f} ms, {rows / ms * 1e3:.0f} a second", flush=True
        )
    backend.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
