"""`POST /v1/chat/completions`."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from realizar.logprob_columns import LogprobColumns
from realizar.server.api import Api, api_of, compute, new_id, note, now_s
from realizar.server.generation.token_names import TokenNames
from realizar.server.http.body import read_record
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.openai.chat_plan import ChatPlan, plan_chat
from realizar.server.openai.chat_run import AnswerDelta, ChatRun
from realizar.server.openai.chat_stream import ChatStreamer
from realizar.server.openai.logprobs import LogprobRows, chat_rows, prompt_logprobs, write_chat
from realizar.server.openai.records.answers import (
    Answer,
    ChatChoice,
    ChatMessage,
    FinishReason,
    FunctionCall,
    ToolCall,
)
from realizar.server.openai.records.chat import ChatCompletionRequest
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta, ToolCallDelta


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    api = api_of(request)
    record = await read_record(request, ChatCompletionRequest)
    plan = await compute(request, lambda stop: plan_chat(api, record, stop))
    request_id = new_id("chatcmpl")
    note(request, model=api.model.name, prompt=len(plan.token_ids))
    run = ChatRun(api, record, plan, request_id, lease_of(request))
    names = api.names(as_ids=record.return_tokens_as_token_ids)
    rows = None if plan.top_logprobs is None else names.rows(chat_rows, plan.top_logprobs)
    if record.stream:
        streamer = ChatStreamer(api, record, plan, run, rows, request_id)
        events = streamer.events(lambda **notes: note(request, **notes))
        return EventStream(events, api.settings.ping_interval_s, api.settings.write_timeout_s)
    answer = await unless_disconnected(request.receive, _whole(api, record, plan, run, names, rows, request_id))
    note(request, **run.notes)
    return Response(msgspec.json.encode(answer), media_type="application/json")


@dataclass(slots=True)
class _Choice:
    """One choice of the answer while it is assembled."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[LogprobColumns] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None

    def take_in(self, delta: AnswerDelta) -> None:
        for part in delta.parsed:
            match part:
                case ContentDelta(text):
                    self.content.append(text)
                case ReasoningDelta(text):
                    self.reasoning.append(text)
                case ToolCallDelta():
                    self._take_in_call(part)
        if delta.source.logprobs:
            self.logprobs.append(LogprobColumns.of(delta.source.logprobs))
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.source.stop_reason

    def _take_in_call(self, delta: ToolCallDelta) -> None:
        if delta.index == len(self.calls):
            self.calls.append(ToolCall(delta.id or "", FunctionCall(delta.name or "", "")))
        self.calls[delta.index].function.arguments += delta.arguments

    def written_logprobs(self, rows: LogprobRows) -> msgspec.Raw:
        return msgspec.Raw(write_chat(rows.rows(LogprobColumns.joined(self.logprobs))))

    def message(self, *, with_reasoning: bool) -> ChatMessage:
        content = "".join(self.content)
        return ChatMessage(
            content=None if self.calls and not content else content,
            reasoning_content="".join(self.reasoning) if self.reasoning and with_reasoning else UNSET,
            tool_calls=self.calls or UNSET,
        )


async def _whole(
    api: Api,
    record: ChatCompletionRequest,
    plan: ChatPlan,
    run: ChatRun,
    names: TokenNames,
    rows: LogprobRows | None,
    request_id: str,
) -> Answer:
    choices = [_Choice() for _ in range(plan.sampling.n)]
    async with aclosing(run.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.index].take_in(delta)
    wanted = plan.sampling.prompt_logprobs
    scored = run.output.prompt_logprobs if run.output is not None else None
    return Answer(
        id=request_id,
        object="chat.completion",
        created=now_s(),
        model=api.model.name,
        system_fingerprint=api.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=choice.message(with_reasoning=record.include_reasoning is not False),
                finish_reason=choice.finish_reason,
                logprobs=None if rows is None else choice.written_logprobs(rows),
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=run.usage,
        prompt_logprobs=UNSET if wanted is None else prompt_logprobs(scored, names, wanted),
    )
