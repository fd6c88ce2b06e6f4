"""One streamed request of OpenAI's API, timed as its bytes arrive.

httptools and msgspec parse in C: at 64 streams the load generator must not take the cores that the server needs.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
import urllib.request
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
from numpy.typing import NDArray

from realizar.bench.serve.dialects import OPENAI, Dialect
from realizar.bench.serve.workload import PlannedRequest
from realizar.errors import InvalidRequestError


class _ToolCall(msgspec.Struct):
    index: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None

    @property
    def has_text(self) -> bool:
        """True for a text, a reasoning (`reasoning` at vLLM) or a part of a tool request."""
        if self.text or (delta := self.delta) is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Server:
    """A server to load: its `name` in the report, its `url`, with or without `/v1`, and the `model` that requests name.

    `context_tokens` may a request hold; None where it is not known.
    """

    name: str
    url: str
    model: str
    api_key: str | None = None
    dialect: Dialect = OPENAI
    context_tokens: int | None = None

    def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        """The body of a page, such as `/metrics`. OSError: no answer, or no status 200. ValueError: a bad address."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        address = f"{self.url.rstrip('/').removesuffix('/v1')}{path}"
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout_s) as answer:
            return bytes(answer.read())


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A request's times, in seconds of `time.perf_counter`.

    Attributes:
        request: without its body.
        due_s: when it should have been sent. sent_s: when it was.
        deltas_s: float64, the times at which each delta of text arrived. ended_s: when the answer was complete, failed,
            or its client left.
        prompt_tokens, output_tokens: the server's counts; without them 0, and the deltas.
        choices: the index of each delta's choice, as bytes; empty where every delta is of the first.
        left: the client left before the end, as it was asked to.
        was_cut: it was under way when the load's time was over, and its client left for that alone.
    """

    request: PlannedRequest
    due_s: float
    sent_s: float
    deltas_s: NDArray[np.float64]
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None
    choices: bytes = b""
    left: bool = False
    was_cut: bool = False

    @property
    def is_whole(self) -> bool:
        return self.error is None and not self.left and not self.was_cut

    @property
    def ttft_s(self) -> float:
        """Seconds from the time when the request was due to its first text, with any wait before the server."""
        return float(self.deltas_s[0]) - self.due_s

    @property
    def e2el_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 without any."""
        return float(self.deltas_s[-1] - self.deltas_s[0]) / max(self.output_tokens - 1, 1)

    @property
    def gaps_s(self) -> NDArray[np.float64]:
        """Seconds between one delta of text and the next of the same choice; choices follow each other."""
        if not self.choices:
            return np.diff(self.deltas_s)
        choices = np.frombuffer(self.choices, np.uint8)
        return np.concatenate([np.diff(self.deltas_s[choices == index]) for index in np.unique(choices)])


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, head_and_body: bytes, request: PlannedRequest) -> None:
        self._sent, self._request = head_and_body, request
        self._parser = httptools.HttpResponseParser(self)
        self._held = b""
        self._now_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deltas_s: list[float] = []
        self.choices = bytearray()
        self.usage: _Usage | None = None
        self.error: str | None = None
        self.whole = self.left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._sent)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()  # what comes in one read came at one time
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"the server's answer is malformed: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection broke" if exc else None)

    def on_body(self, body: bytes) -> None:
        self._held += body
        if self._parser.get_status_code() != 200:
            return
        *lines, self._held = self._held.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.whole = True
                continue
            chunk = _decode(data)
            if bytes(chunk.error):
                self.error = bytes(chunk.error).decode(errors="replace")[:300]
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                if choice.has_text:
                    self.deltas_s.append(self._now_s)
                    self.choices.append(choice.index & 0xFF)
        if self._request.leave_after_deltas is not None and len(self.deltas_s) >= self._request.leave_after_deltas:
            self.leave()

    def leave(self) -> None:
        if not self.done.done():
            self.left = True
            self.done.set_result(None)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.error = f"status {status}: {' '.join(self._held.decode(errors='replace').split())[:300]}"
        self._end(None)

    def _end(self, error: str | None) -> None:
        if self.done.done():
            return
        self.error = self.error or error
        if self.error is None and not self.whole:
            self.error = "the answer broke off"
        if self.error is None and not (self.deltas_s or self._request.may_be_empty):
            self.error = "the answer holds no text"
        self.done.set_result(None)


async def send(server: Server, request: PlannedRequest, due_s: float, timeout_s: float) -> Answer:
    """Send a request and time its answer, until the client leaves. A failure is recorded in `error`."""
    head_and_body, host, port, tls = _http(server, request)
    loop = asyncio.get_running_loop()
    exchange = _Exchange(head_and_body, request)
    sent_s = time.perf_counter()
    transport: asyncio.BaseTransport | None = None
    error: str | None = None
    patience_s = math.inf if request.leave_after_s is None else request.leave_after_s
    try:
        async with asyncio.timeout(min(timeout_s, patience_s)):
            transport, _ = await loop.create_connection(lambda: exchange, host, port, ssl=tls)
            await exchange.done
        error = exchange.error
    except TimeoutError:
        if patience_s < timeout_s:
            exchange.left = True
        else:
            error = f"no whole answer within {timeout_s:g} s"
    except OSError as failure:
        error = f"{server.url}: {failure.strerror or failure}"
    finally:
        if transport is not None:
            transport.close()
    usage = exchange.usage or _Usage()
    return Answer(
        request=replace(request, body=b""),
        due_s=due_s,
        sent_s=sent_s,
        deltas_s=np.array(exchange.deltas_s, np.float64),
        ended_s=time.perf_counter(),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or len(exchange.deltas_s),
        error=error,
        choices=bytes(exchange.choices) if any(exchange.choices) else b"",
        left=exchange.left,
    )


def _http(server: Server, request: PlannedRequest) -> tuple[bytes, str, int, ssl.SSLContext | None]:
    """The bytes of a request, and where to send them. It raises InvalidRequestError if the address is none of HTTP."""
    try:
        parts = urlsplit(server.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise InvalidRequestError(f"{server.url} is not an address", "url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{server.url} is not an address such as http://127.0.0.1:8000", "url")
    path = parts.path.rstrip("/").removesuffix("/v1") + ("/v1/chat/completions" if request.chat else "/v1/completions")
    head = [
        f"POST {path} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "connection: close",
        "content-type: application/json",
        "accept: text/event-stream",
        f"content-length: {len(request.body)}",
    ]
    if server.api_key is not None:
        head.append(f"authorization: Bearer {server.api_key}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return "\r\n".join([*head, "", ""]).encode() + request.body, parts.hostname, port, tls
