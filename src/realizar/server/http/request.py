"""What a handler gets from its request: the server's settings, a turn to compute, and its line in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.images.given import FETCHED, RemoteImagesError
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.image_fetch import fetch_images
from realizar.server.http.request_memory import lease_of
from realizar.server.http.work import Stop, WorkPool
from realizar.server.settings import ServerSettings

T = TypeVar("T")


def settings_of(request: Request) -> ServerSettings:
    return cast("ServerSettings", request.app.state.settings)


async def compute(request: Request, function: Callable[[Stop], T], size_bytes: int | None = None) -> T:
    """Run a function on a worker thread when it is the client's turn. The body must have been read.

    `size_bytes` is the size of the function's input, if that is not the body. It raises ClientDisconnectedError if the
    client disconnected first; the function was stopped, or never called. Where it wants images of other servers, they
    are fetched, with errors as of `fetch_images`, and it is called again.
    """
    settings, lease = settings_of(request), lease_of(request)
    size = lease.body_bytes if size_bytes is None else size_bytes
    work = cast("WorkPool", request.app.state.work)

    async def computed() -> T:
        try:
            return await work.run(lease.client.name, size, function)
        except RemoteImagesError as error:
            images = error.images
        fetched = await fetch_images(
            images, settings.image_hosts, settings.max_body_bytes, work.fetches, lease.client.name
        )
        lease.take(sum(map(len, fetched.values())))
        FETCHED.set(fetched)  # in this task's own context
        return await work.run(lease.client.name, size, function)

    return await unless_disconnected(request.receive, computed())


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def note(request: Request, **notes: Any) -> None:
    request.scope["state"]["notes"].update(notes)
