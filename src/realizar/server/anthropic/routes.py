"""Anthropic's dialect: its routes and the form of its errors."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.anthropic.answers import BlockList, stop_of, usage_of
from realizar.server.anthropic.conversation import marks_cache, read_conversation, shows_reasoning
from realizar.server.anthropic.records import CountTokensRequest, Message, MessagesRequest
from realizar.server.anthropic.stream import MessageStreamer, encode_event
from realizar.server.api import new_id
from realizar.server.errors import ApiError
from realizar.server.generation.answer import AnswerDelta
from realizar.server.generation.answer_events import AnswerEvents
from realizar.server.generation.chat_plan import plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.request import compute, note
from realizar.server.http.request_memory import lease_of
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats

# `POST /v1/messages` and `POST /v1/messages/count_tokens`.


async def _messages(request: Request) -> Response:
    record = await read_record(request, MessagesRequest)
    api = await model_of(request, record.model, need=chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_conversation(record), stop))
    request_id = new_id("msg_")
    note(request, model=api.model.name, prompt=len(plan.token_ids))
    run = ChatRun(api, plan, request_id, lease_of(request))
    with_reasoning, marked = shows_reasoning(record), marks_cache(record)
    events = AnswerEvents(request, run, api.settings)
    if record.stream:
        return events.stream(
            MessageStreamer(api, plan, run, request_id, with_reasoning=with_reasoning, marks_cache=marked)
        )
    blocks = BlockList(with_reasoning=with_reasoning)
    stop: tuple[str, str | None] = ("end_turn", None)

    def take_in(delta: AnswerDelta) -> None:
        nonlocal stop
        for part in delta.parsed:
            blocks.take_in(part)
        if delta.finish_reason is not None:
            stop = stop_of(plan, delta.finish_reason, delta.source.stop_reason)

    await events.whole(take_in)
    answer = Message(
        id=request_id,
        model=api.model.name,
        content=blocks.blocks(),
        stop_reason=stop[0],
        stop_sequence=stop[1],
        usage=usage_of(api, plan, run, marks_cache=marked),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _count_tokens(request: Request) -> Response:
    record = await read_record(request, CountTokensRequest)
    api = await model_of(request, record.model, need=chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_conversation(record), stop))
    return Response(msgspec.json.encode({"input_tokens": len(plan.token_ids)}), media_type="application/json")


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
        ApiRoute("/v1/messages", _messages, "Answer a conversation (Anthropic's Messages).", MessagesRequest),
        ApiRoute("/v1/messages/count_tokens", _count_tokens, "Count the tokens of a prompt.", CountTokensRequest),
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
