"""`MessageStreamer` makes the events of a streamed answer of Anthropic's Messages API.

Each block begins, grows and stops before the next one begins. The first event has the prompt's counts, and comes with
the first output, when the cached tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from realizar.server.anthropic.answers import stop_of, usage_of
from realizar.server.anthropic.records import Message, Usage
from realizar.server.api import Api
from realizar.server.generation.answer import AnswerDelta
from realizar.server.generation.answer_events import Encoder
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

_encoder = msgspec.json.Encoder()
_NO_INPUT: Mapping[str, Any] = {}


def encode_event(name: str, **fields: Any) -> bytes:
    """An event with its name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode({"type": name, **fields}))


class MessageStreamer(Encoder[AnswerDelta]):
    """Makes the events of one request."""

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
