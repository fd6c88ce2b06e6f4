"""Times prompts that come from files, against computing them, on a GPU.

python scripts/snapshots/time_disk_cache.py FOLDER [--shape llama-8b] [--kv-dtype int8] [--tokens 2048,8192,32000]
[--rounds 3]

A model of random weights reads each prompt and writes its blocks to FOLDER; then the cache forgets them, and the same
prompt is read again from there. Files are in the system's memory then, as after a restart of the server: a disk that is
slower than that is the bound where they are not. A line a prompt: seconds of each, their ratio, and GB/s of files; and
of the fastest round the seconds until its files were looked up, until the first and the last of them had come, that
the engine's thread took for them, and that all threads read and checked.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

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


class TimedFiles(BlockFiles):
    """Counts the seconds of all threads that read and check files."""

    read_s = 0.0

    def read(self, keys: Sequence[bytes], part: int, contents: NDArray[np.uint8]) -> list[bool]:
        started_s = time.perf_counter()
        found = super().read(keys, part, contents)
        self.read_s += time.perf_counter() - started_s
        return found


@dataclass(order=True)
class Times:
    """Seconds until the first token, and of its parts."""

    all_s: float = 0.0
    looked_up_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    taken_in_s: float = 0.0
    read_s: float = 0.0


def answered(core: EngineCore, files: TimedFiles, request: Request) -> Times:
    files.read_s = 0.0
    started_s, times = time.perf_counter(), Times()
    arrived: SimpleQueue[tuple[Fetch, Batch | None]] = SimpleQueue()
    if core.fetch(request, lambda *part: arrived.put(part)) is not None:
        times.looked_up_s = time.perf_counter() - started_s
        batch: Batch | None = None
        while True:
            fetch, batch = arrived.get()
            came_s = time.perf_counter()
            times.first_s = times.first_s or came_s - started_s
            core.take_in(fetch, batch)
            times.taken_in_s += time.perf_counter() - came_s
            if batch is None:
                break
        times.last_s = came_s - started_s
    core.add(request)
    while core.has_work:
        core.step()
    times.all_s, times.read_s = time.perf_counter() - started_s, files.read_s
    return times


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--tokens", default="2048,8192,32000")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.tokens.split(",")]
    checkpoint = random_checkpoint(arguments.shape, file_type_of(arguments.shape))
    config = EngineConfig(
        device="cuda", max_running=8, context_length=max(lengths) + 64, max_step_tokens=8192,
        kv_cache_dtype=arguments.kv_dtype,
    )  # fmt: skip
    spec, resolved = resolve_model(checkpoint, config)
    backend = CUDABackend()
    backend.load(spec, checkpoint, resolved)
    files = TimedFiles(arguments.folder, "timed", 64 << 30)
    core = EngineCore(backend, spec, resolved, policy=Policy(stretch=math.inf), files=files)
    for length in lengths:
        computed, fetched, hits = [], [], 0
        for turn in range(arguments.rounds + 1):
            prompt = tuple(np.random.default_rng(turn).integers(5, 1000, length).tolist())
            sampling = SamplingParams(temperature=0.0)
            computed.append(answered(core, files, Request(f"computed {turn}", prompt, sampling, 1)))
            while core.save():
                time.sleep(0.001)
            time.sleep(0.5)  # until the writers are done
            core.save()
            core.cache.forget()
            hits = core.scheduler.counts.prefix_cache_hits
            fetched.append(answered(core, files, Request(f"fetched {turn}", prompt, sampling, 1)))
            hits = core.scheduler.counts.prefix_cache_hits - hits
            core.clear_cache()
        slow, fast = (statistics.median(each.all_s for each in times[1:]) for times in (computed, fetched))
        read_bytes = hits / core.cache.block_size * sum(backend.part_bytes)
        print(
            f"{length} tokens: computed in {slow:.3f} s, from files in {fast:.3f} s ({hits} of them), {slow / fast:.2f}"
            f" times as fast, {read_bytes / fast / 1e9:.1f} GB/s; {min(fetched[1:])}",
            flush=True,
        )
    core.close()
    shutil.rmtree(arguments.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
