"""Routes that change the models of Ollama. `/api/pull` fetches models where the operator allows it; others are refused.

A server's models are chosen by whoever runs it: a client that may pull could fill the disk, and one that may delete
could take a model from all others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import HubError, UnknownModelError
from realizar.hub.pull import network_name
from realizar.request import Client
from realizar.server.api import settings_of
from realizar.server.errors import ApiError, cleaned, refused
from realizar.server.http.body import read_record
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.models.models import models_of
from realizar.server.models.pulls import PullEvent, Pulls
from realizar.server.ollama.names import find_model, network_part
from realizar.server.ollama.records import PullRequest

_CHOSEN = "the models of this server are chosen by whoever runs it, with `realizar pull`, `realizar rm` and `serve`"
_SUCCESS = msgspec.json.encode({"status": "success"})


async def pull(request: Request) -> Response:
    """Fetch a model, which is served then. One that is served already is there: nothing is asked of the network."""
    record = await read_record(request, PullRequest)
    models, settings = models_of(request), settings_of(request)
    name = record.model or record.name or ""
    try:
        find_model(models, name)
    except ApiError as error:
        if error.status != 404:
            raise
        if models.pulls is None:
            raise refused(
                f"{error.message}, and no request can pull another without --allow-pull: {_CHOSEN}", "model"
            ) from None
        lines = _lines(models.pulls, _checked(name), lease_of(request).client)
    else:
        lines = _no_lines()
    if record.stream is not False:
        return EventStream(lines, settings.ping_interval_s, settings.write_timeout_s)
    await unless_disconnected(request.receive, _whole(lines))
    return Response(_SUCCESS, media_type="application/json")


def _checked(name: str) -> str:
    """The name of a model of the network.

    Raises:
        ApiError: 400; it is none.
    """
    try:
        return network_name(network_part(name))
    except UnknownModelError as error:
        raise refused(str(error), "model", "invalid_value") from None


async def _lines(pulls: Pulls, name: str, client: Client) -> AsyncGenerator[bytes]:
    """The lines of a stream.

    Raises:
        ApiError: 404; no model has the name. 502; the model can't be fetched or served.
    """
    try:
        async with aclosing(pulls.events(name, client)) as events:
            async for event in events:
                yield _line(event)
    except UnknownModelError as error:
        raise ApiError(404, cleaned(str(error)), param="model", code="model_not_found") from None
    except HubError as error:
        raise ApiError(502, cleaned(str(error)), kind="server_error", param="model", code="pull_failed") from None
    yield _SUCCESS + b"\n"


async def _no_lines() -> AsyncGenerator[bytes]:
    yield _SUCCESS + b"\n"


async def _whole(lines: AsyncGenerator[bytes]) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass


def _line(event: PullEvent) -> bytes:
    fields = {"status": event.status, "digest": event.digest, "total": event.total, "completed": event.completed}
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None}) + b"\n"


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
