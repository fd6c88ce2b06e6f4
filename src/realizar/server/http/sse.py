"""Server-sent events: records as `data:` lines, with pings during pauses and an end in the form of the dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from realizar.server.errors import to_api_error
from realizar.server.http.dialects import dialect_of, error_response, note_error
from realizar.server.http.disconnects import wait_for_disconnect
from realizar.server.settings import ServerSettings

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_encoder = msgspec.json.Encoder()


def encode_event(record: Any) -> bytes:
    return b"data: " + _encoder.encode(record) + b"\n\n"


def named_event(name: str, **fields: Any) -> bytes:
    """An event with its name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode({"type": name, **fields}))


class EventTemplate:
    """Encodes events that differ in one text, and maybe in log-probabilities, without making a record for each.

    Args:
        record: one of the events, with an empty text in `field`. Its other values are those of all events.
        field: the name of the text's field. No other field of this name is an empty text.
        varying: the name of a field behind the text that is null in the record and given with each text; None without
            one. No other field of this name is null.
    """

    def __init__(self, record: Any, field: str, varying: str | None = None) -> None:
        before, empty, after = encode_event(record).partition(b'"%s":""' % field.encode())
        if not empty:
            raise ValueError(f"the record has no empty text {field}")
        self._before, self._between, self._after = before + empty[:-2], b"", after
        if varying is not None:
            between, null, self._after = after.partition(b'"%s":null' % varying.encode())
            if not null:
                raise ValueError(f"the record has no null {varying} behind {field}")
            self._between = between + null[:-4]

    def encode(self, text: str, value: bytes = b"") -> bytes:
        """The bytes that `encode_event` makes of the record with this text, and this JSON in the other field."""
        return b"".join((self._before, _encoder.encode(text), self._between, value, self._after))


class EventStream(Response):
    """Sends events as they arrive.

    An error before the first event becomes an ordinary error answer. A later error becomes the dialect's event of an
    error, and the stream ends without the dialect's end. `events` is closed when the client disconnects, or reads
    nothing for too long.

    Args:
        events: the events to send, one or more in each item; its `aclose` frees its resources.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(None, 200, HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._writing_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._lock, self._started, self._idle = send, asyncio.Lock(), False, True
        self._form = dialect_of(scope).stream
        self._settings: ServerSettings = scope["app"].state.settings
        self.headers["content-type"] = self._form.media_type
        sending = asyncio.ensure_future(self._send_all(scope, receive))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        pinging = asyncio.ensure_future(self._ping())
        try:
            await asyncio.wait((sending, disconnect, pinging), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                scope["state"]["disconnected"] = True
        finally:
            for task in (sending, disconnect, pinging):
                task.cancel()
            await asyncio.gather(sending, disconnect, pinging, return_exceptions=True)
            del sending  # otherwise an error, its traceback and this frame would keep each other alive

    async def _send_all(self, scope: Scope, receive: Receive) -> None:
        try:
            async for data in self._events:
                await self._write(data)
            await self._write(self._form.end, more=False)
        except Exception as error:  # noqa: BLE001 - the client gets every error, in the fitting form
            api_error = to_api_error(error)
            note_error(scope, api_error)
            if self._started:
                await self._write(self._form.error(api_error), more=False)
            else:
                self._started = True
                await error_response(scope, api_error)(scope, receive, self._send)
        finally:
            await self._events.aclose()

    async def _ping(self) -> None:
        """Keep an idle connection open; returns when the client has stopped reading."""
        while True:
            self._idle = True
            await asyncio.sleep(self._settings.ping_interval_s)
            since_s = self._writing_since_s
            if since_s is not None:
                if time.monotonic() - since_s > self._settings.write_timeout_s:
                    return
            elif self._idle:
                try:
                    async with asyncio.timeout(self._settings.write_timeout_s):
                        await self._write(self._form.ping)
                except TimeoutError:
                    return

    async def _write(self, data: bytes, more: bool = True) -> None:
        self._idle = False
        async with self._lock:
            self._writing_since_s = time.monotonic()
            if not self._started:
                self._started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._writing_since_s = None
