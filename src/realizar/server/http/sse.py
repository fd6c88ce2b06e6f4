"""Server-sent events: records as `data:` lines, comments during pauses, and `[DONE]` at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from realizar.server.errors import to_api_error
from realizar.server.http.disconnects import wait_for_disconnect

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_encoder = msgspec.json.Encoder()


class EventStream(Response):
    """Sends records as they arrive.

    An error before the first record becomes an ordinary error answer. A later error becomes an object with a top-level
    `error`, and the stream ends without `[DONE]`. `records` is closed when the client disconnects, or reads nothing for
    too long.

    Args:
        records: the records to send, encoded by msgspec; its `aclose` frees its resources.
        ping_interval_s: seconds between comments while no record comes.
        write_timeout_s: seconds for the client to read a record.
    """

    def __init__(self, records: AsyncGenerator[Any], ping_interval_s: float, write_timeout_s: float) -> None:
        super().__init__(None, 200, HEADERS)
        del self.headers["content-length"]
        self._records = records
        self._ping_interval_s, self._write_timeout_s = ping_interval_s, write_timeout_s
        self._writing_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._lock, self._started, self._idle = send, asyncio.Lock(), False, True
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
            async for record in self._records:
                await self._write(b"data: " + _encoder.encode(record) + b"\n\n")
            await self._write(_DONE, more=False)
        except Exception as error:  # noqa: BLE001 - the client gets every error, in the fitting form
            api_error = to_api_error(error)
            scope["state"]["error_code"] = api_error.code
            if self._started:
                await self._write(b"data: " + _encoder.encode(api_error.body()) + b"\n\n", more=False)
            else:
                self._started = True
                await api_error.response()(scope, receive, self._send)
        finally:
            await self._records.aclose()

    async def _ping(self) -> None:
        """Keep an idle connection open; returns when the client has stopped reading."""
        while True:
            self._idle = True
            await asyncio.sleep(self._ping_interval_s)
            since_s = self._writing_since_s
            if since_s is not None:
                if time.monotonic() - since_s > self._write_timeout_s:
                    return
            elif self._idle:
                try:
                    async with asyncio.timeout(self._write_timeout_s):
                        await self._write(_PING)
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
