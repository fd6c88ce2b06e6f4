"""Images are fetched from named hosts at public addresses, and from nowhere else, within bounds of bytes and time."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from realizar.errors import InvalidRequestError
from realizar.images.given import GivenImage
from realizar.server.http import image_fetch
from realizar.server.http.image_fetch import fetch_images
from realizar.server.http.work import Lane
from waits import HANG_S

TLS = Path(__file__).parents[2] / "data" / "tls"
DATA = b"the bytes of an image"
DRIP_S = 0.01


class Pages(BaseHTTPRequestHandler):
    """A server of images; `asked` has the addresses that it was asked for."""

    asked: list[tuple[str, str]]
    redirects: Mapping[str, str]

    def do_GET(self) -> None:
        self.asked.append((self.headers["Host"], self.path))
        if self.path in self.redirects:
            self.send_response(302)
            self.send_header("Location", self.redirects[self.path].replace("PORT", str(self.server.server_address[1])))
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        if self.path == "/slow-header":
            self.flush_headers()
            self._drip(b"X: y\r\n")
            return
        self.end_headers()
        if self.path in ("/slow", "/large"):
            self._drip(b"x" * (1 if self.path == "/slow" else 1 << 16))
        else:
            self.wfile.write(DATA)

    def _drip(self, piece: bytes) -> None:
        """Write without end, until nobody reads."""
        try:
            while True:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(DRIP_S)
        except OSError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


REDIRECTS = {
    "/moved": "/a.png",
    "/twice": "http://images.example:PORT/moved",
    "/loop": "/loop",
    "/nowhere": "",
    "/loopback": "http://127.0.0.1:PORT/a.png",
    "/other": "http://other.example/a.png",
    "/metadata": "http://metadata.example/latest/meta-data/",
    "/file": "file:///etc/passwd",
    "/port": "http://images.example:1/a.png",
}
ADDRESSES = {"metadata.example": ["169.254.169.254"], "both.example": ["127.0.0.1", "10.0.0.1"], "none.example": []}


@pytest.fixture(scope="module")
def pages() -> Iterator[ThreadingHTTPServer]:
    handler = type("OwnPages", (Pages,), {"asked": [], "redirects": REDIRECTS})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names resolve without a network, and 127.0.0.1 stands in for a public address."""
    is_public = image_fetch._is_public
    monkeypatch.setattr(image_fetch, "_is_public", lambda text: text == "127.0.0.1" or is_public(text))
    monkeypatch.setattr(image_fetch, "_resolved", lambda host, port: ADDRESSES.get(host, ["127.0.0.1"]))


def fetched(urls: Sequence[str], hosts: Sequence[str], most_bytes: int = 1 << 20) -> Mapping[str, bytes]:
    images = [GivenImage(f"image {place}", url=url) for place, url in enumerate(urls)]

    async def run() -> Mapping[str, bytes]:
        async with asyncio.timeout(HANG_S):
            return await fetch_images(images, hosts, most_bytes, Lane(4, "fetches"), "client")

    return asyncio.run(run())


def hosts_of(pages: ThreadingHTTPServer) -> list[str]:
    return [f"images.example:{pages.server_address[1]}", "metadata.example", "both.example", "none.example"]


def url_of(pages: ThreadingHTTPServer, path: str) -> str:
    return f"http://images.example:{pages.server_address[1]}{path}"


def test_images_of_named_hosts_are_fetched(pages: ThreadingHTTPServer) -> None:
    """Each address once; letters beyond ASCII are escaped as browsers do it."""
    urls = [url_of(pages, path) for path in ("/a.png", "/twice", "/a b/é.png?q=ü#part", "/a.png")]
    pages.RequestHandlerClass.asked.clear()  # type: ignore[attr-defined]
    assert fetched(urls, hosts_of(pages)) == dict.fromkeys(urls, DATA)
    asked = pages.RequestHandlerClass.asked  # type: ignore[attr-defined]
    assert {host for host, _ in asked} == {hosts_of(pages)[0]}
    assert sorted(path for _, path in asked) == ["/a%20b/%C3%A9.png?q=%C3%BC", "/a.png", "/a.png", "/moved", "/twice"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.example/a.png", "at a host from which this server fetches no images"),
        ("http://images.example/a.png", "fetches no images"),  # it is named with another port
        ("http://images.example.other.example/", "fetches no images"),
        ("http://127.0.0.1/", "fetches no images"),
        ("https://metadata.example@127.0.0.1/", "without a user's name"),
        ("http://user:word@metadata.example/", "without a user's name"),
        ("http:///a.png", "must be a data URI"),
        ("http://[::1", "is at no valid address"),
        ("http://metadata.example:99999/", "is at no valid address"),
        ("http://metadata.example/latest/meta-data/", "an address that is not public"),
        ("http://METADATA.example./", "an address that is not public"),
        ("http://both.example/", "an address that is not public"),
        ("http://none.example/", "can't be fetched"),
        ("/loopback", "fetches no images"),
        ("/other", "fetches no images"),
        ("/metadata", "an address that is not public"),
        ("/file", "must be a data URI"),
        ("/port", "fetches no images"),
        ("/loop", "is redirected more than 3 times"),
        ("/nowhere", "is redirected more than 3 times"),
        ("/missing", "its server answers 404"),
        ("/large", "fetched images of a request may have 1048576 bytes"),
    ],
)
def test_all_else_is_refused_by_name(pages: ThreadingHTTPServer, url: str, message: str) -> None:
    good = url_of(pages, "/a.png")
    with pytest.raises(InvalidRequestError, match=f"^image 1 .*{message}") as caught:
        fetched([good, url_of(pages, url) if url.startswith("/") else url], hosts_of(pages))
    assert caught.value.param == "image 1"


def test_no_image_is_fetched_before_all_hosts_are_checked(pages: ThreadingHTTPServer) -> None:
    pages.RequestHandlerClass.asked.clear()  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match=r"^image 1 "):
        fetched([url_of(pages, "/a.png"), "http://other.example/"], hosts_of(pages))
    many = [url_of(pages, f"/{place}") for place in range(image_fetch.MOST_IMAGES + 1)]
    with pytest.raises(InvalidRequestError, match=r"^image 32 is one of 33 images to fetch; at most 32 are"):
        fetched(many, hosts_of(pages))
    assert pages.RequestHandlerClass.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/slow", "/slow-header"])
def test_hosts_may_not_be_slow(pages: ThreadingHTTPServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they send a little."""
    monkeypatch.setattr(image_fetch, "_FETCH_S", 0.2)
    with pytest.raises(InvalidRequestError, match=r"^image 0 takes too long to fetch"):
        fetched([url_of(pages, path)], hosts_of(pages))


def test_a_request_may_not_wait_for_long(pages: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "_FETCH_S", 1.0)
    monkeypatch.setattr(image_fetch, "_WAIT_S", 0.1)
    with pytest.raises(InvalidRequestError, match=r"^image 0 takes too long to fetch"):
        fetched([url_of(pages, "/slow")], hosts_of(pages))


@pytest.mark.parametrize("trusted", [True, False])
def test_certificates_are_checked(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a slow host is left over TLS as well."""
    monkeypatch.setattr(image_fetch, "_FETCH_S", 2.0)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "first.pem", TLS / "first-key.pem")
    trusting = ssl.create_default_context(cafile=str(TLS / "first.pem") if trusted else None)
    monkeypatch.setattr(image_fetch.ssl, "create_default_context", lambda: trusting)
    handler = type("OwnPages", (Pages,), {"asked": [], "redirects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_address[1]}"
        if trusted:
            assert fetched([f"https://{host}/a.png"], [host]) == {f"https://{host}/a.png": DATA}
        with pytest.raises(InvalidRequestError, match="too long" if trusted else "can't be fetched: "):
            fetched([f"https://{host}/slow"], [host])
        server.shutdown()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((each, True) for each in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8")),
        *((each, False) for each in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((each, False) for each in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")),
        *((each, False) for each in ("::", "::1", "fe80::1%eth0", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1")),
        *((each, False) for each in ("::ffff:100.64.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::1", "2001:db8::1")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert image_fetch._is_public(address) == public
