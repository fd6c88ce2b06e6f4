"""`GET /openapi.json`: the API's description, generated from the request records."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar import __version__
from realizar.server.openai.records.chat import ChatCompletionRequest
from realizar.server.openai.records.completion import CompletionRequest
from realizar.server.openai.records.embedding import EmbeddingRequest
from realizar.server.openai.records.tokenize import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatCompletionRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Complete prompts."),
    "/v1/embeddings": (EmbeddingRequest, "Embed texts."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages."),
    "/detokenize": (DetokenizeRequest, "The text of token ids."),
}
_READ = {
    "/v1/models": "Names of the model.",
    "/v1/models/{name}": "One of them.",
    "/tokenizer_info": "What a client needs to tokenize by itself.",
    "/health": "Alive.",
    "/ready": "Ready to take requests.",
    "/metrics": "Figures for Prometheus.",
    "/version": "The program's version.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def openapi(request: Request) -> Response:
    """Answer with the description."""
    return Response(msgspec.json.encode(describe()), media_type="application/json")


@functools.cache
def describe() -> dict[str, Any]:
    """Describe the API in the format of OpenAPI 3.1."""
    records = [record for record, _ in _BODIES.values()]
    schemas, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(_BODIES.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": _responses()}}
    for path, text in _READ.items():
        paths[path] = {"get": {"summary": text, "responses": _responses()}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "realizar", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _responses() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer."},
        "default": {"description": "An error.", "content": error},
    }
