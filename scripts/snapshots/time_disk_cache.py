"""Times prompts that come from files, against computing them, on a GPU.

python scripts/snapshots/time_disk_cache.py FOLDER [--shape llama-8b] [--tokens 2048,8192,32000] [--rounds 3]

A model of random weights reads each prompt and writes its blocks to FOLDER; then the cache forgets them, and the same
prompt is read again from there. Files are in the system's memory then, as after a restart of the server: a disk that is
slower than that is the bound where they are not. A line a prompt: seconds of each, their ratio, and GB/s of files.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_bench import random_checkpoint

from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.select import resolve_model
from realizar.config import EngineConfig
from realizar.engine.core.disk_cache import Batch, Fetch
from realizar.engine.core.engine_core import EngineCore
from realizar.kv_cache.block_files import BlockFiles
from realizar.models.generated.generate import file_type_of
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy


def answered(core: EngineCore, request: Request) -> float:
    """Seconds until the first token."""
    started_s = time.perf_counter()
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()
    if core.fetch(request, lambda *part: arrived.put(part)) is not None:
        batch: Batch | None = None
        while True:
            fetch, batch = arrived.get()
            core.take_in(fetch, batch)
            if batch is None:
                break
    core.add(request)
    while core.has_work:
        core.step()
    return time.perf_counter() - started_s


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--tokens", default="2048,8192,32000")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.tokens.split(",")]
    checkpoint = random_checkpoint(arguments.shape, file_type_of(arguments.shape))
    config = EngineConfig(device="cuda", max_running=8, context_length=max(lengths) + 64, max_step_tokens=8192)
    spec, resolved = resolve_model(checkpoint, config)
    backend = CUDABackend()
    backend.load(spec, checkpoint, resolved)
    files = BlockFiles(arguments.folder, "timed", 64 << 30)
    core = EngineCore(backend, spec, resolved, policy=Policy(stretch=math.inf), files=files)
    for length in lengths:
        computed, fetched, hits = [], [], 0
        for turn in range(arguments.rounds + 1):
            prompt = tuple(np.random.default_rng(turn).integers(5, 1000, length).tolist())
            sampling = SamplingParams(temperature=0.0)
            computed.append(answered(core, Request(f"computed {turn}", prompt, sampling, 1)))
            while core.save():
                time.sleep(0.001)
            time.sleep(0.5)  # until the writers are done
            core.save()
            core.cache.forget()
            hits = core.scheduler.counts.prefix_cache_hits
            fetched.append(answered(core, Request(f"fetched {turn}", prompt, sampling, 1)))
            hits = core.scheduler.counts.prefix_cache_hits - hits
            core.clear_cache()
        slow, fast = statistics.median(computed[1:]), statistics.median(fetched[1:])
        read_bytes = hits / core.cache.block_size * sum(backend.part_bytes)
        print(
            f"{length} tokens: computed in {slow:.3f} s, from files in {fast:.3f} s ({hits} of them), {slow / fast:.2f}"
            f" times as fast, {read_bytes / fast / 1e9:.1f} GB/s",
            flush=True,
        )
    core.close()
    shutil.rmtree(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
