"""The API process's time for a token: reading it off the socket, making text of it, sending it to a client.

    python scripts/time_api_process.py smollm2:135m [--streams 64] [--tokens 200] [--steps 1] [--logprobs N] [--spread]

A link that makes tokens up stands in for the engine, so everything here is processor time of one thread, in
microseconds a token. Over HTTP the tokens that come while a client's delta is being written leave as one delta; how
many deltas there were is printed too. `--steps 4` has every four steps come at once, as they do for a process that is
so far behind. `--busy` has a thread of Python beside it, as long prompts make one; then the loop's turns, in wall time,
are what to look at. `--spread` draws tokens from the whole vocabulary, as models of random weights do.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import random
import socket
import sys
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

import uvicorn

from realizar.backends.base import Capacity
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.frontend.open_table import OpenTable
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.messages import Accepted, Add, Command, EngineInfo, Event, Outputs, Ready
from realizar.ipc.frames import FrameReader, encode_frame
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.http.listen import uvicorn_config
from realizar.server.run import SWITCH_INTERVAL_S
from realizar.server.served_model import ServedModel, make_served_model
from realizar.server.settings import ServerSettings
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas, StepLogprobs
from realizar.tokenizer.stop_checker import StopChecker

_SPREAD, _APART = 1 << 20, 1009  # tokens drawn, and how far apart two streams begin
_TEXT = "Once upon a time in a land far away there lived a small dragon who read every book that it could find. "


@dataclass(frozen=True, slots=True)
class Load:
    """A number of streams, and of tokens in each; `steps` come at once, and each token lists `logprobs` others.

    Attributes:
        busy: a thread of Python runs beside the event loop.
        spread: tokens are drawn from the whole vocabulary, each as often, in place of those of a text.
    """

    streams: int
    tokens: int
    steps: int
    logprobs: int | None
    busy: bool
    spread: bool


class MadeUpLink:
    """Gives every open request a token a step, through the codec, as fast as they are taken."""

    def __init__(self, served: ServedModel, load: Load) -> None:
        self._vocab_size = served.tokenizer.vocab_size
        drawn = random.Random(0).choices(range(self._vocab_size), k=_SPREAD)
        self._ids = drawn if load.spread else served.tokenizer.encode(_TEXT)
        self._firsts = itertools.count(step=_APART) if load.spread else itertools.repeat(0)  # of each stream, in `_ids`
        self._steps, self._logprobs = load.steps, load.logprobs
        self._listener: LinkListener | None = None
        self._open: dict[str, list[int]] = {}
        self._numbers = itertools.count()
        self._reader: FrameReader[Event] = FrameReader(Event)
        self.write_s = self.read_s = 0.0
        self.num_tokens = 0
        self.turns_s: list[float] = []

    async def start(self, listener: LinkListener) -> None:
        self._listener = listener
        capacity = Capacity(32, (1 << 20,), 1, 1, 1, "none", 0.0)
        listener.handle(Ready(EngineInfo("made up", self._vocab_size, 1, 4096, 4096, 1024, capacity, 0, 4096, 1, 16)))
        self._task = asyncio.create_task(self._run())

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            request = command.request
            self._open[request.request_id] = [next(self._numbers), 0, request.max_tokens, next(self._firsts)]
            if self._listener is not None:
                asyncio.get_running_loop().call_soon(self._listener.handle, Accepted(request.request_id))

    async def close(self, *, at_once: bool = False) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            idle = not self._open
            self.turns_s.append(time.monotonic())
            started_s = time.thread_time()
            frames = [self.step() for _ in range(self._steps) if self._open]
            self.write_s += time.thread_time() - started_s
            started_s = time.thread_time()
            events = self._reader.feed(b"".join(frames))
            self.read_s += time.thread_time() - started_s
            for event in events:
                if self._listener is not None:
                    self._listener.handle(event)
            await asyncio.sleep(0.005 if idle else 0)
            await asyncio.sleep(0)  # readers are a turn of the loop behind

    def step(self) -> bytearray:
        now = time.monotonic()
        numbers, token_ids = array("q"), array("i")
        starts: list[ChoiceStart] = []
        ends: list[ChoiceEnd] = []
        listed: list[LogprobColumns] = []
        for name, state in list(self._open.items()):
            number, place, most, first = state
            if place == 0:
                starts.append(ChoiceStart(number, name, 0, now))
            state[1] = place + 1
            numbers.append(number)
            token_ids.append(self._ids[(first + place) % len(self._ids)])
            if self._logprobs is not None:
                listed.append(self._entry(first + place))
            if place + 1 == most:
                ends.append(ChoiceEnd(number, "length"))
                del self._open[name]
        self.num_tokens += len(numbers)
        logprobs = [StepLogprobs(numbers.tobytes(), LogprobColumns.joined(listed))] if listed else []
        deltas = StepDeltas(
            now, numbers.tobytes(), token_ids.tobytes(), tuple(starts), logprobs=tuple(logprobs), ends=tuple(ends)
        )
        return encode_frame(Outputs(deltas))

    @functools.cache  # noqa: B019 - lives as long as the script
    def _entry(self, place: int) -> LogprobColumns:
        """The log-probabilities of a token: those of the text's tokens from there on."""
        ids = [self._ids[(place + shift) % len(self._ids)] for shift in range(self._logprobs or 0)]
        top = tuple((token_id, -0.1234567 * shift - place % 64 / 3) for shift, token_id in enumerate(ids))
        return LogprobColumns.of([TokenLogprobs(self._ids[place % len(self._ids)], -(place % 64) / 3, 1, top)])


def make_engine(served: ServedModel, load: Load) -> tuple[AsyncEngine, MadeUpLink]:
    link = MadeUpLink(served, load)
    return AsyncEngine(link, lambda sampling: StopChecker(served.tokenizer, sampling), ()), link


async def time_text(served: ServedModel, load: Load) -> None:
    """Streams read by tasks of the same loop."""
    engine, link = make_engine(served, load)
    await engine.start()

    async def read() -> None:
        sampling = SamplingParams(max_tokens=load.tokens, logprobs=load.logprobs)
        async with await engine.generate([1, 2], sampling) as stream:
            async for _ in stream:
                pass

    started_s = time.thread_time()
    await asyncio.gather(*(read() for _ in range(load.streams)))
    spent_s = time.thread_time() - started_s - link.write_s
    await engine.close()
    print(f"{link.num_tokens} tokens: write {1e6 * link.write_s / link.num_tokens:.2f}, ", end="")
    print(f"read {1e6 * link.read_s / link.num_tokens:.2f}, all up to the text {1e6 * spent_s / link.num_tokens:.1f}")


def time_hub(served: ServedModel, load: Load) -> None:
    """The main process's share with several API processes: reading a step, taking it apart for two, and writing."""
    link = MadeUpLink(served, load)
    for number in range(load.streams):
        link.send(Add(Request(f"{number}", (1, 2), SamplingParams(), load.tokens)))
    frames = [link.step() for _ in range(load.tokens)]
    table: OpenTable[int] = OpenTable()
    table.update({f"{number}": number % 2 for number in range(load.streams)})
    reader: FrameReader[Event] = FrameReader(Event)
    started_s = time.thread_time()
    for frame in frames:
        for event in reader.feed(frame):
            if isinstance(event, Outputs):
                for _, share in table.split(event.deltas, int):
                    encode_frame(Outputs(share))
    spent_s = time.thread_time() - started_s
    print(f"the main process of several: {1e6 * spent_s / link.num_tokens:.2f}")


def time_http(served: ServedModel, load: Load, *, chat: bool) -> None:
    """A server on a thread of its own and on the event loop that `serve` uses, clients on this one."""
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    spent: list[float] = []
    engine, link = make_engine(served, load)
    settings = ServerSettings(log_requests=False)
    config = uvicorn_config(create_app(engine, served, settings), settings)
    server = uvicorn.Server(config)

    async def serve() -> None:
        await engine.start()
        started.set()
        started_s = time.thread_time()
        await server.serve(sockets=[listener])
        spent.append(time.thread_time() - started_s - link.write_s)
        await engine.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    finished = threading.Event()
    if load.busy:
        threading.Thread(target=_work, args=(finished,)).start()
    path, body = _chat(served.name, load) if chat else _completion(served.name, load)
    deltas = asyncio.run(_request_all(listener.getsockname()[1], path, body, load.streams))
    finished.set()
    server.should_exit = True
    thread.join()
    each_us = 1e6 * spent[0] / link.num_tokens
    print(f"{link.num_tokens} tokens over HTTP by {path} in {deltas} deltas: {each_us:.1f}")
    turns_ms = sorted(1e3 * (after - before) for before, after in itertools.pairwise(link.turns_s))
    median, long = (turns_ms[int(len(turns_ms) * share)] for share in (0.5, 0.9))
    print(f"  turns of the loop: median {median:.1f} ms, one of ten above {long:.1f} ms")


def _work(finished: threading.Event) -> None:
    """Keep the interpreter busy, as long prompts do on the server's worker threads."""
    while not finished.is_set():
        sum(number for number in range(2000))


def _completion(model: str, load: Load) -> tuple[str, bytes]:
    body = {"model": model, "prompt": [1, 2], "max_tokens": load.tokens, "stream": True, "logprobs": load.logprobs}
    return "/v1/completions", json.dumps(body).encode()


def _chat(model: str, load: Load) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": "Tell me of a dragon."}]
    body: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": load.tokens, "stream": True}
    if load.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": load.logprobs}
    return "/v1/chat/completions", json.dumps(body).encode()


async def _request_all(port: int, path: str, body: bytes, streams: int) -> int:
    """Run `streams` streams at once, and count their deltas."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\n\r\n".encode() + body)
        deltas, tail = 0, b""
        while b"[DONE]" not in tail and (data := await reader.read(1 << 16)):
            deltas += data.count(b"data: {")
            tail = tail[-16:] + data
        writer.close()
        return deltas

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1, help="steps that come at once")
    parser.add_argument("--logprobs", type=int, help="most probable tokens to list for each token")
    parser.add_argument("--spread", action="store_true", help="draw tokens from the whole vocabulary")
    parser.add_argument("--busy", action="store_true", help="a thread of Python runs beside the event loop")
    parser.add_argument(
        "--switch-interval", type=float, default=SWITCH_INTERVAL_S, help="the interpreter's, in seconds"
    )
    arguments = parser.parse_args()
    served = make_served_model(find_checkpoint(arguments.model), ("model",), 4096)
    sys.setswitchinterval(arguments.switch_interval)
    load = Load(
        arguments.streams, arguments.tokens, arguments.steps, arguments.logprobs, arguments.busy, arguments.spread
    )
    asyncio.run(time_text(served, load))
    time_hub(served, load)
    for chat in (False, True):
        time_http(served, load, chat=chat)


if __name__ == "__main__":
    main()
