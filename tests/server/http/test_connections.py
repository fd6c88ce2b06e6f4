"""Bounds on a peer without a key: its connections, headers, trailers, and requests whose answers it does not read."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import uvicorn

from realizar.request import Client
from realizar.server.app import create_app
from realizar.server.http.clients import Clients, peer_of
from realizar.server.http.forwarded import TrustedProxies
from realizar.server.http.listen import uvicorn_config
from realizar.server.http.protocol import Connections, _AnswerTransport, bounded_protocol
from server.http.http_door import SETTINGS, Door, at_the_door
from server.scripted_engine import ScriptedEngine, scripted_model

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


async def send_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, part: bytes) -> tuple[int, bytes]:
    """Bytes that could be sent, a part after the other, until the server wants no more; and its answer."""
    sent = 0
    answer = asyncio.ensure_future(reader.read())
    with suppress(OSError):
        while not answer.done() and sent < 256 << 20:
            writer.write(part)
            sent += len(part)
            await writer.drain()
            await asyncio.sleep(0)
    writer.close()
    try:
        return sent, await answer
    except OSError:
        return sent, b""


@pytest.mark.parametrize("keys", [(), ("key",)], ids=["open", "without the key"])
@pytest.mark.parametrize(
    "part",
    [b"x: y\r\n" * 4096, b"x" * 32768, b"1;" + b"e" * 100_000],
    ids=["many trailers", "one trailer", "a chunk's extension"],
)
def test_what_follows_a_body_has_an_end(part: bytes, keys: tuple[str, ...]) -> None:
    """Chunked bodies end with trailers, which count as headers: before and after the answer."""

    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(CHUNKED + (b"" if part.startswith(b"1;") else b"0\r\n"))
        if keys:
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        sent, answer = await send_for_ever(reader, writer, part)
        assert sent < 8 << 20
        assert keys or answer == b"" or answer.startswith(b"HTTP/1.1 431")

    at_the_door(main, replace(SETTINGS, api_keys=keys))


def test_a_body_without_end_after_the_answer() -> None:
    """A 401 goes out at once, and what comes then is dropped up to a bound."""

    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(CHUNKED)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        sent, _ = await send_for_ever(reader, writer, b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        assert sent < 16 << 20

    at_the_door(main, replace(SETTINGS, api_keys=("key",), max_body_bytes=1 << 20))


def test_a_client_that_writes_its_body_first_reads_its_401() -> None:
    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(POST + b"content-length: 12000000\r\n\r\n" + b"x" * 12_000_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        while (await reader.readline()).strip():
            pass
        error = await reader.readuntil(b"}}")
        assert b"invalid_api_key" in error
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer key\r\nconnection: close\r\n\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")  # the connection goes on

    at_the_door(main, replace(SETTINGS, api_keys=("key",)))


def test_trailers_are_no_headers() -> None:
    """A key, or a second Host, in a trailer was in no header that was checked."""

    async def main(door: Door) -> None:
        trailers = b"0\r\nauthorization: Bearer key\r\nhost: other\r\n\r\n"
        reader, writer = await door.connect()
        writer.write(CHUNKED + trailers)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()

    at_the_door(main, replace(SETTINGS, api_keys=("key",)))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (GET.replace(b"\r\n\r\n", b"\r\nhost: localhost\r\n\r\n"), b"400"),
        (GET.replace(b"host: localhost\r\n", b""), b"400"),
        (GET.replace(b"host", b"Host"), b"200"),
        (GET.replace(b"1.1", b"1.0").replace(b"host: localhost\r\n", b""), b"200"),
        (GET.replace(b"\r\n\r\n", b"\r\n" + b"x: y\r\n" * 127 + b"\r\n"), b"200"),
        (GET.replace(b"\r\n\r\n", b"\r\n" + b"x: y\r\n" * 128 + b"\r\n"), b"431"),
        (GET.replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 66_000 + b"\r\n\r\n"), b"431"),
    ],
    ids=["two hosts", "no host", "one host", "1.0 without", "128 headers", "129 headers", "a large one"],
)
def test_headers(request_: bytes, status: bytes) -> None:
    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(request_)
        assert (await reader.readline()) == b"HTTP/1.1 " + status + (phrase_of(status)) + b"\r\n"
        writer.close()

    at_the_door(main)


def phrase_of(status: bytes) -> bytes:
    return {b"200": b" OK", b"400": b" Bad Request", b"431": b" Request Header Fields Too Large"}[status]


@pytest.mark.parametrize(
    "line",
    [b"CONNECT example.com:443", b"GET http://[", b"GET http://localhost", b"GET /caf\xc3\xa9"],
    ids=["connect", "no address", "no path", "not ascii"],
)
def test_a_target_that_is_none(line: bytes) -> None:
    """It is refused as the first request of a connection, and as a later one."""
    bad = line + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(GET)
        await reader.readuntil(b"]}")
        writer.write(bad)
        for answer in (await door.exchange(bad), await reader.read()):
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n"), answer
            assert b'"code":"invalid_http"' in answer

    at_the_door(main)


def test_requests_ahead_of_their_answers() -> None:
    """A few are taken, in order; more end the connection before they take memory."""

    async def main(door: Door) -> None:
        few = await door.exchange(7 * GET + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert few.count(b"HTTP/1.1 200 OK") == 8
        with suppress(ConnectionResetError):
            many = await door.exchange(5000 * GET)
            assert many.count(b"HTTP/1.1 200 OK") <= 8

    at_the_door(main)


def test_blank_lines_keep_no_connection_open() -> None:
    """uvicorn's timer for idle connections stops at the first byte, and a line end begins no request."""

    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(GET)
        await reader.readuntil(b"]}")
        (connection,) = door.connections()
        assert connection._timer is None
        assert connection.timeout_keep_alive_task is not None
        writer.write(b"\r\n")
        while connection.timeout_keep_alive_task is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert connection._timer is not None
        connection._headers_too_slow()
        assert b"408" in await reader.readline()

    at_the_door(main)


def test_an_idle_connection_gives_way_and_a_busy_one_does_not() -> None:
    async def main(door: Door) -> None:
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
        head = POST.replace(b"completions", b"chat/completions") + b"content-length: %d\r\n\r\n" % len(body)
        busy_reader, busy_writer = await door.connect()
        busy_writer.write(head + body)
        assert b"200" in await busy_reader.readuntil(b"Hel")
        idle_reader, idle_writer = await door.connect()
        idle_writer.write(GET)
        await idle_reader.readuntil(b"]}")
        second_reader, second_writer = await door.connect()
        second_writer.write(head + body)
        assert await idle_reader.read() == b""  # gave way
        assert b"200" in await second_reader.readuntil(b"Hel")
        refused = await door.exchange(b"")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in refused
        assert b"retry-after: 1" in refused
        busy_writer.close()
        await busy_reader.read()
        while b"200" not in await door.exchange(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")):
            pass
        for writer in (idle_writer, second_writer):
            writer.close()

    at_the_door(main, replace(SETTINGS, max_connections=2), deltas=("Hel", None))


def test_a_peer_that_reads_nothing_is_cut_off() -> None:
    async def main(door: Door) -> None:
        reader, writer = await door.connect()
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.transport.set_write_buffer_limits(0)
        request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with pytest.raises(OSError):  # noqa: PT012 - reset, sooner or later
            while True:
                writer.write(request)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.close()
        assert reader is not None

    at_the_door(main, replace(SETTINGS, write_timeout_s=0.2))


class SlowTransport(asyncio.Transport):
    """A connection to a peer that takes what the test has it take."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.aborted = self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


class HandLoop:
    """A loop whose timers go off by hand."""

    def __init__(self) -> None:
        self.timers: list[tuple[asyncio.TimerHandle, Any, tuple[Any, ...]]] = []

    def call_later(self, _: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        timer = create_autospec(asyncio.TimerHandle, instance=True)
        self.timers.append((timer, callback, args))
        return timer

    def fire_stall(self) -> None:
        """Have the one timer go off that watches the writing."""
        ((timer, callback, args),) = [each for each in self.timers if each[1].__name__ == "_check_writing"]
        self.timers = [each for each in self.timers if each[0] is not timer]
        callback(*args)


def test_a_peer_that_takes_a_part_of_a_faster_stream_lives() -> None:
    """The buffer is as full at every check, as the stream refills it; what counts is what the peer took."""
    loop, transport = HandLoop(), SlowTransport()
    config = uvicorn_config(create_app(cast("Any", ScriptedEngine()), scripted_model(), SETTINGS), SETTINGS)
    config.load()
    protocol: Any = bounded_protocol(SETTINGS)(config, uvicorn.server.ServerState(), {}, cast("Any", loop))
    protocol.connection_made(transport)
    answer = _AnswerTransport(transport, protocol._write, protocol._close_gently)
    answer.write(b"x" * 70_000)
    protocol.pause_writing()
    for _ in range(3):
        transport.waiting -= 5_000
        answer.write(b"x" * 5_000)
        loop.fire_stall()
        assert not transport.aborted
    transport.waiting -= 5_000
    answer.write(b"x" * 9_000)  # more waits than before
    loop.fire_stall()
    assert not transport.aborted
    loop.fire_stall()
    assert transport.aborted


class Idle:
    def __init__(self) -> None:
        self.closed = False

    def give_way(self) -> None:
        self.closed = True


def test_shares_of_connections() -> None:
    """Half for one peer; this machine may have all, and so may a trusted proxy."""
    table = Connections(4, TrustedProxies(("10.0.0.0/8",)))
    far = [Idle() for _ in range(3)]
    assert [table.enter(each, "192.0.2.1") for each in far] == [True, True, False]
    assert not table.enter(Idle(), "::ffff:192.0.2.1")
    near = [Idle() for _ in range(3)]
    assert all(table.enter(each, "127.0.0.1") for each in near)
    assert [each.closed for each in (*far, *near)] == [True, False, False, False, False, False]
    for each in (*far, *near):
        table.busy(each)
    refused = [Idle() for _ in range(40)]
    assert not any(table.enter(each, "127.0.0.1") for each in refused)
    assert sum(table.may_be_refused(each) for each in refused) == 32
    table.leave(refused[0])
    assert table.may_be_refused(refused[-1])
    table.idle(near[0])
    table.idle(far[0])  # left long ago
    assert table.enter(Idle(), "127.0.0.1")
    assert near[0].closed
    for each in (*far, *near):
        table.leave(each)
    assert len(table) == 1
    assert all(table.enter(Idle(), "10.1.2.3") for _ in range(4))


def test_clients_are_named_by_key_or_peer() -> None:
    assert peer_of("192.0.2.1") == peer_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:1") != peer_of("2001:db8:0:1::1")
    assert peer_of("nonsense") == "nonsense"
    scope = {"headers": [(b"authorization", b"Bearer secret")], "client": ("192.0.2.1", 5)}
    assert Clients().of(scope) == Client("peer:192.0.2.1")
    clients = Clients(("other", "secret"), (2, 3))
    named = clients.of(scope)
    assert (named.name.startswith("key:"), named.weight) == (True, 3)
    assert "secret" not in named.name
    other = (b"x-api-key", b"other")
    assert clients.of({**scope, "headers": [(b"x-api-key", b"secret")]}) == named
    assert clients.of({**scope, "headers": [other, *scope["headers"]]}) == named  # as `KeyRing` reads it
    assert clients.of({**scope, "headers": [other]}).weight == 2
    assert clients.of({"headers": [], "client": None}) == Client("peer:")


ASKING = b'{"model": "scripted", "prompt": "a", "stream": %s}'


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("then", ["leaves", "sends too many", "sends nonsense"])
def test_a_request_with_another_behind_it_ends_with_its_client(stream: bytes, then: str) -> None:
    async def main(door: Door) -> None:
        _, writer = await door.connect()
        body = ASKING % stream
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body + GET)
        engine = door.app.state.models.running()[0].engine
        while not engine.num_asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if then == "leaves":
            writer.close()
        else:
            writer.write(GET * 20 if then == "sends too many" else b"\x00")
        while not engine.num_closed:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert engine.num_asked == 1

    at_the_door(main, deltas=(None,))


def test_bodies_behind_a_request_have_a_bound() -> None:
    """They are read when their turn comes."""

    async def main(door: Door) -> None:
        _, writer = await door.connect()
        body = ASKING % b"true"
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        writer.write((POST + b"content-length: 50000\r\n\r\n" + b"x" * 50_000) * 2)
        writer.write(POST + b"content-length: 5000000\r\n\r\n" + b"x" * 5_000_000)
        while not (door.connections() and door.connections()[0].flow.read_paused):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (protocol,) = door.connections()
        assert 50_000 < sum(len(cycle.body) for cycle, _ in protocol.pipeline) < 1 << 20
        protocol.transport.abort()

    at_the_door(main, deltas=(None,))
