"""`GET /v1/models` and `GET /v1/models/{id}`; answered also while the weights are being loaded."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, api_of
from realizar.server.generation.sampling import SAMPLER_FIELDS

_SHOWN = (*SAMPLER_FIELDS, "max_tokens", "seed")
"""Sampling fields whose defaults are shown; a `max_tokens` of null is the rest of the context."""


async def list_models(request: Request) -> Response:
    """List all names of the served model."""
    api = api_of(request)
    answer = {"object": "list", "data": [_card(api, name) for name in api.model.names]}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def show_model(request: Request) -> Response:
    """Show one of the names, which may contain slashes."""
    api = api_of(request)
    name = request.path_params["name"]
    api.check_model(name)
    return Response(msgspec.json.encode(_card(api, name)), media_type="application/json")


def _card(api: Api, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": api.model.created_s,
        "owned_by": "realizar",
        "root": api.model.name,
        "parent": None,
        "max_model_len": api.max_model_len,
        "default_sampling": {name: getattr(api.model.default_sampling, name) for name in _SHOWN},
    }
