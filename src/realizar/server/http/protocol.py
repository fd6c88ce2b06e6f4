"""uvicorn's HTTP protocol with bounds on headers, bodies, pipelining, and the time that a peer takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

import httptools
import msgspec
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from realizar.server.errors import ApiError, later, plain_body
from realizar.server.http.clients import is_loopback, peer_of
from realizar.server.http.forwarded import TrustedProxies
from realizar.server.settings import ServerSettings

# `Connections` counts open connections by peer, and chooses an idle one to close when all places are taken.

_MAX_REFUSED = 32


class Connections:
    """The table of open connections.

    When all places are taken, a new connection replaces the one that has been idle longest, so that idle connections
    keep nobody out. A peer that is neither this machine nor a trusted proxy (`proxies`) may have half of the places.
    """

    def __init__(self, most: int, proxies: TrustedProxies) -> None:
        self._most, self._proxies = most, proxies
        self._peers: Counter[str] = Counter()
        self._open: dict[_BoundedProtocol, str] = {}
        self._idle: dict[_BoundedProtocol, None] = {}  # the longest idle first
        self._refused: set[_BoundedProtocol] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: _BoundedProtocol, address: str) -> bool:
        """Add a connection, which is idle at first; False if there is no place for it."""
        peer = peer_of(address)
        if self._peers[peer] >= max(1, self._most // 2) and not is_loopback(address) and not self._proxies.has(address):
            return False
        if len(self._open) >= self._most:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            longest.give_way()
        self._open[connection] = peer
        self._peers[peer] += 1
        self._idle[connection] = None
        return True

    def may_be_refused(self, connection: _BoundedProtocol) -> bool:
        """True if a connection without a place may stay until it has its error answer; only a few may."""
        if len(self._refused) >= _MAX_REFUSED:
            return False
        self._refused.add(connection)
        return True

    def leave(self, connection: _BoundedProtocol) -> None:
        """Unknown connections are ignored."""
        peer = self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._refused.discard(connection)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def busy(self, connection: _BoundedProtocol) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: _BoundedProtocol) -> None:
        if connection in self._open:
            self._idle.setdefault(connection)


_MAX_PIPELINED = 8
_MAX_WAITING = 1 << 16  # bytes of bodies of requests that wait for the answer before theirs
_MAX_DROPPED = 4  # bytes that are dropped after an answer, as a multiple of the largest body
_LINGER_S = 1.0  # closing a connection while its peer writes resets it, and the peer may lose the answer
_LAST_READ_S = 3.0  # for a peer to read its last answer, where it never confirms the end of TLS
_CHUNKS_SINCE = "1.1"  # the version of HTTP
_HEADER_COST = 4  # colon, space and end of line


def bounded_protocol(
    settings: ServerSettings, refused: Callable[[ApiError], None] = lambda _: None
) -> type[HttpToolsProtocol]:
    """Make a protocol class with the bounds of these settings and its own table of connections.

    `refused` is called for each connection or request that is refused here.
    """
    table = Connections(settings.max_connections, TrustedProxies(settings.trusted_proxies))
    own = {"settings": settings, "table": table, "refused": staticmethod(refused)}
    return type("BoundedProtocol", (_BoundedProtocol,), own)


class _BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Headers and trailers together are bounded in number and bytes, as is everything between two bytes of a body. Headers
    must arrive in time. After an early answer, the rest of the request is dropped up to a bound. Trailers are ignored.
    A peer that leaves is noticed while requests of it wait for the answer before theirs, and ends them all.
    A peer that reads nothing of its answer is disconnected. So is one that does not confirm the end of TLS when the
    server ends.
    """

    settings: ServerSettings
    table: Connections
    refused: Callable[[ApiError], None]
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _fault: ApiError | None = None
    _discarding = _shuts_down = False
    _in_message = _in_headers = _progress = False
    _unread = _header_bytes = _num_headers = _dropped = 0
    _owed = 0  # requests begun whose answer is not complete
    _written = 0  # bytes given to the transport
    _open: tuple[RequestResponseCycle, ...] = ()  # requests whose answer is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = cast("httptools.HttpRequestParser", RequestParser(self))
        if self.table.enter(self, self.client[0] if self.client else ""):
            self._start_timer(self.settings.header_timeout_s, self._headers_too_slow)
            return
        limit = f"limit {self.settings.max_connections}, --max-connections"
        fault = later(503, f"the server has too many open connections ({limit})", "too_many_connections", 1.0)
        if self.table.may_be_refused(self):
            self._refuse(fault)
        else:
            self.refused(fault)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.leave(self)
        self._stop_timer()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        self._end_requests()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close the connection, which has no open request."""
        self._close()

    def shutdown(self) -> None:
        """Close when the open answers are complete. uvicorn calls this when the server ends."""
        self._shuts_down = True
        if not self.transport.is_closing():
            super().shutdown()
        self._end_tls()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._drop(len(data))
            return
        self._progress = False
        super().data_received(data)
        if self._is_over():
            return
        self._unread = 0 if self._progress else self._unread + len(data)
        if self._unread > self.settings.max_header_bytes:
            self._refuse(self._too_large())
        elif not self._in_message and self._owed == 0 and self._timer is None:
            self._start_timer(self.settings.header_timeout_s, self._headers_too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_headers = True
        self._header_bytes = self._num_headers = 0
        self._owed += 1
        if self._timer is None:
            self._start_timer(self.settings.header_timeout_s, self._headers_too_slow)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value) + _HEADER_COST)
        if self._num_headers > self.settings.max_headers:
            message = f"the request has more than {self.settings.max_headers} headers"
            self._fail(ApiError(431, message, code="headers_too_large"))
        if self._in_headers:
            super().on_header(name, value)  # otherwise a trailer, which must not look like a checked header

    def on_headers_complete(self) -> None:
        self._progress = True
        self._stop_timer()
        if self._owed > _MAX_PIPELINED:
            message = f"the connection has more than {_MAX_PIPELINED} unanswered requests"
            self._fail(ApiError(400, message, code="pipelined"))
        hosts = sum(name == b"host" for name, _ in self.headers)
        is_old = self.parser.get_http_version() < _CHUNKS_SINCE
        if hosts > 1 or (hosts == 0 and not is_old):
            self._fail(ApiError(400, f"a request needs one Host header, not {hosts}", code="invalid_host"))
        self.table.busy(self)
        self.expect_100_continue = self.expect_100_continue and not is_old
        super().on_headers_complete()  # raises if the target is not a valid address: the request has no cycle then
        if is_old:
            self.cycle.send = _UnframedAnswer(self.cycle).send  # type: ignore[method-assign]
        self._in_headers = False
        self._open = (*(cycle for cycle in self._open if not cycle.response_complete), self.cycle)
        self._read_on()
        self.cycle.transport = cast(
            "asyncio.Transport", _AnswerTransport(self.transport, self._write, self._close_gently)
        )

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)
        self._read_on()

    def on_message_complete(self) -> None:
        self._in_message, self._progress = False, True
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._owed -= 1
        if self._owed == 0 and not self._in_message:
            self.table.idle(self)
        super().on_response_complete()
        self._watch_writing()
        if self._in_message and not self._in_headers and not self._is_over():
            self._dropped = 0
            self._start_timer(self.settings.body_timeout_s, self._close)

    def send_400_response(self, msg: str) -> None:
        """Answer when the parser stops, at invalid bytes or at one of the bounds. uvicorn calls this."""
        self._refuse(self._fault or ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.settings.max_header_bytes:
            self._fail(self._too_large())

    def _fail(self, fault: ApiError) -> None:
        """Stop the parser; uvicorn then calls `send_400_response`."""
        self._fault = fault
        raise ValueError(fault.message)

    def _refuse(self, fault: ApiError) -> None:
        """Answer with an error if an answer is due, and close; further bytes of the peer are dropped."""
        if self._is_over():
            return
        self.refused(fault)
        answerable = self._may_answer()
        self._end_requests()
        if not answerable:
            self._discarding = True
            self._close()
            return
        self._write(_error_bytes(fault))
        self._linger(_LINGER_S)

    def _end_requests(self) -> None:
        """Tell all open requests that their client is gone, those that wait for their turn too."""
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open = ()
        self.pipeline.clear()

    def _read_on(self) -> None:
        """Read on while requests wait for the answer before theirs: a peer that leaves is not noticed otherwise."""
        if not self.pipeline:
            return
        if sum(len(cycle.body) for cycle, _ in self.pipeline) > _MAX_WAITING:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _close_gently(self) -> None:
        """Close after an answer, once the peer has finished writing or its time is over."""
        if self._in_message and not self._is_over():
            self._linger(self.settings.body_timeout_s)
        elif not self._discarding:
            self._close()
            self._end_tls()

    def _close(self) -> None:
        """Close the transport once: one of TLS that is closed again, or after its peer, can't be used or ended."""
        if not self.transport.is_closing():
            self.transport.close()

    def _end_tls(self) -> None:
        """Bound the wait for the peer of a connection that is closing as the server ends."""
        if self._shuts_down and self.scheme == "https" and self.transport.is_closing():
            self._start_timer(_LAST_READ_S, self._abort_if_sent)

    def _abort_if_sent(self) -> None:
        if self.transport.get_write_buffer_size():
            self._start_timer(_LAST_READ_S, self._abort_if_sent)
        else:
            self.transport.abort()

    def _linger(self, seconds: float) -> None:
        """Write nothing more, and drop received bytes until the peer closes or the time is over."""
        self._discarding, self._dropped = True, 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self._start_timer(seconds, self._close)
        self._watch_writing()

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > _MAX_DROPPED * self.settings.max_body_bytes:
            self._discarding = True
            self._close()

    def _may_answer(self) -> bool:
        """True if the peer would take an answer that is written now for the answer of the faulty request."""
        if not self._in_message:
            return self._owed == 0
        return self._owed == 1 and (self._in_headers or not self.cycle.response_started)

    def _is_over(self) -> bool:
        return self._discarding or self.transport.is_closing()

    def _too_large(self) -> ApiError:
        message = f"the headers are over their limit of {self.settings.max_header_bytes} bytes"
        return ApiError(431, message, code="headers_too_large")

    def _headers_too_slow(self) -> None:
        self._timer = None
        seconds = self.settings.header_timeout_s
        self._refuse(ApiError(408, f"the headers did not arrive within {seconds:g} s", code="request_timeout"))

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self.transport.write(data)

    def _watch_writing(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting and self._stall_timer is None:
            seconds = self.settings.write_timeout_s
            self._stall_timer = self.loop.call_later(seconds, self._check_writing, self._written - waiting)

    def _check_writing(self, taken_before: int) -> None:
        """Disconnect a peer that read nothing. The buffer's size alone does not show this, as a stream refills it."""
        self._stall_timer = None
        if self._written - self.transport.get_write_buffer_size() == taken_before:
            self.transport.abort()
        else:
            self._watch_writing()


class _AnswerTransport:
    """The transport that uvicorn writes an answer to. `close` lets the peer read the answer first."""

    def __init__(self, transport: asyncio.Transport, write: Callable[[bytes], None], close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = write, transport.is_closing, close


class _UnframedAnswer:
    """An answer to a peer that knows no chunks: where its length is not known, the connection's end is its end.

    uvicorn closes the connection of such a peer after each answer.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_unframed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_unframed = b"content-length" not in names
            if self._is_unframed:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._is_unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _error_bytes(fault: ApiError) -> bytes:
    body = msgspec.json.encode(plain_body(fault))
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **fault.headers}.items())
    return STATUS_LINE[fault.status] + lines.encode("latin-1") + b"\r\n" + body


# httptools' parser of requests, for a server that speaks HTTP/1.1 alone.

_FRAMING = (b"content-length", b"transfer-encoding")


class RequestParser:
    """Parses requests, and takes `Upgrade` for a header like any other: a server may pass over it.

    httptools takes what follows such headers for another protocol: a request would lose its body, which behind a proxy
    would be read as a request of its own. Java's client asks for HTTP/2 with its first requests.
    """

    def __init__(self, events: HttpToolsProtocol) -> None:
        self._events = events
        self._goes_on = False
        self._parser = self._made()

    def get_http_version(self) -> str:
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        """It raises httptools.HttpParserError if the bytes are not valid."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._go_on()
            else:
                return

    def on_message_begin(self) -> None:
        if not self._goes_on:
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._goes_on:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise ValueError(f"no body is read in the transfer coding {value!r}")  # httptools raises its own of it
        if not self._goes_on:
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._goes_on:
            self._events.on_headers_complete()
        self._goes_on = False

    def on_body(self, body: bytes) -> None:
        self._events.on_body(body)

    def on_message_complete(self) -> None:
        if not (self._parser.should_upgrade() and self._framing()):  # otherwise its body comes yet
            self._events.on_message_complete()

    def _go_on(self) -> None:
        """Go on behind the headers of a request with `Upgrade`, with a parser that has read those of its body."""
        framing = self._framing()
        self._parser = self._made()
        if framing:
            self._goes_on = True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")

    def _framing(self) -> bytes:
        """The headers that say where the body of the present request ends; empty if it has none."""
        return b"".join(b"%s: %s\r\n" % header for header in self._events.headers if header[0] in _FRAMING)

    def _made(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # the protocol drops what comes then
        return parser
