"""Ollama's dialect: its routes and the form of its errors."""

from __future__ import annotations

from typing import Any

import msgspec

from realizar.server.errors import ApiError
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.ollama.chat import chat
from realizar.server.ollama.embed import embed, embeddings
from realizar.server.ollama.generate import generate
from realizar.server.ollama.listing import running, show, tags, version
from realizar.server.ollama.management import pull, refusing
from realizar.server.ollama.records import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    RefusedRequest,
    ShowRequest,
)

_REFUSED = (("/api/delete", "DELETE"), ("/api/copy", "POST"), ("/api/create", "POST"), ("/api/push", "POST"))


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error. Its form has no place for the field at fault: the message names it."""
    message = error.message if (error.param or "") in error.message else f"{error.param}: {error.message}"
    return {"error": message}


def _error_line(error: ApiError) -> bytes:
    return msgspec.json.encode(error_body(error)) + b"\n"


OLLAMA = Dialect(
    name="Ollama",
    routes=(
        ApiRoute("/api/chat", chat, "Answer a conversation (Ollama's).", ChatRequest),
        ApiRoute("/api/generate", generate, "Answer a prompt (Ollama's).", GenerateRequest),
        ApiRoute("/api/tags", tags, "The models (Ollama's)."),
        ApiRoute("/api/ps", running, "The models that are loaded (Ollama's)."),
        ApiRoute("/api/show", show, "A model (Ollama's).", ShowRequest),
        ApiRoute("/api/embed", embed, "Embed texts (Ollama's).", EmbedRequest),
        ApiRoute("/api/embeddings", embeddings, "Embed a text (Ollama's older route).", EmbeddingsRequest),
        ApiRoute("/api/pull", pull, "Find a model, or fetch it where the server allows it.", PullRequest),
        *(
            ApiRoute(path, refusing(path, RefusedRequest), "Refused: requests change no models.", RefusedRequest, verb)
            for path, verb in _REFUSED
        ),
        ApiRoute(
            "/api/blobs/{digest}", refusing("/api/blobs", None), "Refused: requests change no models.", verb="POST"
        ),
        ApiRoute("/api/version", version, "The version of Ollama whose API this is."),
    ),
    folder="/api/",
    takes_any_type=True,  # litellm sends none, and curl's -d, as Ollama's own examples have it, that of a form
    error_body=error_body,
    error_schema={"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    # Space between the lines of JSON is no part of any: clients, who know no pings, read on.
    stream=StreamForm(ping=b" ", end=b"", error=_error_line, media_type="application/x-ndjson"),
)
