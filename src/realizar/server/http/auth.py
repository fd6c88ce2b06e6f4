"""Authentication by API keys, compared as digests in constant time. Only the listed open paths need no key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.errors import ApiError
from realizar.server.http.clients import offered_key
from realizar.server.http.dialects import error_response


class KeyRing:
    """The server's API keys, kept as digests; without keys every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def opens(self, key: bytes | None) -> bool:
        if not self._digests:
            return True
        offered = _digest(key or b"")
        found = False
        for digest in self._digests:  # all are compared, so that the time reveals nothing
            found |= hmac.compare_digest(digest, offered)
        return found and key is not None


class AuthMiddleware:
    """Refuses requests without a valid key, before routing; `open_paths` need none.

    It compares the whole path as the router will see it, so that neither `Host` nor an encoded path can make a guarded
    route look open.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or self._keys.opens(offered_key(scope["headers"])):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the request needs a valid API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(scope, error)(scope, receive, send)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
