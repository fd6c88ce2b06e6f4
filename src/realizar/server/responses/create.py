"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, compute, new_id, note, whole_answer
from realizar.server.errors import unsupported
from realizar.server.generation.answer import FinishReason
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.logprob_rows import chat_rows
from realizar.server.generation.work import Stop
from realizar.server.http.body import read_record
from realizar.server.http.body_json import parsed_size
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.server.responses.answers import ResponseForm, usage_of
from realizar.server.responses.conversation import ENCRYPTED, includes, read_conversation, shows_summary
from realizar.server.responses.keeper import Keeper
from realizar.server.responses.kept import owner_of, store_of
from realizar.server.responses.output_items import ItemForm, OutputItems
from realizar.server.responses.records import InputTokensRequest, ResponsesRequest
from realizar.server.responses.references import responses_with, with_items
from realizar.server.responses.store import StoredResponse
from realizar.server.responses.stored_items import items_of
from realizar.server.responses.stream import ResponseStreamer
from realizar.server.responses.text_logprobs import TextLogprobs
from realizar.server.responses.tools import ResponseTools, read_tools


@dataclass(frozen=True, slots=True)
class _Planned:
    """A prepared request: its tools, its plan, and the form of its items."""

    tools: ResponseTools
    chat: ChatPlan
    item_form: ItemForm


@dataclass(frozen=True, slots=True)
class _Kept:
    """Kept responses that a request needs: those that it goes on from, and those of items that it refers to."""

    chain: Sequence[StoredResponse]
    referred: Mapping[str, StoredResponse]

    @property
    def responses(self) -> Collection[StoredResponse]:
        """All of them, each once."""
        return {each.id: each for each in (*self.chain, *self.referred.values())}.values()


async def create_response(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    record = await read_record(request, ResponsesRequest)
    api = await model_of(request, record.model, need=chats())
    store, kept = store_of(request), _kept(request, record)
    planned = await compute(request, lambda stop: _planned(api, record, kept, stop), _size(request, kept))
    plan = planned.chat
    response_id = new_id("resp_")
    dropped = {"dropped": plan.num_dropped} if plan.num_dropped else {}
    note(request, model=api.model.name, prompt=len(plan.token_ids), **dropped)
    run = ChatRun(api, plan, response_id, lease_of(request), counts_reasoning=True)
    keeper = None
    if store is not None and record.store is not False:
        keeper = Keeper(store, owner_of(request), lease_of(request).client.name, record)
    form = ResponseForm(api, record, planned.tools, plan, response_id, stored=keeper is not None)
    logprobs = _logprobs(api, plan)
    if record.stream:
        streamer = ResponseStreamer(api, plan, run, form, planned.item_form, logprobs, keeper)
        events = streamer.events(lambda **notes: note(request, **notes))
        return EventStream(events, api.settings.ping_interval_s, api.settings.write_timeout_s)
    whole = _whole(api, plan, run, form, planned.item_form, logprobs)
    answer = await whole_answer(request, run, whole)
    data = msgspec.json.encode(answer)
    if keeper is not None:
        keeper.keep(response_id, data)
    return Response(data, media_type="application/json")


async def count_input_tokens(request: Request) -> Response:
    """Answer with the number of tokens of a prompt, as the chat template renders it."""
    record = await read_record(request, InputTokensRequest)
    api = await model_of(request, record.model, need=chats())
    kept = _kept(request, record)
    planned = await compute(request, lambda stop: _planned(api, record, kept, stop), _size(request, kept))
    counted = {"object": "response.input_tokens", "input_tokens": len(planned.chat.token_ids)}
    return Response(msgspec.json.encode(counted), media_type="application/json")


def _kept(request: Request, record: InputTokensRequest) -> _Kept:
    """The kept responses that a request needs. Their memory counts as the request's."""
    kept = _Kept(_chain(request, record), responses_with(record, store_of(request), owner_of(request)))
    lease_of(request).take(sum(parsed_size(each.items) + parsed_size(each.response) for each in kept.responses))
    return kept


def _chain(request: Request, record: InputTokensRequest) -> list[StoredResponse]:
    previous, store = record.previous_response_id, store_of(request)
    if previous is None:
        return []
    if store is None:
        raise unsupported(
            "previous_response_id", "is not supported: the server keeps no responses (--stored-responses turns it on)"
        )
    return store.chain(previous, owner_of(request))


def _size(request: Request, kept: _Kept) -> int:
    return lease_of(request).body_bytes + sum(each.num_bytes for each in kept.responses)


def _planned(api: Api, record: InputTokensRequest, kept: _Kept, stop: Stop) -> _Planned:
    """Read a request and plan it. Not for the event loop."""
    with_items(record, kept.referred)
    tools = read_tools(record.tools, record.tool_choice, parallel=record.parallel_tool_calls is not False)
    plan = plan_chat(api, read_conversation(record, tools, items_of(kept.chain, with_last_output=True)), stop)
    if plan.sampling.logprobs is not None:
        api.names(as_ids=False).prepare()
    form = ItemForm(
        as_summary=shows_summary(record),
        is_sealed=isinstance(record, ResponsesRequest) and includes(record, ENCRYPTED),
        namespaces=tools.namespaces,
        custom=tools.custom,
    )
    return _Planned(tools, plan, form)


def _logprobs(api: Api, plan: ChatPlan) -> TextLogprobs | None:
    top = plan.sampling.logprobs
    return None if top is None else TextLogprobs(api.names(as_ids=False).rows(chat_rows, top))


async def _whole(
    api: Api,
    plan: ChatPlan,
    run: ChatRun,
    form: ResponseForm,
    item_form: ItemForm,
    logprobs: TextLogprobs | None,
) -> dict[str, Any]:
    items = OutputItems(item_form)
    reason: FinishReason = "stop"
    async with aclosing(run.deltas()) as deltas:
        async for delta in deltas:
            if logprobs is not None:
                logprobs.take_in(delta)
            for part in delta.parsed:
                item, _ = items.take_in(part)
                if logprobs is not None:
                    logprobs.taken_for(item)
            if delta.finish_reason is not None:
                reason = delta.finish_reason
    if items.last is None:
        items.begin_message()
    return form.ended(items.records(is_whole=reason != "length"), usage_of(api, plan, run), reason)
