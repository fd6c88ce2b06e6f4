"""Authentication by API keys, compared as digests in constant time. Only the listed open paths need no key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.errors import ApiError
from realizar.server.http.dialects import error_response


class KeyRing:
    """The server's API keys, kept as digests. Args: keys: each is accepted; without keys every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def opens(self, authorizations: Sequence[bytes], api_keys: Sequence[bytes]) -> bool:
        """True if a request has an accepted key.

        Args:
            authorizations: values of its `Authorization` headers: one, of scheme Bearer, with the key.
            api_keys: values of its `x-api-key` headers: one, the key itself, where there is no other header.
        """
        if not self._digests:
            return True
        bearer = True
        key = api_keys[0] if len(api_keys) == 1 else b""
        if authorizations:
            scheme, _, key = authorizations[0].partition(b" ")
            bearer = scheme.lower() == b"bearer" and len(authorizations) == 1
        offered = _digest(key.strip(b" "))
        found = False
        for digest in self._digests:  # all are compared, so that the time reveals nothing
            found |= hmac.compare_digest(digest, offered)
        return found and bearer


class AuthMiddleware:
    """Refuses requests without a valid key, before routing.

    It compares the whole path as the router will see it, so that neither `Host` nor an encoded path can make a guarded
    route look open.

    Args:
        keys: the server's keys.
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
            "the request needs a valid API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(scope, error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        return self._keys.opens(
            [value for name, value in headers if name == b"authorization"],
            [value for name, value in headers if name == b"x-api-key"],
        )


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
