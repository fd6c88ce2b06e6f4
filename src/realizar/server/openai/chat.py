"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import new_id
from realizar.server.generation.answer import AnswerDelta, AnswerParts
from realizar.server.generation.chat_plan import plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.http.body import read_record
from realizar.server.http.request import compute
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import encode_event
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.server.openai.chunks import ChunkEncoder, usage_of
from realizar.server.openai.conversation import read_conversation
from realizar.server.openai.logprobs import prompt_logprobs, write_chat
from realizar.server.openai.records import (
    Answer,
    ChatChoice,
    ChatCompletionRequest,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta


async def chat_completions(request: Request) -> Response:
    record = await read_record(request, ChatCompletionRequest)
    max_tokens = record.max_tokens if record.max_completion_tokens is None else record.max_completion_tokens
    need = chats(max_tokens=max_tokens, own_template=record.chat_template is not None)
    api = await model_of(request, record.model, need=need)
    plan = await compute(request, lambda stop: plan_chat(api, read_conversation(record), stop))
    run = ChatRun(api, plan, new_id("chatcmpl-"), lease_of(request))
    return await run.answer(request, _ChatEncoder(record, run), stream=record.stream)


class _ChatEncoder(ChunkEncoder[AnswerDelta]):
    """Makes the chunks of a chat: the role, deltas, the finish reason, and the usage if wanted; or all in one."""

    def __init__(self, record: ChatCompletionRequest, run: ChatRun) -> None:
        super().__init__(record, run, "chat.completion.chunk")
        self._run, plan = run, run.plan
        self._with_reasoning = record.include_reasoning is not False
        self._parts = [AnswerParts(with_reasoning=self._with_reasoning) for _ in range(plan.sampling.n)]
        self._prompt_ids: Sequence[int] | UnsetType = plan.token_ids if self._with_ids else UNSET  # of the first chunk
        self._named: set[int] = set()  # choices whose role was sent
        self._begun: set[int] = set()  # those whose message has begun

    def take_in(self, delta: AnswerDelta) -> None:
        self._parts[delta.index].take_in(delta)

    def whole(self) -> bytes:
        scored = self._run.output.prompt_logprobs if self._run.output is not None else None
        wanted = self._run.plan.sampling.prompt_logprobs
        choices = [self._whole(index, parts) for index, parts in enumerate(self._parts)]
        answer = self._answer(choices, usage_of(self._run))
        answer.object = "chat.completion"
        answer.prompt_logprobs = None if wanted is None else prompt_logprobs(scored, self._names, wanted)
        return msgspec.json.encode(answer)

    def _whole(self, index: int, parts: AnswerParts) -> ChatChoice:
        content, reasoning = parts.text("content"), parts.text("reasoning") or UNSET
        calls = [
            ToolCall(FunctionCall(call.name or "", part.text), id=call.id or "", type="function")
            for part in parts.of("call")
            if (call := part.call) is not None
        ]
        message = ChatMessage(
            role="assistant",
            content=None if calls and not content and reasoning is UNSET else content,  # as a stream begins
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
            refusal=None,
        )
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=parts.finish_reason,
            logprobs=None if self._run.plan.rows is None else msgspec.Raw(write_chat(parts.rows)),
            stop_reason=parts.stop_reason,
            token_ids=parts.token_ids if self._with_ids else UNSET,
        )

    def grown(self, delta: AnswerDelta) -> bytes:
        read = delta.source.prompt_progress
        if read is not None:  # the first one carries the role
            return self._progress(self._delta_choice(delta.index, ChatMessage()), read)
        data = self._only_text(delta)
        return b"".join(encode_event(self._chunk(each)) for each in self._choices(delta)) if data is None else data

    def _only_text(self, gained: AnswerDelta) -> bytes | None:
        """The event of a delta that is one text, after the first of its choice; None for any other."""
        if self._every_usage or self._with_ids or gained.finish_reason is not None or len(gained.parsed) != 1:
            return None
        part = gained.parsed[0]
        if gained.index not in self._begun or not isinstance(part, ContentDelta):
            return None
        has_logprobs = self._run.plan.rows is not None
        template = self._templates.get(gained.index)
        if template is None:
            empty = ChatChoice(gained.index, delta=ChatMessage(content=""))
            template = self._template(empty, "content", has_logprobs=has_logprobs)
        if not has_logprobs:
            return template.encode(part.text)
        return template.encode(part.text, write_chat(gained.rows) if gained.rows else b"null")

    def _answer(self, choices: list[ChatChoice], usage: dict[str, Any] | UnsetType | None) -> Answer:
        answer = super()._answer(choices, usage)
        answer.prompt_token_ids, self._prompt_ids = self._prompt_ids, UNSET
        return answer

    def _choices(self, gained: AnswerDelta) -> Iterator[ChatChoice]:
        logprobs = msgspec.Raw(write_chat(gained.rows)) if gained.rows else None
        ids: Sequence[int] | UnsetType = gained.source.token_ids if self._with_ids else UNSET
        for delta in self._deltas(gained):
            listed = logprobs if delta.content else None  # tokens of content come with their text
            yield self._delta_choice(gained.index, delta, logprobs=listed, token_ids=ids)
            logprobs, ids = None if listed else logprobs, UNSET
        if gained.finish_reason is not None:
            stop = gained.source.stop_reason
            ended = UNSET if stop is None else stop
            yield ChatChoice(gained.index, UNSET, ChatMessage(), gained.finish_reason, None, ended, ids)
        elif ids:
            yield self._delta_choice(gained.index, ChatMessage(), token_ids=ids)

    def _deltas(self, gained: AnswerDelta) -> list[ChatMessage]:
        """What the message gains, so that it has a content from its beginning: clients make null of one without."""
        deltas = [made for part in gained.parsed if (made := self._delta(part)) is not None]
        if gained.index in self._begun:
            return deltas
        if not deltas and gained.finish_reason is not None:
            deltas = [ChatMessage(content="")]
        if deltas:
            self._begun.add(gained.index)
            if deltas[0].content is UNSET:
                deltas[0].content = None if deltas[0].reasoning_content is UNSET else ""
        return deltas

    def _delta_choice(self, index: int, delta: ChatMessage, **fields: Any) -> ChatChoice:
        """What a choice gained; the first time with its role."""
        if index not in self._named:
            self._named.add(index)
            delta.role = "assistant"
        return ChatChoice(index, delta=delta, **fields)

    def _delta(self, delta: ParsedDelta) -> ChatMessage | None:
        match delta:
            case ContentDelta(text):
                return ChatMessage(content=text)
            case ReasoningDelta(text):
                return ChatMessage(reasoning_content=text) if self._with_reasoning else None
            case ToolCallDelta(index, call_id, name, arguments):
                call = ToolCall(FunctionCall(UNSET if name is None else name, arguments), index)
                if call_id is not None:
                    call.id, call.type = call_id, "function"
                return ChatMessage(tool_calls=[call])
