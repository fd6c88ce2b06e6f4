"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from realizar.logprob_columns import LogprobColumns
from realizar.server.api import Api, new_id, now_s
from realizar.server.generation.answer import AnswerDelta, WholeChoice
from realizar.server.generation.answer_events import AnswerEvents, Encoder
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.logprob_rows import LogprobRows, RowsOfKinds, chat_rows
from realizar.server.generation.prompt_read import PromptRead
from realizar.server.http.body import read_record
from realizar.server.http.request import compute, note
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventTemplate, encode_event
from realizar.server.http.work import Stop
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.server.openai.conversation import read_conversation
from realizar.server.openai.logprobs import prompt_logprobs, write_chat
from realizar.server.openai.records import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionRequest,
    ChatDelta,
    ChatMessage,
    ChatToolCallDelta,
    FunctionCall,
    StreamOptions,
    ToolCall,
    Usage,
    make_usage,
)
from realizar.server.token_names import TokenNames
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta


async def chat_completions(request: Request) -> Response:
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
    events = AnswerEvents(request, run, api.settings)
    if record.stream:
        return events.stream(ChatStreamer(api, record, plan, run, rows, request_id))
    choices = [WholeChoice() for _ in range(plan.sampling.n)]
    await events.whole(lambda delta: choices[delta.index].take_in(delta))
    answer = _whole(api, record, plan, run, choices, names, rows, request_id)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _planned(api: Api, record: ChatCompletionRequest, stop: Stop) -> ChatPlan:
    """The plan of a request, with the names of tokens made if it wants log-probabilities. Not for the event loop."""
    plan = plan_chat(api, read_conversation(record), stop)
    if plan.sampling.logprobs is not None:
        api.names(as_ids=record.return_tokens_as_token_ids).prepare()
    return plan


def _whole(
    api: Api,
    record: ChatCompletionRequest,
    plan: ChatPlan,
    run: ChatRun,
    choices: Sequence[WholeChoice],
    names: TokenNames,
    rows: LogprobRows | None,
    request_id: str,
) -> Answer:
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
        usage=_usage_of(plan, run),
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


# `ChatStreamer` makes the chunks of a chat answer: the role, deltas, the finish reason, and the usage if wanted.


class ChatStreamer(Encoder[AnswerDelta]):
    """Makes the chunks of one chat request; `rows` write its log-probabilities, if there are any."""

    def __init__(
        self,
        api: Api,
        request: ChatCompletionRequest,
        plan: ChatPlan,
        run: ChatRun,
        rows: LogprobRows | None,
        request_id: str,
    ) -> None:
        self._api, self._plan, self._run = api, plan, run
        self._rows = None if rows is None else [RowsOfKinds(rows, ("content",)) for _ in range(plan.sampling.n)]
        options = request.stream_options or StreamOptions()
        self._last_usage = bool(options.include_usage)
        self._every_usage = self._last_usage and bool(options.continuous_usage_stats)
        self._with_ids = bool(request.return_token_ids)
        self._prompt_ids: Sequence[int] | UnsetType = plan.token_ids if self._with_ids else UNSET  # of the first chunk
        self._with_reasoning = request.include_reasoning is not False
        self._request_id, self._created = request_id, now_s()
        self._named: set[int] = set()  # choices whose role was sent
        self._begun: set[int] = set()  # those whose message has begun
        self._started_s = time.monotonic()
        self._logprobs: bytes | None = None  # of the delta at hand
        self._templates: dict[int, EventTemplate] = {}

    def grown(self, delta: AnswerDelta) -> bytes:
        self._logprobs = self._logprobs_of(delta)
        data = self._progress(delta) or self._only_text(delta)
        if data is None:
            chunks = (self._chunk([choice], self._usage_so_far()) for choice in self._choices(delta))
            data = b"".join(map(encode_event, chunks))
        return data

    def last(self) -> bytes:
        return encode_event(self._chunk([], _usage_of(self._plan, self._run))) if self._last_usage else b""

    def _progress(self, gained: AnswerDelta) -> bytes | None:
        """The event of a delta that tells of the prompt; None for any other. The first one carries the role."""
        read = gained.source.prompt_progress
        if read is None:
            return None
        choice = ChatChunkChoice(gained.index, self._named_delta(gained.index, ChatDelta()))
        chunk = self._chunk([choice], self._usage_so_far())
        chunk.prompt_progress = PromptRead.of(read, self._started_s)
        return encode_event(chunk)

    def _only_text(self, gained: AnswerDelta) -> bytes | None:
        """The event of a delta that is one text, after the first of its choice; None for any other."""
        if self._every_usage or self._with_ids or gained.finish_reason is not None or len(gained.parsed) != 1:
            return None
        part = gained.parsed[0]
        if gained.index not in self._begun or not isinstance(part, ContentDelta):
            return None
        template = self._templates.get(gained.index)
        if template is None:
            template = self._templates[gained.index] = self._template(gained.index)
        if self._rows is None:
            return template.encode(part.text)
        return template.encode(part.text, self._logprobs or b"null")

    def _template(self, index: int) -> EventTemplate:
        empty = ChatChunkChoice(index, ChatDelta(content=""))
        varying = None if self._rows is None else "logprobs"
        return EventTemplate(self._chunk([empty], self._usage_so_far()), "content", varying)

    def _logprobs_of(self, gained: AnswerDelta) -> bytes | None:
        """The log-probabilities of a delta's content as JSON; None without any."""
        rows = None if self._rows is None else self._rows[gained.index].take_in(gained)
        return write_chat(rows) if rows else None

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._every_usage:
            return _usage_of(self._plan, self._run)
        return None if self._last_usage else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> Answer:
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        return Answer(
            id=self._request_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._api.model.name,
            system_fingerprint=self._api.fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def _choices(self, gained: AnswerDelta) -> Iterator[ChatChunkChoice]:
        logprobs = None if self._logprobs is None else msgspec.Raw(self._logprobs)
        ids: Sequence[int] | UnsetType = gained.source.token_ids if self._with_ids else UNSET
        for delta in self._deltas(gained):
            listed = logprobs if delta.content else None  # tokens of content come with their text
            yield ChatChunkChoice(gained.index, self._named_delta(gained.index, delta), None, listed, token_ids=ids)
            logprobs, ids = None if listed else logprobs, UNSET
        if gained.finish_reason is not None:
            stop = gained.source.stop_reason
            ended = UNSET if stop is None else stop
            yield ChatChunkChoice(gained.index, ChatDelta(), gained.finish_reason, None, ended, token_ids=ids)
        elif ids:
            yield ChatChunkChoice(gained.index, self._named_delta(gained.index, ChatDelta()), token_ids=ids)

    def _deltas(self, gained: AnswerDelta) -> list[ChatDelta]:
        """What the message gains, so that it has a content from its beginning: clients make null of one without."""
        deltas = [made for part in gained.parsed if (made := self._delta(part)) is not None]
        if gained.index in self._begun:
            return deltas
        if not deltas and gained.finish_reason is not None:
            deltas = [ChatDelta(content="")]
        if deltas:
            self._begun.add(gained.index)
            if deltas[0].content is UNSET:
                deltas[0].content = None if deltas[0].reasoning_content is UNSET else ""
        return deltas

    def _named_delta(self, index: int, delta: ChatDelta) -> ChatDelta:
        if index not in self._named:
            self._named.add(index)
            delta.role = "assistant"
        return delta

    def _delta(self, delta: ParsedDelta) -> ChatDelta | None:
        match delta:
            case ContentDelta(text):
                return ChatDelta(content=text)
            case ReasoningDelta(text):
                return ChatDelta(reasoning_content=text) if self._with_reasoning else None
            case ToolCallDelta():
                named = delta.id is not None
                return ChatDelta(
                    tool_calls=[
                        ChatToolCallDelta(
                            index=delta.index,
                            function=FunctionCall(delta.name if delta.name is not None else UNSET, delta.arguments),
                            id=delta.id if delta.id is not None else UNSET,
                            type="function" if named else UNSET,
                        )
                    ]
                )


def _usage_of(plan: ChatPlan, run: ChatRun) -> Usage:
    return make_usage(len(plan.token_ids), run.num_completion_tokens, run.num_cached_tokens, run.state_snapshots)
