"""`POST /reset_prefix_cache`, by vLLM's name: the prefix cache forgets what it holds, if the operator allows it."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import EngineDeadError
from realizar.server.api import Api, settings_of
from realizar.server.errors import ApiError
from realizar.server.models.models import models_of


async def reset_prefix_cache(request: Request) -> Response:
    """Clear the cache of each model that is loaded, or of that in the query's `model`; answer with their names.

    The cache is every client's: one that clears it makes all others wait for their prompts to be read again, so that an
    API key alone does not do. A client that wants no more of its own blocks sends another `cache_salt`.
    """
    if not settings_of(request).allow_cache_clearing:
        raise ApiError(
            403,
            "this server's prefix cache is cleared by whoever runs it: it was started without --allow-cache-clearing."
            " Requests with another cache_salt find nothing that was computed before",
            code="cache_clearing_not_allowed",
        )
    running = models_of(request).running(request.query_params.get("model"))
    cleared = await asyncio.gather(*map(_cleared, running))
    names = [api.model.name for api, done in zip(running, cleared, strict=True) if done]
    return Response(msgspec.json.encode({"models": names}), media_type="application/json")


async def _cleared(api: Api) -> bool:
    """Clear the cache of one model; False if its engine ends meanwhile, and its cache with it."""
    try:
        await api.engine.clear_cache()
    except EngineDeadError:
        return False
    return True
