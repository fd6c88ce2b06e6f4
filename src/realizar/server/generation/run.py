"""`Run`: a request in the engine, whose answer an `Encoder` of a dialect writes, as events or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput
from realizar.engine.process.messages import EngineInfo
from realizar.outputs import SnapshotUse
from realizar.server.api import Api
from realizar.server.errors import ApiError, to_api_error
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import note
from realizar.server.http.request_memory import RequestLease
from realizar.server.http.sse import EventStream
from realizar.server.metrics import Metrics

D = TypeVar("D")  # what an answer gains in a step


class Encoder(Generic[D]):
    """Writes an answer in a dialect's form: the events of its deltas, which may be any number, or the whole of them.

    Attributes:
        shows_waiting: True if `waiting` has events.
    """

    shows_waiting = False

    def grown(self, delta: D) -> bytes:
        """The events of a delta, and before the first one those that begin an answer."""
        raise NotImplementedError

    def last(self) -> bytes:
        return b""

    def waiting(self) -> bytes:
        """The events of a pause before the first delta, as long as one between pings."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The dialect's own events of an error that ends the answer."""
        return b""

    def take_in(self, delta: D) -> object:
        """Take in a delta of an answer that is wanted whole."""
        raise NotImplementedError

    def whole(self) -> bytes:
        """The JSON of all that was taken in."""
        raise NotImplementedError


class Run(Generic[D]):
    """A request in the engine, under the id of its answer.

    Attributes:
        info: of the engine as the request began, since it may be gone when the answer ends.
        num_prompt_tokens: tokens of all its prompts. num_completion_tokens: generated so far, over all choices.
        num_cached_tokens: tokens of its prompts that were found in the cache; None before they are known.
        output: the engine's output of its only prompt, once it is complete.
    """

    num_cached_tokens: int | None = None
    output: RequestOutput | None = None

    def __init__(self, api: Api, request_id: str, lease: RequestLease, num_prompt_tokens: int) -> None:
        self.api, self.id, self.info, self._lease = api, request_id, api.engine.info, lease
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self._streams: list[AsyncStream] = []
        self._snapshots: dict[tuple[AsyncStream, int], SnapshotUse] = {}  # by choice

    def asked(self) -> dict[str, Any]:
        """What is asked for, for the request's line in the log."""
        return {"prompt": self.num_prompt_tokens}

    def deltas(self) -> AsyncGenerator[D]:
        """What the answer gains, as it comes. The request ends when its consumer stops.

        Raises RealizarError where the engine refused the request, or stopped, and ApiError where its log-probabilities
        take too much memory.
        """
        raise NotImplementedError

    @property
    def snapshots(self) -> dict[str, SnapshotUse]:
        """See `shown_snapshots`; those of all prompts and choices so far."""
        return shown_snapshots(self.info, self._snapshots.values())

    @property
    def notes(self) -> dict[str, Any]:
        """Figures for the request's line in the log, at any time."""
        notes: dict[str, Any] = {"tokens": self.num_completion_tokens}
        if self.num_cached_tokens is not None:
            notes["cached"] = self.num_cached_tokens
        if self.output is not None:
            timings = self.output.timings
            if self.output.drafts.drafted:
                notes |= {"drafted": self.output.drafts.drafted, "accepted": self.output.drafts.accepted}
            notes |= {"queue_s": timings.queue_s, "first_token_s": timings.first_token_s - timings.arrival_s}
        notes |= snapshot_notes(self._snapshots.values())
        replicas = ",".join(sorted({stream.replica for stream in self._streams}))
        return notes | ({"replica": replicas} if replicas else {})

    async def answer(self, request: Request, encoder: Encoder[D], *, stream: bool | None) -> Response:
        """The answer to a request, as a stream of events or whole. The figures are noted however it ends.

        Raises ClientDisconnectedError: the client disconnected before a whole answer; the run has ended.
        """
        note(request, model=self.api.model.name, **self.asked())
        if stream:
            return EventStream(self._events(request, encoder))
        try:
            await unless_disconnected(request.receive, self._take_all(encoder))
        finally:
            note(request, **self.notes)
        return Response(encoder.whole(), media_type="application/json")

    async def _take_all(self, encoder: Encoder[D]) -> None:
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                encoder.take_in(delta)

    async def _events(self, request: Request, encoder: Encoder[D]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self.deltas()) as deltas:
                if encoder.shows_waiting:
                    first = asyncio.ensure_future(anext(deltas))
                    try:
                        while not (await asyncio.wait((first,), timeout=self.api.settings.ping_interval_s))[0]:
                            yield encoder.waiting()
                    finally:
                        if not first.done():
                            first.cancel()
                            await asyncio.wait((first,))
                    yield encoder.grown(first.result())
                async for delta in deltas:
                    if data := encoder.grown(delta):
                        yield data
            if data := encoder.last():
                yield data
        except Exception as error:  # noqa: BLE001 - a stream that began may say so itself
            api_error = to_api_error(error)
            if data := encoder.failed(api_error):
                yield data
            raise api_error from None
        finally:
            note(request, **self.notes)


def shown_snapshots(info: EngineInfo, uses: Iterable[SnapshotUse]) -> dict[str, SnapshotUse]:
    """An extension of every dialect's usage: the snapshots that a request used; empty for a model that keeps none."""
    return {"state_snapshots": SnapshotUse.total(uses)} if info.capacity.num_snapshots else {}


def snapshot_notes(uses: Iterable[SnapshotUse]) -> dict[str, int]:
    """The same for its line in the log: those kinds of which there were any."""
    return {f"snapshots_{name}": count for name, count in asdict(SnapshotUse.total(uses)).items() if count}


async def deltas_of(
    stream: AsyncStream, metrics: Metrics, lease: RequestLease, top: int, enough: Callable[[], bool] = lambda: False
) -> AsyncGenerator[ChoiceDelta]:
    """Iterate the deltas of an open request and count them. The request is closed when the consumer stops.

    Args:
        lease: counts the log-probabilities, which are kept until the end, each with `top` others.
        enough: called after each delta; True ends the request, since its rest is not wanted.
    """
    last_s: dict[int, float] = {}
    started_s = time.monotonic()
    first_s: float | None = None
    try:
        async for delta in stream:
            if delta.prompt_progress is not None:
                yield delta
                continue
            now = time.monotonic()
            first_s = now if first_s is None else first_s
            if delta.token_ids:
                if delta.choice in last_s:
                    metrics.tokens_came(len(delta.token_ids), now - last_s[delta.choice])
                last_s[delta.choice] = now
            if num_logprobs := len(delta.logprobs):
                lease.add_logprobs(num_logprobs, top)
            yield delta
            if enough() and not stream.done:
                metrics.stopped(len(last_s), first_s - started_s, now - started_s)
                return
        metrics.ended(await stream.result())
    except (GeneratorExit, asyncio.CancelledError):
        metrics.aborted()
        raise
    finally:
        stream.close()
