"""`GET /openapi.json`: the API's description, generated from the routes and the request records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar import __version__
from realizar.server.http.dialects import ApiRoute, Dialect

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_SCHEMAS = "#/components/schemas/"


async def openapi(request: Request) -> Response:
    """Answer with the description."""
    state = request.app.state
    return Response(msgspec.json.encode(describe(state.dialects, state.common_routes)), media_type="application/json")


def describe(dialects: Sequence[Dialect], common: Sequence[ApiRoute]) -> dict[str, Any]:
    """Describe the API in the format of OpenAPI 3.1.

    Args:
        common: routes of no dialect, whose errors have the first one's form.
    """
    listed = [(route, dialect) for dialect in dialects for route in dialect.routes]
    listed += [(route, dialects[0]) for route in common]
    records = [route.body for route, _ in listed if route.body is not None]
    schemas, components = msgspec.json.schema_components(records, ref_template=f"{_SCHEMAS}{{name}}")
    bodies = dict(zip(records, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, dialect in listed:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {}).update(_described(route, dialect, bodies))
    errors = {_error_name(dialect): dialect.error_schema for dialect in dialects}
    return {
        "openapi": "3.1.0",
        "info": {"title": "realizar", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **errors},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"header": []}],
    }


def _described(route: ApiRoute, dialect: Dialect, bodies: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{_error_name(dialect)}"}}}
    responses = {
        "200": {"description": "The answer."},
        "default": {"description": "An error.", "content": error},
    }
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if names := _PARAMETER.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        content = {"application/json": {"schema": bodies[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return {route.method.lower(): operation}


def _error_name(dialect: Dialect) -> str:
    return f"{dialect.name}Error"
