"""httptools' parser of requests, for a server that speaks HTTP/1.1 alone."""

from __future__ import annotations

from typing import Protocol

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")


class RequestEvents(Protocol):
    """What the parser calls. Attributes: headers: those of the present request, with names in lower case."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Parses requests, and takes `Upgrade` for a header like any other: a server may pass over it.

    httptools takes what follows the headers of such a request for bytes of the other protocol. So the request would
    lose its body, and behind a proxy that passes the header on, the body would be read as a request of its own. Java's
    client asks for HTTP/2 with its first requests.
    """

    def __init__(self, events: RequestEvents) -> None:
        self._events = events
        self._goes_on = False
        self._parser = self._made()

    def get_http_version(self) -> str:
        """The version of the present request, such as `1.1`."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """The method of the present request."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """True if the connection may have another request after the present one."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def feed_data(self, data: bytes) -> None:
        """Parse the next bytes.

        Raises:
            httptools.HttpParserError: they are not valid.
        """
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
