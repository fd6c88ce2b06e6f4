"""The client's address behind proxies: `X-Forwarded-For`, believed as far as trusted proxies wrote it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

_MAX_PROXIES = 32
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """Networks of proxies in CIDR notation, such as `10.0.0.0/8`; a single address is a network too.

    It raises ValueError if one is no network.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(ipaddress.ip_network(network) for network in networks)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def has(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and self._trusts(parsed)

    def client(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The address of a request's client, whose connection came from `peer`; `headers` have small letters.

        Every proxy appends the address that its connection came from. So the last entry is true if the peer is trusted,
        the one before it if the last is a trusted proxy's too: the first address from the right that is no proxy's is
        the client's. What stands left of it anybody may have written.
        """
        address = _parsed(peer)
        if address is None or not self._trusts(address):
            return peer
        value = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        for entry in reversed(value.decode("latin-1").rsplit(",", _MAX_PROXIES)[-_MAX_PROXIES:]):
            before = _parsed(entry.strip())
            if before is None:
                break
            address = before
            if not self._trusts(address):
                break
        return str(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._networks)


class ClientAddressMiddleware:
    """Replaces the address of the connection by the client's, for all that count or log by address."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app, self._proxies = app, proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client"):
            peer, port = scope["client"]
            address = self._proxies.client(peer, scope["headers"])
            scope["client"] = (address, port if address == peer else 0)
        await self._app(scope, receive, send)


def _parsed(text: str) -> _Address | None:
    """An address, perhaps with a port, or None; an IPv4 address within IPv6 is the IPv4 address."""
    with_port = re.fullmatch(r"\[([^\[\]]+)\](?::\d+)?|([\d.]+):\d+", text)
    if with_port:
        text = with_port[1] or with_port[2]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
