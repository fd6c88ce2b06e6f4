"""How uvicorn is set up: headers bounded in size and time, errors in the API's form, nothing told of the machine."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from realizar.server.errors import ApiError
from realizar.server.settings import ServerSettings

_KEEP_ALIVE_S = 30


def uvicorn_config(app: ASGIApp, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """A configuration for `uvicorn.Server`.

    Args:
        options: of `uvicorn.Config`, such as host, port or fd.
    """
    defaults: dict[str, Any] = {
        "http": bounded_protocol(settings),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": _KEEP_ALIVE_S,
    }
    return uvicorn.Config(app, **{**defaults, **options})


def bounded_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with the bounds of these settings."""
    limits = {"max_header_bytes": settings.max_header_bytes, "header_timeout_s": settings.header_timeout_s}
    return type("BoundedProtocol", (_BoundedProtocol,), limits)


class _BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too large or too slow."""

    max_header_bytes: int
    header_timeout_s: float
    _header_bytes = 0
    _in_headers = True
    _timer: asyncio.TimerHandle | None = None
    _fault: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._fault = self._too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_header_bytes:
            self._fault = self._too_large()
            raise ValueError("the headers are too large")  # the parser stops, and `send_400_response` is called
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong, in the form of the API, and close."""
        error = self._fault or ApiError(400, "this is not a valid HTTP request", code="invalid_http")
        body = msgspec.json.encode(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _too_large(self) -> ApiError:
        return ApiError(
            431, f"the headers are over their limit of {self.max_header_bytes} bytes", code="headers_too_large"
        )

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._fault = ApiError(
                408, f"the headers did not arrive within {self.header_timeout_s:g} s", code="request_timeout"
            )
            self.send_400_response("")
