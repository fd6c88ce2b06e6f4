"""Identity of a client, by which shares of connections, bodies and computing are counted."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from realizar.request import Client

_DIGEST_CHARACTERS = 16
_NETWORK_BITS = 64  # of an IPv6 address; a host chooses the rest freely


def offered_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The key of the one `Authorization` header, of scheme Bearer; without such a header of the one `x-api-key`."""
    authorizations = [value for name, value in headers if name == b"authorization"]
    if authorizations:
        scheme, _, key = authorizations[0].partition(b" ")
        return key.strip(b" ") if len(authorizations) == 1 and scheme.lower() == b"bearer" else None
    keys = [value for name, value in headers if name == b"x-api-key"]
    return keys[0].strip(b" ") if len(keys) == 1 else None


class Clients:
    """Tells who sent a request: by the digest of its API key if the server uses keys, otherwise by its address.

    Without keys the headers are ignored, as a peer could pose as many clients.

    Args:
        weights: of each key; empty if all have 1, as addresses have.
        have_own_caches: True if each finds its own blocks alone in the prefix cache.
    """

    def __init__(self, keys: Sequence[str] = (), weights: Sequence[int] = (), *, have_own_caches: bool = False) -> None:
        self._has_keys, self._have_own_caches = bool(keys), have_own_caches
        self._weights = dict(zip((_name_of(key.encode()) for key in keys), weights, strict=False))

    def of(self, scope: Mapping[str, Any]) -> Client:
        key = offered_key(scope["headers"]) if self._has_keys else None
        if key is not None:
            name = _name_of(key)
            return Client(name, self._weights.get(name, 1), self._have_own_caches)
        peer = scope.get("client")
        return Client(f"peer:{peer_of(peer[0] if peer else '')}", 1, self._have_own_caches)


def _name_of(key: bytes) -> str:
    return f"key:{hashlib.sha256(key).hexdigest()[:_DIGEST_CHARACTERS]}"


def peer_of(address: str) -> str:
    """The peer of an IP address: an IPv4 address, or the /64 network of an IPv6 address. Other texts are kept as is."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed) if parsed.is_loopback else str(ipaddress.ip_network((int(parsed), _NETWORK_BITS), strict=False))


def is_loopback(address: str) -> bool:
    """True if an address or name is this machine's own. An empty address is a Unix socket."""
    try:
        return ipaddress.ip_address(address.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return address in ("", "localhost")
