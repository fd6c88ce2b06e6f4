"""The chat page: static files of this folder; the page loads nothing from other servers.

`vendor/` holds libraries as npm has them, each with its licence; the page fetches them when a message needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_PAGE = "index.html"
_VENDOR = "vendor"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The policy limits the page to its own files and server, even if a model's answer gets past the renderer.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # images of messages
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, answered 304 while unchanged
}


@cache
def web_routes() -> tuple[Route, ...]:
    """Routes of the page at `/` and of its files below `/static/`: one for each file, so that no other path exists.

    The files are read once.
    """
    found = (*sorted(_FOLDER.iterdir()), *sorted((_FOLDER / _VENDOR).iterdir()))
    files = [path for path in found if path.suffix in _CONTENT_TYPES and path.name != _PAGE]
    names = [(path.relative_to(_FOLDER).as_posix(), path) for path in files]
    return (
        Route("/", _serve(_FOLDER / _PAGE), methods=["GET"], name="page"),
        *(Route(f"/static/{name}", _serve(path), methods=["GET"], name=f"page:{name}") for name, path in names),
    )


def _serve(path: Path) -> Callable[[Request], Awaitable[Response]]:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": etag}

    async def serve(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if etag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_CONTENT_TYPES[path.suffix])

    return serve
