"""Anthropic's dialect: its routes, its answers whole and as events, and the form of its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.anthropic.conversation import marks_cache, read_conversation, shows_reasoning
from realizar.server.anthropic.records import CountTokensRequest, MessagesRequest
from realizar.server.api import new_id
from realizar.server.errors import ApiError
from realizar.server.generation.answer import AnswerDelta, AnswerPart, AnswerParts, PartKind, arguments_object
from realizar.server.generation.chat_plan import plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.run import Encoder
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.request import compute, json_response
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import named_event
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats

_encoder = msgspec.json.Encoder()
_DELTAS: Mapping[PartKind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Types of the deltas of each kind of part, and the fields of their texts."""


def _block(part: AnswerPart, text: str) -> dict[str, Any]:
    """The content block of a part, with its text, or with none as it begins."""
    if part.kind == "content":
        return {"type": "text", "text": text}
    if part.call is None:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": arguments_object(text)}


class _MessageEncoder(Encoder[AnswerDelta]):
    """Makes a message, or the events of one.

    Each block begins, grows and stops before the next one begins. The first event has the prompt's counts, and comes
    with the first output, when the cached tokens are known.
    """

    def __init__(self, record: MessagesRequest, run: ChatRun) -> None:
        self._run, self._marks_cache = run, marks_cache(record)
        self._parts = AnswerParts(with_reasoning=shows_reasoning(record))
        self._started = False
        self._open: AnswerPart | None = None

    def take_in(self, delta: AnswerDelta) -> None:
        self._parts.take_in(delta)

    def whole(self) -> bytes:
        blocks = [_block(part, part.text) for part in self._parts.parts]
        return _encoder.encode(self._message(blocks, self._usage(), *self._stop()))

    def grown(self, delta: AnswerDelta) -> bytes:
        start, self._started = b"" if self._started else self._start(), True
        return start + b"".join(self._grown(delta))

    def _message(
        self, blocks: list[Any], usage: dict[str, Any], reason: str | None = None, sequence: str | None = None
    ) -> dict[str, Any]:
        return {
            "id": self._run.id,
            "type": "message",
            "role": "assistant",
            "model": self._run.api.model.name,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        """The counts so far; the prompt is the sum of the three kinds of input.

        The cache is filled without `cache_control` too, but only who asks for it looks for its tokens elsewhere than in
        `input_tokens`.
        """
        run, num_cached = self._run, self._run.num_cached_tokens or 0
        num_created = run.num_created_tokens if self._marks_cache else 0
        return {
            "input_tokens": run.num_prompt_tokens - num_cached - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_cached,
            "output_tokens": run.num_completion_tokens,
            **run.snapshots,
        }

    def _stop(self) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence` of an answer that ended."""
        stopped_by = self._parts.stop_reason
        match self._parts.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length":
                return ("model_context_window_exceeded" if self._run.plan.cut_by_context else "max_tokens"), None
            case "stop":
                return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)

    def _start(self) -> bytes:
        return named_event("message_start", message=self._message([], {**self._usage(), "output_tokens": 0}))

    def _grown(self, delta: AnswerDelta) -> Iterator[bytes]:
        for part, text in self._parts.take_in(delta):
            if part is not self._open:
                yield from self._stop_block()
                self._open = part
                yield named_event("content_block_start", index=part.index, content_block=_block(part, ""))
            if text:
                kind, field = _DELTAS[part.kind]
                yield self._delta(part, {"type": kind, field: text})
        if delta.finish_reason is None:
            return
        yield from self._stop_block()
        reason, sequence = self._stop()
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        yield named_event("message_delta", delta=stop, usage=self._usage())
        yield named_event("message_stop")

    def _stop_block(self) -> Iterator[bytes]:
        part, self._open = self._open, None
        if part is None:
            return
        if part.kind == "reasoning":  # clients wait for it, though there is nothing to prove here
            yield self._delta(part, {"type": "signature_delta", "signature": ""})
        yield named_event("content_block_stop", index=part.index)

    def _delta(self, part: AnswerPart, delta: dict[str, str]) -> bytes:
        return named_event("content_block_delta", index=part.index, delta=delta)


# `POST /v1/messages` and `POST /v1/messages/count_tokens`.


async def _messages(request: Request) -> Response:
    record = await read_record(request, MessagesRequest)
    api = await model_of(request, record.model, need=chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_conversation(record), stop))
    run = ChatRun(api, plan, new_id("msg_"), lease_of(request))
    return await run.answer(request, _MessageEncoder(record, run), stream=record.stream)


async def _count_tokens(request: Request) -> Response:
    record = await read_record(request, CountTokensRequest)
    api = await model_of(request, record.model, need=chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_conversation(record), stop))
    return json_response({"input_tokens": len(plan.token_ids)})


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
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": error.whole_message, **details}}


def _error_event(error: ApiError) -> bytes:
    return named_event("error", error=error_body(error)["error"])


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
    stream=StreamForm(ping=named_event("ping"), end=b"", error=_error_event),
    statuses=_STATUSES,
    request_id_header="request-id",
)
