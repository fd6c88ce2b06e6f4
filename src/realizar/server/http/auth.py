"""Who may call: keys, compared as digests in constant time. Only what is named here is open to everyone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.errors import ApiError


class KeyRing:
    """Args: keys: any of them opens; none opens to all. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def opens(self, header_values: Iterable[bytes]) -> bool:
        """Whether a request's `Authorization` headers hold a key: exactly one header, of the scheme Bearer."""
        if not self._digests:
            return True
        values = list(header_values)
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        offered = _digest(key.strip(b" "))
        found = False
        for digest in self._digests:  # all of them, so that the time tells nothing
            found |= hmac.compare_digest(digest, offered)
        return found and scheme.lower() == b"bearer"


class AuthMiddleware:
    """Refuses what has no key, before routing.

    Compares the path as the router will see it, whole: neither `Host` nor an encoded path can make a guarded route look
    open.

    Args:
        keys: of the server.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        return self._keys.opens(value for name, value in scope["headers"] if name == b"authorization")


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
