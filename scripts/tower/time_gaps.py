"""Times what streams of text see beside pictures, on a GPU: a generated model, and an encoder in the shape of
Qwen3-VL-8B's whose features are as wide as the model.

    python scripts/tower/time_gaps.py --shape llama-8b --streams 32 --patches 64x64

Gaps are those between tokens of a stream: alone; beside an encoder that is never idle, whose features nobody reads;
and beside requests with as much text, and with a picture, of which some are always open. Of the latest in a hundred it
prints what the engine did in them. Before that so many requests with a picture come at once, and as many of as much
text: their time is that of the text's and the pictures', or how many times as long.

`qwen3-vl-8b` has its encoder's whole shape, with features that are added after the first layers, and positions of three
axes; other models get the features of the last layer alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from cuda_bench import random_checkpoint
from random_towers import PATCH, QWEN3_VL_8B, qwen3vl, random_picture
from time_tower import median_ms

from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.tower import CUDATower
from realizar.backends.select import resolve_model
from realizar.batch import ScheduledBatch
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.pictures import PictureEncoder, Slices
from realizar.engine.process.main import SWITCH_INTERVAL_S
from realizar.errors import RealizarError
from realizar.models.generated.generate import file_type_of
from realizar.models.generated.shapes import SHAPES, Shape
from realizar.models.registry import build_tower
from realizar.request import DIGEST_BYTES, Client, Picture, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
ANSWER, QUESTION = 64, 16  # tokens
WARM_S = 0.5
QWEN3_VL = "qwen3-vl-8b"
SHAPES[QWEN3_VL] = Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False, 5e6, 1e-6, 262144)


def seeing_checkpoint(shape: str) -> tuple[Checkpoint, Checkpoint]:
    """A text model, and an encoder whose features it takes."""
    made = random_checkpoint(shape, file_type_of(shape))
    if shape != QWEN3_VL:
        return made, qwen3vl(**{**QWEN3_VL_8B, "text": SHAPES[shape].hidden_size, "taken": ()})
    own = {key.replace("qwen3.", "qwen3vl."): value for key, value in made.metadata.items()}
    own |= {
        "general.architecture": "qwen3vl", "qwen3vl.rope.dimension_sections": [24, 20, 20, 0],
        "qwen3vl.n_deepstack_layers": 3,
    }  # fmt: skip
    return replace(made, metadata=own), qwen3vl(**QWEN3_VL_8B)


class Notes:
    """What the engine's thread does between two tokens of a stream: ms in some methods, and what the step had."""

    def __init__(self, core: EngineCore, slices: Slices, encoder: CUDATower) -> None:
        self.now: dict[str, float] = {}
        self.all: list[tuple[float, dict[str, float]]] = []
        parts: list[tuple[Any, str]] = [(core.scheduler, "schedule"), (core, "_submit"), (core, "_finish_oldest")]
        for owner, name in (*parts, (slices, "go_on")):
            setattr(owner, name, self._timed(getattr(owner, name), name.strip("_")))
        for name in ("begin", "features"):  # on another thread
            setattr(encoder, name, self._marked(getattr(encoder, name), name))

    def end(self, gap_ms: float) -> None:
        self.all.append((gap_ms, self.now))
        self.now = {}

    def late(self, count: int = 8) -> list[str]:
        """A line for the mean of the gaps in the middle, and for some of the latest in a hundred."""
        ordered = sorted(self.all, key=lambda each: each[0])
        middle = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
        keys = sorted({key for _, note in middle for key in note})
        means = {key: sum(note.get(key, 0.0) for _, note in middle) / len(middle) for key in keys}
        latest = ordered[-max(len(ordered) // 100, 1) :]
        chosen = latest[:: max(len(latest) // count, 1)]
        return [_line(middle[len(middle) // 2][0], means), *(_line(*each) for each in chosen)]

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            try:
                found = method(*arguments, **named)
            finally:
                self.now[label] = self.now.get(label, 0.0) + (time.perf_counter() - started_s) * 1e3
            if label == "go_on":
                self.now["slice"] = min(arguments[0] * 1e3, 99.0)
            if isinstance(found, ScheduledBatch) and found.num_rows:
                self.now["decodes"] = found.num_decode_tokens
                self.now["prompt"] = found.num_tokens - found.num_decode_tokens
            return found

        return timed

    def _marked(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(method)
        def marked(*arguments: Any, **named: Any) -> Any:
            self.now[f"{label} from"] = 1.0
            started_s = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.now[label] = (time.perf_counter() - started_s) * 1e3

        return marked


def _line(gap_ms: float, note: dict[str, float]) -> str:
    return f"    {gap_ms:6.2f} ms: " + ", ".join(f"{key} {value:.2f}" for key, value in sorted(note.items()))


class Bench:
    """An engine that is driven as its loop does, with pictures of one size.

    `take` gets requests whose pictures were encoded. `num_pending`: those whose pictures are not.
    """

    def __init__(self, core: EngineCore, rows: int, columns: int, notes: Notes | None) -> None:
        self.core, self.rng, self.notes = core, np.random.default_rng(3), notes
        self.height, self.width = rows * PATCH, columns * PATCH
        self.pixels = random_picture(rows, columns).tobytes()
        self.features = rows * columns // 4
        self.prompt = self.ids(self.features + QUESTION)
        self.positions = self._positions(rows // 2, columns // 2) if core.spec.deepstack else b""
        self.encoded: SimpleQueue[Request | RealizarError] = SimpleQueue()
        self.count = self.num_encoded = self.num_pending = 0
        self.take: Callable[[Request], None] = core.add

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(int(each) for each in self.rng.integers(0, 32000, count))

    def _positions(self, rows: int, columns: int) -> bytes:
        """Of the axes of a rope: four tokens, the squares of a picture, and a question."""
        start, places = 4, np.indices((rows, columns)).reshape(2, -1)
        axes = np.concatenate((np.zeros((1, rows * columns), np.int64), places)) + start
        before, after = np.arange(start), np.arange(QUESTION - start) + start + max(rows, columns)
        return np.hstack([np.tile(before, (3, 1)), axes, np.tile(after, (3, 1))]).astype(np.int32).tobytes()

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
        request = Request(
            f"shown {self.count}", self.prompt, GREEDY, ANSWER, embeddings=(run,), client=Client("shown"),
            rope_positions=self.positions,
        )  # fmt: skip
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
                if self.notes is not None:
                    self.notes.all.clear()
                encoded = self.num_encoded
            before()
            if self.turn():
                now_s = time.perf_counter()
                found.append((now_s - last_s) * 1e3)
                last_s = now_s
                if self.notes is not None:
                    self.notes.end(found[-1])
        median, late = np.percentile(found, [50, 99])
        pictures = (self.num_encoded - encoded) / seconds
        for name in names:
            self.core.abort(name)
        self.until_done()
        line = f"median {median:.2f} ms, p99 {late:.2f}, longest {max(found):.1f}; {pictures:.1f} pictures a second"
        return "\n".join([line, *(self.notes.late() if self.notes is not None else ())])

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
    parser.add_argument("--open", default="4", help="requests that are always open beside the streams")
    parser.add_argument("--late", action="store_true", help="print what the engine did in the latest gaps")
    asked = parser.parse_args()
    rows, columns = map(int, asked.patches.split("x"))
    checkpoint, of_tower = seeing_checkpoint(asked.shape)
    config = EngineConfig(
        device="cuda", context_length=8192, max_running=64, device_check=False, kv_cache_bytes=16 << 30
    )
    spec, resolved = resolve_model(checkpoint, config)
    tower = build_tower(of_tower)
    assert tower is not None
    encoder = CUDATower(tower, of_tower, torch.device("cuda", 0))
    slices = Slices(encoder)
    backend = CUDABackend()
    backend.load(spec, checkpoint, resolved)
    core = EngineCore(backend, spec, resolved, pictures=PictureEncoder(lambda: slices.encode, slices))
    picture = random_picture(rows, columns)
    picture_ms = min(median_ms(lambda: encoder.encode(picture), 5) for _ in range(2))  # the first makes its graph
    bench = Bench(core, rows, columns, Notes(core, slices, encoder) if asked.late else None)
    gc.collect()
    gc.freeze()  # as the engine's process does, and what follows
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"{torch.cuda.get_device_name()}, {asked.shape}, a picture {picture_ms:.1f} ms with its copies", flush=True)
    time_together(bench, asked.streams, picture_ms)
    print("streams alone:", bench.gaps(asked.streams, asked.seconds), flush=True)
    bench.take = lambda request: None

    def keep_encoding() -> None:
        if not bench.num_pending:
            bench.show()

    print("beside an encoder:", bench.gaps(asked.streams, asked.seconds, keep_encoding), flush=True)
    bench.take = core.add

    def keep_open(start: Callable[[], object], count: int) -> None:
        counts = core.scheduler.counts
        if counts.num_waiting + counts.num_running + bench.num_pending < asked.streams + count:
            start()

    for count in map(int, asked.open.split(",")):
        for name, start in (
            ("as much text", lambda: bench.text(bench.features + QUESTION, ANSWER)),
            ("a picture", bench.show),
        ):
            gaps = bench.gaps(asked.streams, asked.seconds, partial(keep_open, start, count))
            print(f"beside {count} requests with {name}: {gaps}", flush=True)
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
