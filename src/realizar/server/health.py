"""Routes for monitoring: health, readiness, metrics and version."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar import __version__
from realizar.server.figures import ServerFigures, own_samples
from realizar.server.metrics import CONTENT_TYPE
from realizar.server.models.models import models_of


async def health(request: Request) -> Response:
    """Answer 200 while the server is alive, even while it loads; 503 once no engine is left."""
    dead = models_of(request).state == "dead"
    return _state("dead" if dead else "ok", 503 if dead else 200)


async def ready(request: Request) -> Response:
    """Answer 200 while requests are accepted; otherwise 503, with the reason if one is known."""
    models = models_of(request)
    return _state(models.state, 200 if models.state == "ready" else 503, models.fault)


async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    figures: ServerFigures = request.app.state.figures
    text = await models_of(request).exposition((*figures.samples(), *own_samples()))
    return Response(text, media_type=CONTENT_TYPE)


async def version(request: Request) -> Response:
    """Answer with the program's version."""
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


def _state(state: str, status: int, reason: str | None = None) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    answer = {"status": state} if status == 200 or reason is None else {"status": state, "reason": reason}
    return Response(msgspec.json.encode(answer), status, headers, "application/json")
