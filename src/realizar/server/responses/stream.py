"""`ResponseStreamer` makes the events of a streamed response.

Each item begins, grows and is done before the next one begins. The first events come with the first output, so that an
error before it is an ordinary answer; but where that takes long, they come while the client waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from realizar.server.api import Api
from realizar.server.errors import to_api_error
from realizar.server.generation.answer import AnswerDelta, FinishReason
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.prompt_read import PromptRead
from realizar.server.responses.answers import ResponseForm, usage_of
from realizar.server.responses.keeper import Keeper
from realizar.server.responses.output_items import Item, ItemForm, OutputItems, reasoning_part, summary_part
from realizar.server.responses.text_logprobs import TextLogprobs
from realizar.tokenizer.parsers.base import ParsedDelta

_encoder = msgspec.json.Encoder()
_NO_LOGPROBS = msgspec.Raw(b"[]")


class ResponseStreamer:
    """Makes the events of one request.

    Args:
        keeper: keeps the response once it ended; None to forget it.
    """

    def __init__(
        self,
        api: Api,
        plan: ChatPlan,
        run: ChatRun,
        form: ResponseForm,
        item_form: ItemForm,
        logprobs: TextLogprobs | None,
        keeper: Keeper | None,
    ) -> None:
        self._api, self._plan, self._run, self._form = api, plan, run, form
        self._items = OutputItems(item_form)
        self._logprobs, self._keeper = logprobs, keeper
        self._open: Item | None = None
        self._number = 0
        self._started_s = time.monotonic()

    async def events(self, note: Callable[..., None]) -> AsyncGenerator[bytes]:
        """Iterate the events, those of a delta together. An error after the first of them makes the last one.

        Args:
            note: adds figures to the request's line in the log.
        """
        try:
            async with aclosing(self._run.deltas()) as deltas:
                first = asyncio.ensure_future(anext(deltas))
                try:
                    while not (await asyncio.wait((first,), timeout=self._api.settings.ping_interval_s))[0]:
                        yield self._waits()
                finally:
                    if not first.done():
                        first.cancel()
                        await asyncio.wait((first,))
                delta = first.result()
                yield b"".join(([] if self._number else self._start()) + self._grown(delta))
                async for delta in deltas:
                    if made := self._grown(delta):
                        yield b"".join(made)
        except Exception as error:  # noqa: BLE001 - a stream that began says so itself
            api_error = to_api_error(error)
            if self._number:
                yield self._event("response.failed", response=self._form.failed(self._output(False), api_error))
            raise api_error from None
        finally:
            note(**self._run.notes)

    def _start(self) -> list[bytes]:
        created = self._event("response.created", response=self._form.begun())
        return [created, self._event("response.in_progress", response=self._form.begun())]

    def _waits(self) -> bytes:
        """The events that show a client which passes over comments, as Codex does, that the server is still there."""
        if self._number:
            return self._event("response.in_progress", response=self._form.begun())
        return b"".join(self._start())

    def _grown(self, delta: AnswerDelta) -> list[bytes]:
        """The events of a delta."""
        read = delta.source.prompt_progress
        if read is not None:
            figures = PromptRead.of(read, self._started_s)
            return [self._event("response.in_progress", response=self._form.begun(), prompt_progress=figures)]
        return list(self._events_of(delta))

    def _events_of(self, delta: AnswerDelta) -> Iterator[bytes]:
        if self._logprobs is not None:
            self._logprobs.take_in(delta)
        for part in delta.parsed:
            yield from self._part(part)
        if delta.finish_reason is None:
            return
        if self._items.last is None:
            yield from self._begin(self._items.begin_message())
        yield from self._done(is_whole=delta.finish_reason != "length")
        yield self._ended(delta.finish_reason)

    def _ended(self, reason: FinishReason) -> bytes:
        output = self._output(reason != "length")
        response = self._form.ended(output, usage_of(self._api, self._plan, self._run), reason)
        if self._keeper is not None:
            self._keeper.keep(self._form.id, _encoder.encode(response))
        return self._event(f"response.{response['status']}", response=response)

    def _output(self, is_whole: bool) -> list[dict[str, Any]]:
        return self._items.records(is_whole=is_whole)

    def _part(self, part: ParsedDelta) -> Iterator[bytes]:
        item, text = self._items.take_in(part)
        if item is not self._open:
            yield from self._done(is_whole=True)
            yield from self._begin(item)
        logprobs = [] if self._logprobs is None else self._logprobs.taken_for(item)
        if not text and not logprobs:
            return
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
        record = item.record(self._items.form, "in_progress")
        if item.kind == "function_call":
            record["arguments"] = ""
        yield self._event("response.output_item.added", output_index=item.index, item=record)
        if not item.is_call:
            yield self._bounds(item, "added", "")

    def _done(self, *, is_whole: bool) -> Iterator[bytes]:
        """Close the item that is open, if one is."""
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
        if not item.is_call:
            yield self._bounds(item, "done", text)
        record = item.record(self._items.form, "completed" if is_whole else "incomplete")
        yield self._event("response.output_item.done", output_index=item.index, item=record)

    def _reasoning(self, item: Item, what: str, **fields: str) -> bytes:
        if self._items.form.as_summary:
            return self._of(item, f"response.reasoning_summary_text.{what}", summary_index=0, **fields)
        return self._of(item, f"response.reasoning_text.{what}", content_index=0, **fields)

    def _bounds(self, item: Item, what: str, text: str) -> bytes:
        """The event that begins or ends the one part of an item."""
        if item.kind == "message":
            return self._of(item, f"response.content_part.{what}", content_index=0, part=item.text_part(text))
        if self._items.form.as_summary:
            part = summary_part(text)
            return self._of(item, f"response.reasoning_summary_part.{what}", summary_index=0, part=part)
        return self._of(item, f"response.content_part.{what}", content_index=0, part=reasoning_part(text))

    def _of(self, item: Item, name: str, **fields: Any) -> bytes:
        return self._event(name, item_id=item.id, output_index=item.index, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        """An event with its name, which its data repeats as `type`."""
        data = _encoder.encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
