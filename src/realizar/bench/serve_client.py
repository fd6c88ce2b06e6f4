"""One streamed request of OpenAI's API, timed as its bytes arrive.

httptools, which comes with uvicorn, takes HTTP apart in C, and msgspec the JSON: at 64 streams the load generator must
not take the cores that the server needs.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from realizar.errors import InvalidRequestError


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load.

    Attributes:
        name: in the report.
        url: with or without `/v1`.
        model: that requests name.
        api_key: or None.
        chat: true sends chats, false completions.
        extra: further fields of every request.
    """

    name: str
    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """The JSON of a request."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": self.model, **asked, "max_tokens": max_tokens, **stream, **self.extra}).encode()


@dataclass(frozen=True, slots=True)
class Answered:
    """A request's times, in seconds of `time.perf_counter`.

    Attributes:
        due_s: when it should have been sent. sent_s: when it was.
        deltas_s: times at which each delta of text arrived. ended_s: time at which the answer was complete, or failed.
        prompt_tokens, output_tokens: the server's counts; without them, deltas are counted as tokens.
        error: the reason of a failure, or None.
    """

    due_s: float
    sent_s: float
    deltas_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from the time when the request was due to its first text, with any wait before the server."""
        return self.deltas_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.deltas_s[-1] - self.deltas_s[0]) / max(self.output_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one delta of text and the next."""
        return [later - earlier for earlier, later in zip(self.deltas_s, self.deltas_s[1:], strict=False)]


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._held = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deltas_s: list[float] = []
        self.usage: _Usage | None = None
        self.error: str | None = None
        self.whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"the server's answer is malformed: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection broke" if exc else None)

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a part of the body."""
        now = time.perf_counter()
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
            if any(choice.has_text for choice in chunk.choices):
                self.deltas_s.append(now)

    def on_message_complete(self) -> None:
        """Called by the parser, at the end of the answer."""
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
        if self.error is None and not self.deltas_s:
            self.error = "the answer holds no text"
        self.done.set_result(None)


async def send(target: Target, prompt: str, max_tokens: int, due_s: float, timeout_s: float) -> Answered:
    """Send a request and time its answer. A failure is recorded in `error`."""
    request, host, port, tls = _request(target, target.body(prompt, max_tokens))
    loop = asyncio.get_running_loop()
    exchange = _Exchange(request)
    sent_s = time.perf_counter()
    transport: asyncio.BaseTransport | None = None
    error: str | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(lambda: exchange, host, port, ssl=tls)
            await exchange.done
        error = exchange.error
    except TimeoutError:
        error = f"no whole answer within {timeout_s:g} s"
    except OSError as failure:
        error = f"{target.url}: {failure.strerror or failure}"
    finally:
        if transport is not None:
            transport.close()
    usage = exchange.usage or _Usage(0, len(exchange.deltas_s))
    deltas = tuple(exchange.deltas_s)
    return Answered(
        due_s, sent_s, deltas, time.perf_counter(), usage.prompt_tokens, usage.completion_tokens or len(deltas), error
    )


def _request(target: Target, body: bytes) -> tuple[bytes, str, int, ssl.SSLContext | None]:
    """The bytes of a request, and where to send them.

    Raises:
        InvalidRequestError: the address is none of HTTP.
    """
    try:
        parts = urlsplit(target.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise InvalidRequestError(f"{target.url} is not an address", "url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{target.url} is not an address such as http://127.0.0.1:8000", "url")
    path = parts.path.rstrip("/").removesuffix("/v1") + ("/v1/chat/completions" if target.chat else "/v1/completions")
    head = [
        f"POST {path} HTTP/1.1",
        f"host: {parts.netloc.rpartition('@')[2]}",
        "connection: close",
        "content-type: application/json",
        "accept: text/event-stream",
        f"content-length: {len(body)}",
    ]
    if target.api_key is not None:
        head.append(f"authorization: Bearer {target.api_key}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return "\r\n".join([*head, "", ""]).encode() + body, parts.hostname, port, tls
