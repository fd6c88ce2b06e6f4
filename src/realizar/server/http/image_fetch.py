"""Images that requests name by address: fetched from hosts that the operator named, within bounds of bytes and time.

A connection is made to the very address that was found public, so that no name leads into a private network, whatever
it resolves to the next time.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from realizar import __version__
from realizar.errors import InvalidRequestError
from realizar.images.given import MEDIA_TYPES, GivenImage
from realizar.server.http.work import Lane, Stop

MOST_IMAGES = 32
_FETCH_S = 10.0  # of an image, redirects included
_WAIT_S = 60.0  # of a request's images, those of other clients before them included
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_READ_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IN_PATHS = "/%:=&?~+!$,;'@()*[]"


class _NotFetchedError(Exception):
    """The reason, with the image's address as its subject."""


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str

    @property
    def named(self) -> str:
        """The host, with the port where that is not the scheme's, as in `Host` headers and as operators name it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


async def fetch_images(
    images: Sequence[GivenImage], hosts: Sequence[str], most_bytes: int, lane: Lane, client: str
) -> Mapping[str, bytes]:
    """The bytes of images by their URLs, `most_bytes` of all together; all hosts are checked before one is asked.

    InvalidRequestError, naming the image: its host is none of `hosts`, or no public one, or does not give it in time.
    """
    wanted = {image.url or "": image for image in reversed(images)}  # an error names the first of several
    if len(wanted) > MOST_IMAGES:
        where = images[MOST_IMAGES].where
        raise InvalidRequestError(f"{where} is one of {len(wanted)} images to fetch; at most {MOST_IMAGES} are", where)
    for url, image in reversed(wanted.items()):
        with _naming(image):
            _target(url, hosts)
    left = _Room(most_bytes)

    async def fetched(url: str, image: GivenImage) -> bytes:
        with _naming(image):
            return await lane.run(client, lambda stop: _fetch(url, hosts, left, stop))

    try:
        async with asyncio.timeout(_WAIT_S), asyncio.TaskGroup() as group:
            tasks = {url: group.create_task(fetched(url, image)) for url, image in wanted.items()}
    except TimeoutError:
        raise InvalidRequestError(f"{images[0].where} takes too long to fetch", images[0].where) from None
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {url: task.result() for url, task in tasks.items()}


@contextmanager
def _naming(image: GivenImage) -> Iterator[None]:
    try:
        yield
    except _NotFetchedError as error:
        raise InvalidRequestError(f"{image.where} {error}", image.where) from None


class _Room:
    """Bytes that a request's images may still have. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._lock, self._most, self._left = threading.Lock(), most, most

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise _NotFetchedError(f"is too large: fetched images of a request may have {self._most} bytes")


def _target(url: str, hosts: Sequence[str]) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise _NotFetchedError("is at no valid address") from None
    if parts.scheme not in _PORTS or parts.username is not None or not host:
        raise _NotFetchedError("must be a data URI, or at an http or https address without a user's name")
    path = quote(parts.path or "/", safe=_IN_PATHS) + (f"?{quote(parts.query, safe=_IN_PATHS)}" if parts.query else "")
    target = _Target(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, path)
    if target.named not in hosts:
        raise _NotFetchedError("is at a host from which this server fetches no images (--image-host names them)")
    return target


def _fetch(url: str, hosts: Sequence[str], room: _Room, stop: Stop) -> bytes:
    until_s = time.monotonic() + _FETCH_S
    try:
        for _ in range(1 + _MOST_REDIRECTS):
            found = _answer(_target(url, hosts), until_s, room, stop)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() > until_s:
            raise _NotFetchedError("takes too long to fetch") from None
        raise _NotFetchedError(
            f"can't be fetched: {getattr(error, 'strerror', None) or type(error).__name__}"
        ) from None
    raise _NotFetchedError(f"is redirected more than {_MOST_REDIRECTS} times")


def _answer(target: _Target, until_s: float, room: _Room, stop: Stop) -> bytes | str:
    """The bytes there, or the address of a redirect."""
    with _connected(target, until_s) as connection:
        headers = {"Host": target.named, "User-Agent": f"realizar/{__version__}", "Accept": ", ".join(MEDIA_TYPES)}
        connection.request("GET", target.path, headers=headers | {"Connection": "close"})
        with connection.getresponse() as response:
            if response.status in _REDIRECTS:
                return response.getheader("Location") or ""
            if response.status != 200:
                raise _NotFetchedError(f"can't be fetched: its server answers {response.status}")
            data = bytearray()
            while piece := response.read(_READ_BYTES):
                stop.check()
                room.take(len(piece))
                data += piece
    if time.monotonic() > until_s:  # an answer of no stated length ends where its connection does
        raise _NotFetchedError("takes too long to fetch")
    return bytes(data)


@contextmanager
def _connected(target: _Target, until_s: float) -> Iterator[http.client.HTTPConnection]:
    """A connection that is shut when the time is up, however slowly the other end writes."""
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = _opened(_addresses(target.host, target.port), target.port, until_s)
    with connection.sock.dup() as same:  # TLS takes the other one over
        shut = threading.Timer(until_s - time.monotonic(), _shut, (same,))
        shut.start()
        try:
            if target.scheme == "https":
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(connection.sock, server_hostname=target.host)
            yield connection
        finally:
            shut.cancel()
            connection.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _opened(addresses: Sequence[str], port: int, until_s: float) -> socket.socket:
    failure = OSError("it has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), max(until_s - time.monotonic(), 0.001))
        except OSError as error:
            failure = error
    raise failure


def _addresses(host: str, port: int) -> list[str]:
    """Addresses of a host, all of them public."""
    found = _resolved(host, port)
    if not all(map(_is_public, found)):
        raise _NotFetchedError("is at a host with an address that is not public")
    return found


def _resolved(host: str, port: int) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in _NAT64 else None
        address = nat64 or address.ipv4_mapped or address.sixtofour or address  # where it leads in the end
    return address.is_global and not address.is_multicast
