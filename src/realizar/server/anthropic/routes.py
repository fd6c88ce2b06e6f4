"""Anthropic's dialect: its routes and the form of its errors."""

from __future__ import annotations

from typing import Any

from realizar.server.anthropic.messages import count_tokens, messages
from realizar.server.anthropic.records import CountTokensRequest, MessagesRequest
from realizar.server.anthropic.stream import encode_event
from realizar.server.errors import ApiError
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_STATUSES = {503: 529}
"""Anthropic's status of a server that is busy, which its clients retry."""


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error. Its form has no place for the field at fault: the message names it."""
    message = error.message if (error.param or "") in error.message else f"{error.param}: {error.message}"
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def _error_event(error: ApiError) -> bytes:
    return encode_event("error", error=error_body(error)["error"])


ANTHROPIC = Dialect(
    name="Anthropic",
    routes=(
        ApiRoute("/v1/messages", messages, "Answer a conversation (Anthropic's Messages).", MessagesRequest),
        ApiRoute("/v1/messages/count_tokens", count_tokens, "Count the tokens of a prompt.", CountTokensRequest),
    ),
    error_body=error_body,
    error_schema={
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "details": {"type": "object"},
                },
            },
        },
    },
    stream=StreamForm(ping=encode_event("ping"), end=b"", error=_error_event),
    statuses=_STATUSES,
    request_id_header="request-id",
)
