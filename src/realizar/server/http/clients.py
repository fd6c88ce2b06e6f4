"""Identity of a client: what shares of connections, bodies and computing are counted by. Standard library only."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from typing import Any

_DIGEST_CHARACTERS = 16
_NETWORK_BITS = 64  # of an IPv6 address; the rest a host chooses as it likes


def client_of(scope: Mapping[str, Any], *, has_keys: bool) -> str:
    """A request's client: by the digest of its API key where keys are used, else by its peer.

    Args:
        scope: of ASGI.
        has_keys: whether the server asks for keys; a header that nobody asked for would let a peer be many clients.
    """
    if has_keys:
        for name, value in scope["headers"]:
            if name == b"authorization":
                key = value.partition(b" ")[2].strip(b" ")
                return f"key:{hashlib.sha256(key).hexdigest()[:_DIGEST_CHARACTERS]}"
    peer = scope.get("client")
    return f"peer:{peer_of(peer[0] if peer else '')}"


def peer_of(address: str) -> str:
    """An IP address as one peer: of IPv6 the network of 64 bits. What is no address stays as it is."""
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
    """Whether an address, or a name such as `localhost`, is this machine's own. An empty one is a Unix socket."""
    try:
        return ipaddress.ip_address(address.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return address in ("", "localhost")
