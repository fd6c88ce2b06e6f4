"""Times what streams of text see beside pictures, on a GPU: a generated model, and an encoder in the shape of
Qwen3-VL-8B's whose features are as wide as the model.

    python scripts/tower/time_gaps.py --shape llama-8b --streams 32 --patches 64x64

Gaps are those between tokens of a stream: alone; beside an encoder that is never idle, whose features nobody reads;
and beside requests with as much text, and with a picture, of which a few are always open. Before that so many requests
with a picture come at once, and as many of as much text: their time is that of the text's and the pictures', or how
many times as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import torch
from cuda_bench import random_checkpoint
from random_towers import PATCH, QWEN3_VL_8B, qwen3vl, random_picture
from time_tower import median_ms

from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.tower import CUDATower
from realizar.backends.select import resolve_model
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.pictures import PictureEncoder, Slices
from realizar.errors import RealizarError
from realizar.models.generated.generate import file_type_of
from realizar.models.registry import build_tower
from realizar.request import DIGEST_BYTES, Client, Picture, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
ANSWER, QUESTION, OPEN = 64, 16, 4  # tokens, and requests with a picture beside streams
WARM_S = 0.5


class Bench:
    """An engine that is driven as its loop does, with pictures of one size.

    `take` gets requests whose pictures were encoded. `num_pending`: those whose pictures are not.
    """

    def __init__(self, core: EngineCore, rows: int, columns: int) -> None:
        self.core, self.rng = core, np.random.default_rng(3)
        self.height, self.width = rows * PATCH, columns * PATCH
        self.pixels = random_picture(rows, columns).tobytes()
        self.features = rows * columns // 4
        self.prompt = self.ids(self.features + QUESTION)
        self.encoded: SimpleQueue[Request | RealizarError] = SimpleQueue()
        self.count = self.num_encoded = self.num_pending = 0
        self.take: Callable[[Request], None] = core.add

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(int(each) for each in self.rng.integers(0, 32000, count))

    def text(self, prompt: int, tokens: int) -> str:
        self.count += 1
        name = f"text {self.count}"
        self.core.add(Request(name, self.ids(prompt), GREEDY, tokens, client=Client("text")))
        return name

    def show(self) -> None:
        """A request with a picture that was not there before."""
        self.count += 1
        self.num_pending += 1
        digests = self.rng.bytes(DIGEST_BYTES * self.features)
        run = PromptEmbeddings(4, b"", digests, picture=Picture(self.pixels, self.height, self.width, 1))
        request = Request(f"shown {self.count}", self.prompt, GREEDY, ANSWER, embeddings=(run,), client=Client("shown"))
        self.core.embed_later(request, self.encoded.put)

    def turn(self) -> bool:
        """Take in what was encoded, and step; True if a choice gained a token."""
        waits = not self.core.has_work
        while not self.encoded.empty() or waits:
            with suppress(Empty):
                found = self.encoded.get(timeout=1e-3)
                if isinstance(found, RealizarError):
                    raise found
                self.num_encoded += 1
                self.num_pending -= 1
                self.take(found)
            waits = False
        return bool(self.core.has_work and self.core.step().num_tokens)

    def gaps(self, streams: int, seconds: float, before: Callable[[], None] = lambda: None) -> str:
        """Of the tokens of so many streams, after a moment."""
        names = [self.text(64, 8000) for _ in range(streams)]
        found: list[float] = []
        first_s = last_s = time.perf_counter()
        encoded = 0
        while (now_s := time.perf_counter()) < first_s + seconds + WARM_S:
            if now_s < first_s + WARM_S:
                found.clear()
                encoded = self.num_encoded
            before()
            if self.turn():
                now_s = time.perf_counter()
                found.append((now_s - last_s) * 1e3)
                last_s = now_s
        median, late = np.percentile(found, [50, 99])
        pictures = (self.num_encoded - encoded) / seconds
        for name in names:
            self.core.abort(name)
        self.until_done()
        return f"median {median:.2f} ms, p99 {late:.2f}, longest {max(found):.1f}; {pictures:.1f} pictures a second"

    def until_done(self) -> None:
        while self.core.has_work or self.num_pending:
            self.turn()


def time_together(bench: Bench, count: int, picture_ms: float) -> None:
    shown_s = text_s = 0.0
    for _ in range(2):  # the first compiles, and captures
        started_s = time.perf_counter()
        for _ in range(count):
            bench.show()
        bench.until_done()
        shown_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        for _ in range(count):
            bench.text(bench.features + QUESTION, ANSWER)
        bench.until_done()
        text_s = time.perf_counter() - started_s
    ratio = shown_s / (text_s + count * picture_ms / 1e3)
    print(f"{count} at once: {shown_s:.2f} s with pictures, {text_s:.2f} s of text, {ratio:.2f} of both", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--patches", default="64x64", help="rows and columns of a picture")
    parser.add_argument("--seconds", type=float, default=4.0)
    asked = parser.parse_args()
    rows, columns = map(int, asked.patches.split("x"))
    checkpoint = random_checkpoint(asked.shape, file_type_of(asked.shape))
    config = EngineConfig(
        device="cuda", context_length=8192, max_running=64, device_check=False, kv_cache_bytes=16 << 30
    )
    spec, resolved = resolve_model(checkpoint, config)
    of_tower = qwen3vl(**{**QWEN3_VL_8B, "text": spec.hidden_size, "taken": ()})
    tower = build_tower(of_tower)
    assert tower is not None
    encoder = CUDATower(tower, of_tower, torch.device("cuda", 0))
    slices = Slices(encoder)
    backend = CUDABackend()
    backend.load(spec, checkpoint, resolved)
    core = EngineCore(backend, spec, resolved, pictures=PictureEncoder(lambda: slices.encode, slices))
    picture = random_picture(rows, columns)
    picture_ms = min(median_ms(lambda: encoder.encode(picture), 5) for _ in range(2))  # the first makes its graph
    bench = Bench(core, rows, columns)
    print(f"{torch.cuda.get_device_name()}, {asked.shape}, a picture {picture_ms:.1f} ms with its copies", flush=True)
    time_together(bench, asked.streams, picture_ms)
    print("streams alone:", bench.gaps(asked.streams, asked.seconds), flush=True)
    bench.take = lambda request: None

    def keep_encoding() -> None:
        if not bench.num_pending:
            bench.show()

    print("beside an encoder:", bench.gaps(asked.streams, asked.seconds, keep_encoding), flush=True)
    bench.take = core.add

    def keep_open(start: Callable[[], object]) -> None:
        counts = core.scheduler.counts
        if counts.num_waiting + counts.num_running + bench.num_pending < asked.streams + OPEN:
            start()

    for name, start in (
        ("as much text", lambda: bench.text(bench.features + QUESTION, ANSWER)),
        ("a picture", bench.show),
    ):
        gaps = bench.gaps(asked.streams, asked.seconds, partial(keep_open, start))
        print(f"beside {OPEN} requests with {name}: {gaps}", flush=True)
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
