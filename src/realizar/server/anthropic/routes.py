"""Anthropic's dialect: its routes, its answers whole and as events, and the form of its errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.anthropic.conversation import marks_cache, read_conversation, shows_reasoning
from realizar.server.anthropic.records import CountTokensRequest, Message, MessagesRequest, Usage
from realizar.server.api import Api, new_id
from realizar.server.errors import ApiError
from realizar.server.generation.answer import AnswerDelta, FinishReason, arguments_object
from realizar.server.generation.answer_events import AnswerEvents, Encoder
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.usage import prompt_counts
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.request import compute, note
from realizar.server.http.request_memory import lease_of
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

# Whole answers of Anthropic's Messages API, and the counts of tokens in its form.


def usage_of(api: Api, plan: ChatPlan, run: ChatRun, *, marks_cache: bool) -> Usage:
    """The counts so far. With `marks_cache` the request has `cache_control`.

    The cache is filled without it too, but only who asks for it looks for its tokens elsewhere than in `input_tokens`.
    """
    prompt = prompt_counts(api, plan, run)
    num_created = prompt.num_created if marks_cache else 0
    return Usage(
        input_tokens=len(plan.token_ids) - prompt.num_cached - num_created,
        cache_creation_input_tokens=num_created,
        cache_read_input_tokens=prompt.num_cached,
        output_tokens=run.num_completion_tokens,
        state_snapshots=run.state_snapshots,
    )


def stop_of(plan: ChatPlan, reason: FinishReason, stopped_by: str | int | None) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence` of an answer that ended."""
    if reason == "tool_calls":
        return "tool_use", None
    if reason == "length":
        return ("model_context_window_exceeded" if plan.cut_by_context else "max_tokens"), None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


class BlockList:
    """The content blocks of a whole answer, in the order in which a stream would begin them."""

    def __init__(self, *, with_reasoning: bool) -> None:
        self._with_reasoning = with_reasoning
        self._kinds: list[str] = []
        self._texts: list[list[str]] = []
        self._calls: dict[int, ToolCallDelta] = {}

    def take_in(self, part: ParsedDelta) -> None:
        match part:
            case ContentDelta(text):
                self._grow("text", text)
            case ReasoningDelta(text):
                if self._with_reasoning:
                    self._grow("thinking", text)
            case ToolCallDelta():
                self._calls.setdefault(part.index, part)
                self._grow(f"call {part.index}", part.arguments)

    def blocks(self) -> list[dict[str, Any]]:
        return [self._block(kind, "".join(texts)) for kind, texts in zip(self._kinds, self._texts, strict=True)]

    def _grow(self, kind: str, text: str) -> None:
        if not self._kinds or self._kinds[-1] != kind:
            self._kinds.append(kind)
            self._texts.append([])
        self._texts[-1].append(text)

    def _block(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": text}
        if kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        call = self._calls[int(kind.removeprefix("call "))]
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(text)}


# `MessageStreamer` makes the events of a streamed answer of Anthropic's Messages API.
#
# Each block begins, grows and stops before the next one begins. The first event has the prompt's counts, and comes with
# the first output, when the cached tokens are known.

_encoder = msgspec.json.Encoder()
_NO_INPUT: Mapping[str, Any] = {}


def encode_event(name: str, **fields: Any) -> bytes:
    """An event with its name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode({"type": name, **fields}))


class MessageStreamer(Encoder[AnswerDelta]):
    def __init__(
        self, api: Api, plan: ChatPlan, run: ChatRun, request_id: str, *, with_reasoning: bool, marks_cache: bool
    ) -> None:
        self._api, self._plan, self._run, self._request_id = api, plan, run, request_id
        self._with_reasoning, self._marks_cache = with_reasoning, marks_cache
        self._started, self._index = False, -1
        self._open: str | None = None  # the kind of the open block; of a call with its index

    def grown(self, delta: AnswerDelta) -> bytes:
        start, self._started = b"" if self._started else self._start(), True
        return start + b"".join(self._grown(delta))

    def _usage(self) -> Usage:
        return usage_of(self._api, self._plan, self._run, marks_cache=self._marks_cache)

    def _start(self) -> bytes:
        usage = self._usage()
        usage.output_tokens = 0
        message = Message(
            id=self._request_id,
            model=self._api.model.name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )
        return encode_event("message_start", message=message)

    def _grown(self, delta: AnswerDelta) -> Iterator[bytes]:
        for part in delta.parsed:
            if self._with_reasoning or not isinstance(part, ReasoningDelta):
                yield from self._part(part)
        if delta.finish_reason is None:
            return
        yield from self._stop_block()
        reason, sequence = stop_of(self._plan, delta.finish_reason, delta.source.stop_reason)
        usage = self._usage()
        yield encode_event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
        yield encode_event("message_stop")

    def _part(self, part: ParsedDelta) -> Iterator[bytes]:
        match part:
            case ContentDelta(text):
                yield from self._begin("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallDelta():
                call = {"type": "tool_use", "id": part.id, "name": part.name, "input": _NO_INPUT}
                yield from self._begin(f"call {part.index}", call)
                if part.arguments:
                    yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._stop_block()
        self._open = kind
        self._index += 1
        yield encode_event("content_block_start", index=self._index, content_block=block)

    def _stop_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":  # clients wait for it, though there is nothing to prove here
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = None
        yield encode_event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return encode_event("content_block_delta", index=self._index, delta=delta)


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
    """Its form has no place for the field at fault: the message names it."""
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
