"""A long prompt beside streams, on a real server: when its first token comes, and how far apart the streams' tokens do.

    python scripts/serving/time_long_prompts.py --shape qwen3-30b-a3b --prompts 20000,100000 --streams 16
    python scripts/serving/time_long_prompts.py --model smollm2:135m --device cpu --prompts 4000 --streams 4

Each prompt of random token ids is read alone, then beside streams that have run for a while. A gap is the time between
two texts of a stream as its client sees them: those alone end before the prompt is sent, those beside it overlap the
time until its first token. Aimed for are a first token within 1.2 of the time alone, and 99 % of the gaps beside it
within 4 times the median alone; no prompt finds another one in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realizar.bench.serve.client import Answer, Server, send
from realizar.bench.serve.kinds import find_kind
from realizar.bench.serve.servers import find_server
from realizar.bench.serve.workload import Lengths, PlannedRequest, Workload, draw_request
from realizar.hub.pull import resolve
from realizar.models.generated.shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parents[1]))
from cuda_serve import served, write_model

_FIRST_AIM, _GAPS_AIM = 1.2, 4.0
_TIMEOUT_S = 600.0
_ANSWER = 4  # tokens of a long prompt's answer: the first one may be half a letter, which is no text yet
_ROOM = 64  # tokens of a context that a prompt and its answer leave
_LATER = 2.5  # times the time alone, after which the streams end: a first token that comes later is beside fewer


@dataclass(frozen=True)
class Gaps:
    """Gaps of all streams, and when each ended: float64 [gaps] in seconds."""

    seconds: NDArray[np.float64]
    ended_s: NDArray[np.float64]

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Gaps:
        """Those of streams that wrote two texts and more."""
        times = [each.deltas_s for each in answers if len(each.deltas_s) > 1]
        return cls(
            np.concatenate([np.empty(0), *map(np.diff, times)]),
            np.concatenate([np.empty(0), *(each[1:] for each in times)]),
        )

    def between(self, begin_s: float, end_s: float) -> NDArray[np.float64]:
        """Gaps that overlap a time."""
        return self.seconds[(self.ended_s > begin_s) & (self.ended_s - self.seconds < end_s)]

    def ended_between(self, begin_s: float, end_s: float) -> NDArray[np.float64]:
        return self.seconds[(self.ended_s > begin_s) & (self.ended_s <= end_s)]


def long_prompt(server: Server, length: int, seed: int) -> PlannedRequest:
    """A prompt of random token ids."""
    work = Workload(
        {"greedy": 1.0}, num_requests=1, prompt_length=Lengths(length, length), token_ids=True, seed=seed,
        output_tokens=Lengths(_ANSWER, _ANSWER),
    )  # fmt: skip
    return draw_request(work, 0, server.dialect, server.model)


def streams_of(server: Server, arguments: argparse.Namespace, seconds: float, seed: int) -> list[PlannedRequest]:
    """Streams that go on until their clients leave, after so many seconds."""
    tokens = server.context_tokens or arguments.stream_tokens
    tokens = min(arguments.stream_tokens, tokens - 2 * arguments.words - _ROOM)
    work = Workload(
        {arguments.kind: 1.0}, num_requests=arguments.streams, seed=seed, salt="streams",
        prompt_length=Lengths(arguments.words, arguments.words), output_tokens=Lengths(tokens, tokens),
    )  # fmt: skip
    drawn = (draw_request(work, number, server.dialect, server.model) for number in range(arguments.streams))
    return [replace(each, leave_after_s=seconds) for each in drawn]


async def ask(server: Server, request: PlannedRequest) -> Answer:
    """The whole answer; SystemExit where there is none."""
    answer = await send(server, request, time.perf_counter(), _TIMEOUT_S)
    if answer.error is not None:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer


async def beside(
    server: Server, request: PlannedRequest, streams: Sequence[PlannedRequest], arguments: argparse.Namespace
) -> tuple[Answer, Gaps]:
    """The answer of a request beside streams, and the streams' gaps."""
    running = [asyncio.create_task(ask(server, stream)) for stream in streams]
    await asyncio.sleep(arguments.settle + arguments.alone)
    answer = await ask(server, request)
    return answer, Gaps.of(await asyncio.gather(*running))


def measure(server: Server, arguments: argparse.Namespace) -> Iterator[str]:
    """Lines for each prompt and round."""
    for number in range(arguments.rounds):
        for length in map(int, arguments.prompts.split(",")):
            seed = 10 * (length + 1_000_000 * number)
            alone_s = asyncio.run(ask(server, long_prompt(server, length, seed))).ttft_s
            yield f"{length} tokens alone: first token after {alone_s:.3f} s, {length / alone_s:,.0f} tokens/s"
            seconds = arguments.settle + arguments.alone + 1.0 + _LATER * alone_s
            streams = streams_of(server, arguments, seconds, seed + 1)
            answer, gaps = asyncio.run(beside(server, long_prompt(server, length, seed + 2), streams, arguments))
            yield from lines_of(answer, gaps, alone_s, arguments)


def lines_of(answer: Answer, gaps: Gaps, alone_s: float, arguments: argparse.Namespace) -> Iterator[str]:
    """What a prompt beside streams took, and their gaps before and beside it."""
    sent_s, first_s = answer.due_s, float(answer.deltas_s[0])
    before = gaps.ended_between(sent_s - arguments.alone, sent_s)
    during = gaps.between(sent_s, first_s)
    if not len(before) or not len(during):
        raise SystemExit("the streams wrote nothing: give them more time or tokens")
    alone_ms, times = 1e3 * float(np.median(before)), answer.ttft_s / alone_s
    p99 = float(np.quantile(during, 0.99))
    yield (
        f"  beside {arguments.streams} streams after {answer.ttft_s:.3f} s, {times:.2f} of the time alone, "
        f"{'reached' if times <= _FIRST_AIM else 'MISSED'}: {_FIRST_AIM:g}"
    )
    yield (
        f"  gaps alone: median {alone_ms:.2f} ms, 99 % {1e3 * float(np.quantile(before, 0.99)):.2f}; beside it: median "
        f"{1e3 * float(np.median(during)):.2f}, 99 % {1e3 * p99:.2f}, longest {1e3 * float(during.max()):.2f} ms; "
        f"99 % are {1e3 * p99 / alone_ms:.2f} of the median alone, "
        f"{'reached' if 1e3 * p99 <= _GAPS_AIM * alone_ms else 'MISSED'}: {_GAPS_AIM:g}"
    )
    marks = np.linspace(sent_s, first_s, 6)
    fifths = [gaps.ended_between(*pair) for pair in itertools.pairwise(marks)]
    medians = (f"{1e3 * float(np.median(each)):.1f}" if len(each) else "none" for each in fifths)
    yield f"  medians by fifths of its time, ms: {', '.join(medians)}"
    if first_s > sent_s + 1.0 + _LATER * alone_s:
        yield "  THE STREAMS ENDED BEFORE ITS FIRST TOKEN"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or pulled name of a model to serve in place of a generated one")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--prompts", default="20000,100000", help="tokens of each prompt, with commas between")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kind", default="temperature", help="of the streams' requests")
    parser.add_argument("--words", type=int, default=64, help="of the streams' prompts")
    parser.add_argument("--stream-tokens", type=int, default=50_000, help="of a stream, which ends before")
    parser.add_argument("--settle", type=float, default=1.5, help="seconds before gaps of streams alone count")
    parser.add_argument("--alone", type=float, default=2.0, help="seconds in which they do")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve", default="", help="further options of realizar serve, in one text")
    parser.add_argument("--port", type=int, default=8795)
    parser.add_argument("--keep", type=Path, help="folder that keeps the model and compiled kernels for the next run")
    arguments = parser.parse_args()
    find_kind(arguments.kind, "kind")
    context = max(map(int, arguments.prompts.split(","))) + _ANSWER + _ROOM
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = resolve(arguments.model) if arguments.model else folder / f"{arguments.shape}-{context}.gguf"
        if not path.is_file():
            write_model(arguments.shape, path, folder, context_length=context)
            print(f"{path.stat().st_size / 1e9:.2f} GB written", flush=True)
        options = ["--device", arguments.device, "--context-length", str(context), *arguments.serve.split()]
        with served(path, arguments.port, options, folder / "cache") as running:
            print(f"ready after {running.ready_s:.1f} s", flush=True)
            server = find_server(Server("long prompts", f"http://127.0.0.1:{arguments.port}", ""))
            for line in measure(server, arguments):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
