"""Refuses browsers' requests from pages of other origins, by the headers Host, Origin and Sec-Fetch-*.

Any page that a user has open can make the browser send requests here, and read the answers if its name resolves to this
machine (DNS rebinding). Programs other than browsers send neither Origin nor Sec-Fetch-Site.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.errors import ApiError
from realizar.server.http.dialects import error_response

_ANY = "*"


class BrowserGuardMiddleware:
    """Refuses a browser's request with 403 unless a page of this server or of an allowed origin sent it.

    Args:
        allowed_hosts: names that a Host header may have, without port; an empty list or `*` allows all.
        cors_origins: origins whose pages may call; `*` is all.
        open_paths: paths that are not guarded: they reveal nothing, and health probes use host names of their own.
    """

    def __init__(
        self, app: ASGIApp, allowed_hosts: Iterable[str], cors_origins: Iterable[str], open_paths: Collection[str]
    ) -> None:
        self._app, self._open_paths = app, frozenset(open_paths)
        hosts = frozenset(_bare(host) for host in allowed_hosts)
        self._hosts = frozenset() if _ANY in hosts else hosts
        self._origins = frozenset(origin.lower() for origin in cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = None
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            fault = self._fault(scope)
        if fault is None:
            await self._app(scope, receive, send)
            return
        await error_response(scope, fault)(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"):
                if name in headers:
                    return ApiError(400, f"the request has two {name.decode()} headers", code="invalid_headers")
                headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _bare(host) not in self._hosts:
            return _refused(
                f"the Host header {host[:100]!a} is not a name of this server; --allowed-host {_shown(_bare(host))} "
                "allows it",
                "host_not_allowed",
            )
        if _ANY in self._origins:
            return None
        return self._foreign(scope["method"], headers, host)

    def _foreign(self, method: str, headers: dict[bytes, bytes], host: str) -> ApiError | None:
        # A page can't set Sec-Fetch-Site, and the header is valid even if a proxy changes Host or drops its port.
        # Browsers send it only over HTTPS and to localhost, so requests to a rebound name do not have it.
        site = headers.get(b"sec-fetch-site")
        if site == b"same-origin":
            return None
        origin = headers[b"origin"].decode("latin-1").lower() if b"origin" in headers else None
        if origin is not None and (origin in self._origins or _is_of(origin, host)):
            return None
        if origin is not None:
            return _refused(
                f"pages of {origin[:100]!a} may not call this server; --cors-origin {_shown(origin)} allows them",
                "origin_not_allowed",
            )
        followed_link = (
            method in ("GET", "HEAD")
            and headers.get(b"sec-fetch-mode") == b"navigate"
            and headers.get(b"sec-fetch-dest") == b"document"
        )
        if site is None or site == b"none" or followed_link:
            return None
        return _refused(
            "a page of another site may not use this server (Sec-Fetch-Site); --cors-origin allows an origin",
            "origin_not_allowed",
        )


def _refused(message: str, code: str) -> ApiError:
    return ApiError(403, message, code=code)


def _bare(host: str) -> str:
    """A host name without port and trailing dot; an IPv6 address gets brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    if host.count(":") > 1:
        return f"[{host}]"
    return host.partition(":")[0].removesuffix(".")


def _is_of(origin: str, host: str) -> bool:
    """True if an origin is the server itself, as the Host header names it; a proxy may terminate TLS before it."""
    try:
        theirs, own = urlsplit(origin), urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(theirs.scheme)
        if default is None or theirs.hostname is None:
            return False
        return theirs.hostname == own.hostname and (theirs.port or default) == (own.port or default)
    except ValueError:  # no address, or no port
        return False


def _shown(text: str) -> str:
    return ascii(text[:100])[1:-1] or "NAME"
