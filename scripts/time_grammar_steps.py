"""Times steps of rows that follow grammars, in an engine whose device is imagined: a step takes it a set time.

No GPU is needed. The imagined device computes one step after the other, each `--step-ms` long, and samples a step once
it has that step's masks; rows sample random ids, within their masks where they have one. So the time of a step beyond
that of plain rows is what grammars cost: masks that come late, and work of the engine's thread.

    python scripts/time_grammar_steps.py smollm2:135m --rows 64 --kinds plain,json-schema,regex
    python scripts/time_grammar_steps.py smollm2:135m --rows 64 --grammars 32 --seconds 10
    python scripts/time_grammar_steps.py smollm2:135m --kinds json-schema,nested-json-schema,regex,nested-regex
    python scripts/time_grammar_steps.py tests/data/tokenizers/llama-bpe.gguf.xz --shape llama-1b --timeline

With `--shape` the device is a GPU, with a model of that shape and random weights. With `--timeline` each kind has a
table of where the time of the engine's thread goes, and with `--questions` how long its questions take: a process that
watches them takes a core, and slows the engine's thread, which writes where it reads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import queue
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from cuda_bench import random_checkpoint
from numba import njit
from numpy.typing import NDArray
from step_timeline import AnswerTimes, Timeline

from realizar.backends.base import Backend, Capacity, ForwardInput
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import resolve_model
from realizar.batch import NOT_SAMPLED, OpenedRow, StepOutput
from realizar.bench.serve.kinds import REGEX, any_schema, any_tools
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.row_grammars import RowGrammars
from realizar.engine.loading import find_checkpoint
from realizar.errors import RealizarError
from realizar.models.spec import ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.scheduler.pace import Policy
from realizar.scheduler.scheduler import Scheduler
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerLimits
from realizar.tokenizer.load import load_tokenizer, plain_encoder
from realizar.tokenizer.parsers.choose import AnswerFormat
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.styles import HERMES

BLOCK = 16
PROMPT = 64


@njit(cache=False, nogil=True)  # type: ignore[untyped-decorator]
def _pick(mask: NDArray[np.uint32], number: np.uint32) -> int:
    """An allowed id of a mask, uint32 [words], found from a place that `number` gives; -1 where none is allowed."""
    words = len(mask)
    first = number % words
    for step in range(words):
        at = (first + step) % words
        word = mask[at]
        if word != 0:
            bit = number % 32
            while not (word >> bit) & 1:
                bit = (bit + 1) % 32
            return int(at) * 32 + int(bit)
    return -1


class ImaginedStep:
    """A step that is done when its time has passed, `starts_s` being when the device may begin it."""

    def __init__(self, step: ForwardInput, starts_s: float, step_s: float, words: int, rng: random.Random) -> None:
        self._step, self._rng, self._words = step, rng, words
        self._done_s = max(starts_s, time.perf_counter()) + step_s
        self._masks: Mapping[int, NDArray[np.uint32]] = {}
        self._held: frozenset[int] = frozenset()
        self._sampled: NDArray[np.int32] | None = None

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self._masks = masks

    def defer(self, rows: Collection[int]) -> None:
        self._held = frozenset(rows)

    def sample(self) -> None:
        self.sampled_s()

    def sampled_s(self) -> float:
        """Sample, once; the time at which the device is done with the step."""
        if self._sampled is None:
            self._done_s = max(self._done_s, time.perf_counter())
            columns = self._step.columns
            self._sampled = np.full(len(columns), NOT_SAMPLED, np.int32)
            drawn = self._rng.choices(range(1000, 30_000), k=len(columns))
            for index in columns.samples.nonzero()[0].tolist():
                row = int(columns.numbers[index])
                mask = self._masks.get(row)
                if row not in self._held:
                    number = drawn[index]
                    self._sampled[index] = number if mask is None else _pick(np.atleast_2d(mask)[0], np.uint32(number))
        return self._done_s

    def result(self) -> StepOutput:
        left_s = self.sampled_s() - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        assert self._sampled is not None
        return StepOutput(self._sampled[:, None])


class ImaginedDevice:
    """A backend of `rows` rows and a set time for every step."""

    def __init__(self, rows: int, tokens: int, vocab_size: int, step_s: float) -> None:
        self._rows, self._tokens, self._step_s = rows, tokens, step_s
        self._words, self._rng = -(-vocab_size // 32), random.Random(1)
        self._pending: ImaginedStep | None = None
        self.num_held = self.num_steps = 0

    def load(self, spec: object, checkpoint: Checkpoint, config: object, others: object = None) -> None:
        raise NotImplementedError("it is made loaded")

    def device_memory(self) -> None:
        """It has none of its own."""

    def capacity(self) -> Capacity:
        length = PROMPT + self._tokens + 1
        return Capacity(
            block_size=BLOCK, num_blocks=(self._rows * (length + BLOCK) // BLOCK + 1,),
            weight_bytes=1, weight_bytes_per_token=1, kv_cache_bytes=1,
            kv_cache_dtype="bf16", load_s=0.0,
        )  # fmt: skip

    def open(self, opened: OpenedRow) -> None:
        pass

    def close(self, row: int) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def submit(self, step: ForwardInput) -> ImaginedStep:
        before_s = 0.0 if self._pending is None else self._pending.sampled_s()
        self.num_steps += 1
        self._pending = ImaginedStep(step, before_s, self._step_s, self._words, self._rng)
        return self._pending


def structured(kind: str, rng: random.Random, tokens: int, number: int, grammars: int) -> StructuredOutput | None:
    """The grammar of a request; `grammars` different ones in turn, or with 0 those of the mix of `bench-serve`."""
    if kind == "plain":
        return None
    if kind.startswith("nested-"):
        found = structured(kind.removeprefix("nested-"), rng, tokens, number, grammars)
        return call_grammar(AnswerFormat(HERMES, None), any_tools(random.Random(1))["tools"], structured=found)
    if kind == "regex":
        text = REGEX.regex if not grammars else rf"([a-z]{{1,12}} )+x{number % grammars}"
        return StructuredOutput("regex", text)
    rng = random.Random(number % grammars) if grammars else rng
    return StructuredOutput("json_schema", json.dumps(any_schema(rng, tokens)))


def vocabulary(name: str, folder: Path) -> Checkpoint:
    """The model of that name, or the vocabulary in a packed file."""
    if not name.endswith(".xz"):
        return find_checkpoint(name)
    path = folder / "vocabulary.gguf"
    path.write_bytes(lzma.decompress(Path(name).read_bytes()))
    return open_checkpoint(path)


class Load:
    """Keeps as many requests open as the engine has rows."""

    def __init__(self, core: EngineCore, kind: str, arguments: argparse.Namespace) -> None:
        self._core, self._kind, self._given = core, kind, arguments
        self._rng = random.Random(3)
        self._number = self._open = 0
        self._compiled: queue.SimpleQueue[tuple[Request, RealizarError | None]] = queue.SimpleQueue()

    def top_up(self) -> None:
        while not self._compiled.empty():
            request, error = self._compiled.get()
            if error is not None:
                raise error
            self._core.add(request)
        while self._open < self._given.rows:
            self._open += 1
            self._number += 1
            request = self._new_request()
            if self._core.acquire_grammar(request):
                self._core.add(request)
            else:
                self._core.grammars.prepare_later(request, partial(self._note, request))

    def run(self, seconds: float) -> tuple[float, float, float, int]:
        """Load the engine; tokens/s, seconds of a step (medians by the clock, and of its thread's processor), steps."""
        started_s = time.perf_counter()
        tokens, times_s, busy_s = 0, list[float](), list[float]()
        while (now_s := time.perf_counter()) - started_s < seconds or not times_s:
            self.top_up()
            if not self._core.has_work:
                time.sleep(1e-3)
                continue
            thread_s = time.thread_time()
            deltas = self._core.step()
            busy_s.append(time.thread_time() - thread_s)
            for failure in deltas.failures:
                raise RuntimeError(failure.error.message)
            tokens += deltas.num_tokens
            self._open -= len(deltas.ends)
            times_s.append(time.perf_counter() - now_s)
        rate = tokens / (time.perf_counter() - started_s)
        return rate, statistics.median(times_s), statistics.median(busy_s), len(times_s)

    def end(self) -> None:
        """End the open requests."""
        for number in range(self._number + 1):
            self._core.abort(f"{self._kind}-{number}")
        while self._core.has_work:
            self._core.step()

    def _note(self, request: Request, error: RealizarError | None) -> None:
        self._compiled.put((request, error))

    def _new_request(self) -> Request:
        grammar = structured(self._kind, self._rng, self._given.tokens, self._number, self._given.grammars)
        prompt = tuple(self._rng.randrange(1000, 30_000) for _ in range(PROMPT))
        sampling = SamplingParams(temperature=0.8, structured=grammar, ignore_eos=True)
        return Request(f"{self._kind}-{self._number}", prompt, sampling, self._given.tokens)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whose vocabulary is used; also a GGUF file of a vocabulary alone, .gguf.xz")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument(
        "--kinds",
        default="plain,json-schema,regex",
        help="json-schema+4: with four shared workers, not one; nested-regex: beside tools",
    )
    parser.add_argument("--grammars", type=int, default=0, help="different ones; 0 takes those of bench-serve's mix")
    parser.add_argument("--step-ms", type=float, default=1.3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--shape", help="of the model on a GPU")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--questions", action="store_true", help="with a timeline: how long each takes")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        time_kinds(given, vocabulary(given.model, Path(folder)))
    return 0


def time_kinds(given: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Time each kind and print its line."""
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.vocabulary_bytes()
    source = EncodeSource(plain_encoder.__module__, plain_encoder.__name__, str(checkpoint.path))
    tokens = GrammarTokens(words, tokenizer.special_ids, tokenizer.eos_ids, len(words), source)
    plain = 0.0
    services: list[GrammarService] = []
    more = 1

    def new_grammars() -> GrammarService:
        limits = WorkerLimits(slots=2 * given.rows, drafts=0, workers=more)
        services.append(GrammarService(tokens, limits=limits))
        return services[-1]

    _pick(np.ones(1, np.uint32), np.uint32(0))  # compiles it
    backend, spec, resolved = loaded(given, len(words))
    for text in given.kinds.split(","):
        kind, _, number = text.partition("+")
        more = int(number or 1)
        core = EngineCore(backend, spec, resolved, policy=Policy("prefill"), new_grammars=new_grammars)
        load = Load(core, kind, given)
        load.run(1.0)  # compiles what comes again and again
        timeline = Timeline()
        with timeline.around(parts_of(backend)) if given.timeline else nullcontext():
            watched = AnswerTimes(services[-1].rows.memory) if given.questions and kind != "plain" else None
            rate, step_s, busy_s, num_steps = load.run(given.seconds)
        plain = plain or rate
        figures = f"{rate:8,.0f} tokens/s, {rate / plain:.2f} of the first"
        print(f"{text:>12}: {figures}; {1e3 * step_s:.2f} ms a step, {1e3 * busy_s:.2f} of the thread", flush=True)
        if given.timeline:
            mean_ms = 1e3 * given.seconds / num_steps
            print(f"{num_steps} steps of {mean_ms:.3f} ms, {rate * 1e-3 * mean_ms:.1f} tokens each")
            print("\n".join(timeline.lines(num_steps)), flush=True)
        if watched is not None:
            watched.end()
            shares = np.percentile(np.array(watched.answers_s or [0.0]) * 1e3, (10, 50, 75, 90, 95, 99))
            print("questions, ms at 10, 50, 75, 90, 95 and 99 %:", *(f"{each:.3f}" for each in shares), flush=True)
        load.end()
        core.grammars.shutdown()
    backend.shutdown()


def loaded(given: argparse.Namespace, vocab_size: int) -> tuple[Backend, ModelSpec, ResolvedConfig]:
    """The device with its model, of which an imagined one has only the shape."""
    length = PROMPT + given.tokens + 1
    config = EngineConfig(max_running=given.rows, max_step_tokens=2048, context_length=length, prefix_cache=False)
    checkpoint = random_checkpoint(given.shape or "tiny", "q4_k_m" if given.shape else "q8_0")
    if given.shape is None:
        spec, resolved = resolve_model(checkpoint, config, ChosenDevice("cuda"))
        device = ImaginedDevice(given.rows, given.tokens, vocab_size, 1e-3 * given.step_ms)
        return device, replace(spec, vocab_size=vocab_size), resolved
    from realizar.backends.cuda.runner import CUDABackend

    spec, resolved = resolve_model(checkpoint, replace(config, device="cuda"))
    backend = CUDABackend()
    backend.load(spec, checkpoint, resolved)
    return backend, spec, resolved


def parts_of(backend: Backend) -> list[tuple[type, str, str]]:
    """What a timeline shows: methods and what they are called."""
    step, sample = ImaginedStep, "sampled_s"
    if not isinstance(backend, ImaginedDevice):
        from realizar.backends.cuda.step import CUDAStep

        step, sample = CUDAStep, "start_sampling"  # type: ignore[assignment]
    return [
        (EngineCore, "step", "the rest of a step"),
        (Scheduler, "schedule", "schedule"),
        (Scheduler, "update", "update"),
        (Scheduler, "defer", "defer rows"),
        (RowGrammars, "start", "ask"),
        (RowGrammars, "advance", "take tokens in"),
        (RowGrammars, "give", "give masks"),
        (RowGrammars, "_late", "wait for masks"),
        (type(backend), "submit", "submit"),
        (step, sample, "sample"),
        (step, "result", "wait for results"),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
