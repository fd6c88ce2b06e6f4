"""The Responses API: its routes and the form of its streams. Its errors have the form of OpenAI's other APIs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, new_id, now_s
from realizar.server.errors import PLAIN_SCHEMA, ApiError, plain_body, refused, unsupported
from realizar.server.generation.answer import AnswerDelta
from realizar.server.generation.chat_plan import ChatPlan, plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.prompt_read import PromptRead
from realizar.server.generation.run import Encoder
from realizar.server.http.body import read_record
from realizar.server.http.body_json import parsed_size
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.request import compute, json_response
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import named_event
from realizar.server.http.unknown_fields import known_only
from realizar.server.http.work import Stop
from realizar.server.models.models import model_of
from realizar.server.models.needs import chats
from realizar.server.responses.conversation import ENCRYPTED, includes, read_conversation, shows_summary
from realizar.server.responses.output_items import Item, ItemForm, OutputItems
from realizar.server.responses.records import (
    InputTokensRequest,
    ReasoningConfig,
    ResponsesRequest,
)
from realizar.server.responses.store import (
    ResponseStore,
    StoredResponse,
    cancel_response,
    delete_response,
    items_of,
    keep_response,
    list_input_items,
    owner_of,
    show_response,
    store_of,
)
from realizar.server.responses.tools import ResponseTools, read_tools

_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields of a request that its response repeats as they are."""


def _head(run: ChatRun, request: ResponsesRequest, tools: ResponseTools, *, stored: bool) -> dict[str, Any]:
    """The fields of a response object that stay as it grows; `stored`: the response will be kept."""
    plan, reasoning = run.plan, request.reasoning or ReasoningConfig()
    form = msgspec.to_builtins(None if request.text is None else request.text.format) or {"type": "text"}
    return {
        "id": run.id,
        "object": "response",
        "created_at": now_s(),
        "model": run.api.model.name,
        "background": False,
        **{name: getattr(request, name) for name in _REPEATED},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": "default",
        "store": stored,
        "temperature": plan.sampling.temperature,
        "presence_penalty": plan.sampling.presence_penalty,
        "frequency_penalty": plan.sampling.frequency_penalty,
        "text": {
            "format": {name: value for name, value in form.items() if value is not None},
            "verbosity": "medium",
        },
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": msgspec.Raw(msgspec.json.encode(tools.shown)),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": plan.sampling.top_p,
        "truncation": request.truncation or "disabled",
        **({"dropped_messages": plan.num_dropped} if plan.num_dropped else {}),
    }


# `POST /v1/responses` and `POST /v1/responses/input_tokens`.


@dataclass(frozen=True, slots=True)
class _Kept:
    """Kept responses that a request needs: those that it goes on from, and those of items that it refers to."""

    chain: Sequence[StoredResponse]
    referred: Mapping[str, StoredResponse]

    @property
    def responses(self) -> Collection[StoredResponse]:
        """All of them, each once."""
        return {each.id: each for each in (*self.chain, *self.referred.values())}.values()


async def _create_response(request: Request) -> Response:
    record = await read_record(request, ResponsesRequest)
    api = await model_of(request, record.model, need=chats())
    store, kept = store_of(request), _kept(request, record)
    tools, plan = await compute(request, lambda stop: _planned(api, record, kept, stop), _size(request, kept))
    run, keep = ChatRun(api, plan, new_id("resp_"), lease_of(request), counts_reasoning=True), None
    if store is not None and record.store is not False:
        keep = functools.partial(keep_response, store, record, run.id, owner_of(request), lease_of(request).client.name)
    form = ItemForm(tools=tools, as_summary=shows_summary(record), is_sealed=includes(record, ENCRYPTED))
    encoder = _ResponseEncoder(run, _head(run, record, tools, stored=keep is not None), OutputItems(form), keep)
    return await run.answer(request, encoder, stream=record.stream)


async def _count_input_tokens(request: Request) -> Response:
    record = await read_record(request, InputTokensRequest)
    api = await model_of(request, record.model, need=chats())
    kept = _kept(request, record)
    _, plan = await compute(request, lambda stop: _planned(api, record, kept, stop), _size(request, kept))
    counted = {"object": "response.input_tokens", "input_tokens": len(plan.token_ids)}
    return json_response(counted)


def _kept(request: Request, record: InputTokensRequest) -> _Kept:
    """The kept responses that a request needs. Their memory counts as the request's."""
    kept = _Kept(_chain(request, record), _responses_with(record, store_of(request), owner_of(request)))
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


def _planned(api: Api, record: InputTokensRequest, kept: _Kept, stop: Stop) -> tuple[ResponseTools, ChatPlan]:
    """Read a request and plan it. Not for the event loop."""
    _with_items(record, kept.referred)
    tools = read_tools(record.tools, record.tool_choice, parallel=record.parallel_tool_calls is not False)
    return tools, plan_chat(api, read_conversation(record, tools, items_of(kept.chain, with_last_output=True)), stop)


# Items of `input` that are references to items of kept responses: they are replaced by the items that they mean.

_KIND = "item_reference"


def _responses_with(record: InputTokensRequest, store: ResponseStore | None, owner: str) -> dict[str, StoredResponse]:
    """The kept responses of the items that a request refers to, by the items' ids.

    Raises ApiError: 400; an item is not there or is meant twice, or the server keeps none. References to one item would
    make a small request as large as a client likes.
    """
    found: dict[str, StoredResponse] = {}
    given = record.input
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if not _is_reference(item):
            continue
        where = f"input[{place}]"
        known_only(where, item, ("type", "id"))
        item_id = item.get("id")
        if not isinstance(item_id, str):
            raise refused(f"{where}.id must be text", f"{where}.id")
        if store is None:
            raise unsupported(
                f"{where}.type", f"'{_KIND}' is not supported: the server keeps no responses (--stored-responses does)"
            )
        if item_id in found:
            raise refused(f"{where}.id: the item {item_id[:100]!a} is there already", f"{where}.id", "duplicate_item")
        stored = store.with_item(item_id, owner)
        if stored is None:
            raise refused(f"{where}.id: there is no item {item_id[:100]!a}", f"{where}.id", "item_not_found")
        found[item_id] = stored
    return found


def _with_items(record: InputTokensRequest, found: Mapping[str, StoredResponse]) -> None:
    """Replace the references of a request by their items, in place. Args: found: of `_responses_with`."""
    if not found or not isinstance(record.input, list):
        return
    items_by_response = {
        stored.id: {item["id"]: item for item in items_of([stored], with_last_output=True)}
        for stored in {each.id: each for each in found.values()}.values()
    }
    items = {item_id: items_by_response[stored.id][item_id] for item_id, stored in found.items()}
    record.input[:] = [dict(items[item["id"]]) if _is_reference(item) else item for item in record.input]


def _is_reference(item: Mapping[str, Any]) -> bool:
    """True also without a type, which the API lets clients leave out: no other item has an id alone."""
    return item.get("type") == _KIND or (item.get("type") is None and "id" in item and "role" not in item)


_encoder = msgspec.json.Encoder()
_NO_LOGPROBS = msgspec.Raw(b"[]")


class _ResponseEncoder(Encoder[AnswerDelta]):
    """Makes the response of one request, or its events. Once it ended, `keep` gets its JSON and the ids of its items.

    Each item begins, grows and is done before the next one begins. The first events come with the first output, so that
    an error before it is an ordinary answer; but where that takes long, they come while the client waits.
    """

    shows_waiting = True

    def __init__(
        self,
        run: ChatRun,
        head: dict[str, Any],
        items: OutputItems,
        keep: Callable[[bytes, Sequence[str]], None] | None,
    ) -> None:
        self._run, self._head, self._items, self._keep = run, head, items, keep
        self._open: Item | None = None
        self._number = 0
        self._started_s = time.monotonic()

    def take_in(self, delta: AnswerDelta) -> None:
        self._items.take_in(delta)

    def whole(self) -> bytes:
        run, is_whole = self._run, self._items.finish_reason != "length"
        usage = {
            "input_tokens": run.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": run.num_cached_tokens or 0,
                "cache_write_tokens": run.num_created_tokens,
            },
            "output_tokens": run.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
            "total_tokens": run.num_prompt_tokens + run.num_completion_tokens,
            **run.snapshots,
        }
        if is_whole:
            ended = self._response("completed", usage=usage, completed_at=now_s())
        else:
            ended = self._response("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        data = _encoder.encode(ended)
        if self._keep is not None:
            self._keep(data, [item["id"] for item in ended["output"]])
        return data

    def grown(self, delta: AnswerDelta) -> bytes:
        return b"".join([] if self._number else self._start()) + b"".join(self._grown(delta))

    def waiting(self) -> bytes:
        """The events that show a client which passes over comments, as Codex does, that the server is still there."""
        return self._in_progress() if self._number else b"".join(self._start())

    def failed(self, error: ApiError) -> bytes:
        if not self._number:
            return b""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=failed)

    def _start(self) -> list[bytes]:
        created = self._event("response.created", response=self._response("in_progress"))
        return [created, self._in_progress()]

    def _in_progress(self, **fields: Any) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"), **fields)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object; while it is in progress, without its items."""
        empty = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        output = [] if status == "in_progress" else self._items.records(is_whole=status == "completed")
        return {**self._head, "status": status, "output": output, **empty, **fields}

    def _grown(self, delta: AnswerDelta) -> Iterator[bytes]:
        read = delta.source.prompt_progress
        if read is not None:
            yield self._in_progress(prompt_progress=PromptRead.of(read, self._started_s))
            return
        for item, text, logprobs in self._items.take_in(delta):
            if item is not self._open:
                yield from self._done(is_whole=True)
                yield from self._begin(item)
            if text or logprobs:
                yield from self._delta(item, text, logprobs)
        if delta.finish_reason is not None:
            yield from self._done(is_whole=delta.finish_reason != "length")
            kind = "incomplete" if delta.finish_reason == "length" else "completed"
            yield self._event(f"response.{kind}", response=msgspec.Raw(self.whole()))

    def _delta(self, item: Item, text: str, logprobs: list[bytes]) -> Iterator[bytes]:
        match item.kind:
            case "message":
                written = msgspec.Raw(b"[%b]" % b",".join(logprobs)) if logprobs else _NO_LOGPROBS
                yield self._of(item, "response.output_text.delta", content_index=0, delta=text, logprobs=written)
            case "reasoning":
                yield self._reasoning(item, "delta", delta=text)
            case "function_call":
                yield self._of(item, "response.function_call_arguments.delta", delta=text)
            case _:
                pass  # the input of a custom call comes whole, out of its arguments

    def _begin(self, item: Item) -> Iterator[bytes]:
        self._open = item
        record = item.record("in_progress")
        yield self._event("response.output_item.added", output_index=item.part.index, item=record)
        if item.part.call is None:
            yield self._bounds(item, "added", "")

    def _done(self, *, is_whole: bool) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        text = item.text
        match item.kind:
            case "message":
                logprobs = item.text_part(text)["logprobs"]
                yield self._of(item, "response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            case "reasoning":
                yield self._reasoning(item, "done", text=text)
            case "function_call":
                yield self._of(item, "response.function_call_arguments.done", arguments=text)
            case _:
                if text:
                    yield self._of(item, "response.custom_tool_call_input.delta", delta=text)
                yield self._of(item, "response.custom_tool_call_input.done", input=text)
        if item.part.call is None:
            yield self._bounds(item, "done", text)
        record = item.record("completed" if is_whole else "incomplete")
        yield self._event("response.output_item.done", output_index=item.part.index, item=record)

    def _reasoning(self, item: Item, what: str, **fields: str) -> bytes:
        if item.form.as_summary:
            return self._of(item, f"response.reasoning_summary_text.{what}", summary_index=0, **fields)
        return self._of(item, f"response.reasoning_text.{what}", content_index=0, **fields)

    def _bounds(self, item: Item, what: str, text: str) -> bytes:
        part = item.text_part(text)
        if item.kind == "reasoning" and item.form.as_summary:
            return self._of(item, f"response.reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._of(item, f"response.content_part.{what}", content_index=0, part=part)

    def _of(self, item: Item, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.part.index, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        data = named_event(name, sequence_number=self._number, **fields)
        self._number += 1
        return data


_KEPT = "/v1/responses/{response_id}"

RESPONSES = Dialect(
    name="Responses",
    routes=(
        ApiRoute("/v1/responses", _create_response, "Answer a conversation (Responses).", ResponsesRequest),
        ApiRoute(
            "/v1/responses/input_tokens", _count_input_tokens, "Count the tokens of a prompt.", InputTokensRequest
        ),
        ApiRoute(_KEPT, show_response, "A kept response."),
        ApiRoute(_KEPT, delete_response, "Forget a kept response.", verb="DELETE"),
        ApiRoute(f"{_KEPT}/input_items", list_input_items, "The items that led to a kept response."),
        ApiRoute(f"{_KEPT}/cancel", cancel_response, "Refused: no response is made in the background.", verb="POST"),
    ),
    error_body=plain_body,
    error_schema=PLAIN_SCHEMA,
    stream=StreamForm(ping=b": ping\n\n", end=b"", error=lambda error: b""),  # the stream's own event names the error
)
