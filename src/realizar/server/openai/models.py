"""`GET /v1/models` and `GET /v1/models/{id}`; answered also while the weights are being loaded."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.sampling_params import SAMPLERS
from realizar.server.models.models import ModelStatus, models_of

_SHOWN = (*(each.name for each in SAMPLERS), "max_tokens", "seed")
"""Sampling fields whose defaults are shown; a `max_tokens` of null is the rest of the context."""


async def list_models(request: Request) -> Response:
    """List all names of the served models."""
    listed = models_of(request).listed()
    answer = {"object": "list", "data": [_card(model, name) for model in listed for name in model.names]}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def show_model(request: Request) -> Response:
    """Show one of the names, which may contain slashes."""
    name = request.path_params["name"]
    card = _card(models_of(request).find(name), name)
    return Response(msgspec.json.encode(card), media_type="application/json")


def _card(model: ModelStatus, name: str) -> dict[str, Any]:
    card = {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "realizar",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
        "default_sampling": {name: getattr(model.default_sampling, name) for name in _SHOWN},
        "state": model.state,
    }
    optional = {
        "reason": model.reason,
        "device": model.device_label,
        "memory_bytes": model.num_bytes,
        "host_memory_bytes": model.host_bytes,
        "unloads_at": model.unloads_s,
    }
    return card | {name: value for name, value in optional.items() if value is not None}
