"""Time that the load generator of bench-serve needs for a token, against a server that does nothing but send.

    python scripts/time_load_generator.py [--generators 1] [--streams 64] [--seconds 5]

The server sends a token to every stream, each in an event of its own, as fast as --rate says. Prints tokens/s and the
generator's processor time for each token: what a core of the generator can take in a second, and no server is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import time

from realizar.bench.serve.client import Server
from realizar.bench.serve.dialects import REALIZAR
from realizar.bench.serve.figures import output_rate
from realizar.bench.serve.load import Generators
from realizar.bench.serve.workload import Lengths, Workload

_TOKENS = 256
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(*events: object) -> bytes:
    data = b"".join(b"data: %b\n\n" % (e if isinstance(e, bytes) else json.dumps(e).encode()) for e in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


_CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
_EVENT = _chunk(
    {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1, "model": "m", "choices": [_CHOICE]}
)
_USAGE = {"prompt_tokens": 64, "completion_tokens": _TOKENS}
_END = _chunk({"choices": [], "usage": _USAGE}, b"[DONE]") + b"0\r\n\r\n"


class _Stream(asyncio.Protocol):
    """One answer; its request is not looked at."""

    def __init__(self, running: dict[_Stream, int]) -> None:
        self._running = running

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self not in self._running:
            self.write(_HEAD)
            self._running[self] = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._running.pop(self, None)

    def write(self, data: bytes) -> None:
        self.transport.write(data)  # type: ignore[attr-defined]


async def _send_for_ever(listener: socket.socket, rate_per_s: float) -> None:
    """A token to every stream, `rate_per_s` times a second or as often as the machine allows."""
    running: dict[_Stream, int] = {}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Stream(running), sock=listener)
    due_s = loop.time()
    while True:
        for stream, sent in list(running.items()):
            if sent < _TOKENS:
                stream.write(_EVENT)
                running[stream] = sent + 1
            else:
                stream.write(_END)
                stream.transport.close()
                running.pop(stream, None)
        due_s = max(due_s + 1 / rate_per_s, loop.time())
        await asyncio.sleep(due_s - loop.time())


def _serve(listener: socket.socket, rate_per_s: float) -> None:
    asyncio.run(_send_for_ever(listener, rate_per_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens of a stream per second")
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener, arguments.rate), daemon=True)
    server.start()
    work = Workload(
        weights={"greedy": 1.0}, seconds=arguments.seconds, concurrency=arguments.streams,
        prompt_length=Lengths(64, 64), output_tokens=Lengths(_TOKENS, _TOKENS),
    )  # fmt: skip
    with Generators(arguments.generators) as generators:
        time.sleep(1.0)  # until the server's process is up; connections wait for it
        run = generators.run(Server("sender", url, "m", dialect=REALIZAR), work, 60.0)
    server.terminate()
    rate = output_rate(run)
    cpu_s = 1e6 * sum(run.busy) / max(rate, 1e-9)
    print(f"{rate:,.0f} tokens/s; {cpu_s:.1f} us of the generator a token, {max(run.busy):.2f} of a core at the most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
