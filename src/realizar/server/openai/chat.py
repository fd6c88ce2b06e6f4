"""`POST /v1/chat/completions`."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from realizar.logprob_columns import LogprobColumns
from realizar.server.api import Api, compute, new_id, note, now_s, whole_answer
from realizar.server.generation.answer import WholeChoice
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.logprob_rows import LogprobRows, chat_rows
from realizar.server.generation.token_names import TokenNames
from realizar.server.generation.work import Stop
from realizar.server.http.body import read_record
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.server.openai.chat_stream import ChatStreamer, usage_of
from realizar.server.openai.conversation import read_conversation
from realizar.server.openai.logprobs import prompt_logprobs, write_chat
from realizar.server.openai.records.answers import (
    Answer,
    ChatChoice,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from realizar.server.openai.records.chat import ChatCompletionRequest


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    record = await read_record(request, ChatCompletionRequest)
    max_tokens = record.max_tokens if record.max_completion_tokens is None else record.max_completion_tokens
    need = chats(max_tokens=max_tokens, own_template=record.chat_template is not None)
    api = await model_of(request, record.model, need=need)
    plan = await compute(request, lambda stop: _planned(api, record, stop))
    request_id = new_id("chatcmpl-")
    note(request, model=api.model.name, prompt=len(plan.token_ids))
    run = ChatRun(api, plan, request_id, lease_of(request))
    names = api.names(as_ids=record.return_tokens_as_token_ids)
    top = plan.sampling.logprobs
    rows = None if top is None else names.rows(chat_rows, top)
    if record.stream:
        streamer = ChatStreamer(api, record, plan, run, rows, request_id)
        events = streamer.events(lambda **notes: note(request, **notes))
        return EventStream(events, api.settings.ping_interval_s, api.settings.write_timeout_s)
    answer = await whole_answer(request, run, _whole(api, record, plan, run, names, rows, request_id))
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _planned(api: Api, record: ChatCompletionRequest, stop: Stop) -> ChatPlan:
    """The plan of a request, with the names of tokens made if it wants log-probabilities. Not for the event loop."""
    plan = plan_chat(api, read_conversation(record), stop)
    if plan.sampling.logprobs is not None:
        api.names(as_ids=record.return_tokens_as_token_ids).prepare()
    return plan


async def _whole(
    api: Api,
    record: ChatCompletionRequest,
    plan: ChatPlan,
    run: ChatRun,
    names: TokenNames,
    rows: LogprobRows | None,
    request_id: str,
) -> Answer:
    choices = [WholeChoice() for _ in range(plan.sampling.n)]
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
                message=_message(choice, with_reasoning=record.include_reasoning is not False),
                finish_reason=choice.finish_reason,
                logprobs=None if rows is None else _written_logprobs(choice, rows),
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if record.return_token_ids else UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_of(plan, run),
        prompt_logprobs=None if wanted is None else prompt_logprobs(scored, names, wanted),
        prompt_token_ids=plan.token_ids if record.return_token_ids else UNSET,
    )


def _message(choice: WholeChoice, *, with_reasoning: bool) -> ChatMessage:
    content = "".join(choice.content)
    reasoning = "".join(choice.reasoning) if choice.reasoning and with_reasoning else UNSET
    calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in choice.calls]
    return ChatMessage(
        content=None if calls and not content and reasoning is UNSET else content,  # as a stream begins
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )


def _written_logprobs(choice: WholeChoice, rows: LogprobRows) -> msgspec.Raw:
    written = rows.rows(LogprobColumns.joined(choice.logprobs))
    content = (row for row, kind in zip(written, choice.kinds, strict=False) if kind == "content")
    return msgspec.Raw(write_chat(content))
