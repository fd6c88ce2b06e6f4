"""Routes that change the models of Ollama: `/api/pull` finds the models that are there, and the others are refused.

A server's models are chosen by whoever runs it: a client that may pull could fill the disk, and one that may delete
could take a model from all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.errors import ApiError, refused
from realizar.server.http.body import read_record
from realizar.server.models.models import models_of
from realizar.server.ollama.names import find_model
from realizar.server.ollama.records import PullRequest

_CHOSEN = "the models of this server are chosen by whoever runs it, with `realizar pull`, `realizar rm` and `serve`"
_SUCCESS = msgspec.json.encode({"status": "success"})


async def pull(request: Request) -> Response:
    """Answer success for a model that is served; others are refused."""
    record = await read_record(request, PullRequest)
    try:
        find_model(models_of(request), record.model or record.name or "")
    except ApiError as error:
        if error.status != 404:
            raise
        raise refused(f"{error.message}, and no request can pull another: {_CHOSEN}", "model") from None
    if record.stream is False:
        return Response(_SUCCESS, media_type="application/json")
    return Response(_SUCCESS + b"\n", media_type="application/x-ndjson")


def refusing(name: str, record: type[msgspec.Struct] | None) -> Callable[[Request], Awaitable[Response]]:
    """Make a handler that refuses all requests, well-formed ones too.

    Args:
        name: of the route.
        record: of its body; None does not read it.
    """

    async def refuse(request: Request) -> Response:
        if record is not None:
            await read_record(request, record)
        raise refused(f"{name} is not supported: {_CHOSEN}", None, "not_supported")

    return refuse
