"""`ChatRun`: a running chat request. It parses the text delta by delta, for streams and whole answers alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from msgspec import UnsetType

from realizar.engine.clients.async_stream import AsyncStream
from realizar.errors import RealizarError
from realizar.outputs import ChoiceDelta, RequestOutput, SnapshotUse
from realizar.server.api import Api
from realizar.server.errors import renaming
from realizar.server.generation.answer import AnswerDelta, FinishReason
from realizar.server.generation.answer_events import deltas_of, replica_notes, timing_notes
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.state_snapshots import StateSnapshots, snapshot_notes, state_snapshots
from realizar.server.generation.token_kinds import TokenKind, TokenKinds
from realizar.server.generation.tools import naming_tools
from realizar.server.http.request_memory import RequestLease
from realizar.tokenizer.parsers.base import OutputParser, ParsedDelta


class ChatRun:
    """A chat request in the engine, under the id of the answer.

    Attributes:
        num_completion_tokens: tokens generated so far, over all choices.
        num_reasoning_tokens: those of them that belong to reasoning, its marks included, if these are counted.
        num_cached_tokens: tokens of the prompt that were found in the cache; None before the first delta.
        output: the engine's output, once it is complete.
    """

    def __init__(
        self, api: Api, plan: ChatPlan, request_id: str, lease: RequestLease, *, counts_reasoning: bool = False
    ) -> None:
        self._api, self._plan, self._request_id, self._info = api, plan, request_id, api.engine.info
        self._lease = lease
        self._parsers: list[OutputParser] = [plan.new_parser() for _ in range(plan.sampling.n)]
        self._kinds: list[TokenKinds] = []
        if (counts_reasoning and plan.may_reason) or plan.sampling.logprobs is not None:
            tokenizer = api.model.tokenizer
            self._kinds = [TokenKinds(parser, tokenizer.answer_bytes) for parser in self._parsers]
        self._open = set(range(plan.sampling.n))
        self.num_completion_tokens = self.num_reasoning_tokens = 0
        self.num_cached_tokens: int | None = None
        self.output: RequestOutput | None = None
        self._snapshots: dict[int, SnapshotUse] = {}  # by choice
        self._streams: list[AsyncStream] = []

    @property
    def state_snapshots(self) -> StateSnapshots | UnsetType:
        """Snapshots of states that all choices used so far."""
        return state_snapshots(self._info, self._all_snapshots)

    @property
    def _all_snapshots(self) -> SnapshotUse:
        return SnapshotUse.total(self._snapshots.values())

    @property
    def notes(self) -> dict[str, Any]:
        cached = {} if self.num_cached_tokens is None else {"cached": self.num_cached_tokens}
        figures = {"tokens": self.num_completion_tokens, **cached, **timing_notes(self.output)}
        return {**figures, **snapshot_notes(self._all_snapshots), **replica_notes(self._streams)}

    async def deltas(self) -> AsyncGenerator[AnswerDelta]:
        """The deltas of all choices, as they come. The request ends when its consumer stops.

        Raises RealizarError where the engine refused the request, or stopped.
        """
        with renaming(self._plan.names), naming_tools(self._plan.tools):
            if (scored := self._plan.sampling.prompt_logprobs) is not None:
                self._lease.hold_logprobs(len(self._plan.token_ids), scored)
            if self._plan.sampling.logprobs is not None:
                self._lease.begin_logprobs()
            stream = await self._api.engine.generate(
                self._plan.token_ids,
                self._plan.sampling,
                request_id=self._request_id,
                priority=self._plan.priority,
                cache_salt=self._plan.cache_salt,
                client=self._lease.client,
                reports_progress=self._plan.reports_progress,
            )
            self._streams.append(stream)
            async with aclosing(self._counted(stream)) as deltas:
                async for delta in deltas:
                    if delta.prompt_progress is not None:
                        yield AnswerDelta(delta.choice, [], delta, None)
                        continue
                    self._snapshots[delta.choice] = delta.snapshots  # also of a choice that a call has ended here
                    if delta.choice in self._open:
                        yield self._take_in(delta)
        with suppress(RealizarError):  # the stream was closed before its end, as the answers were complete
            self.output = await stream.result()

    def _counted(self, stream: AsyncStream) -> AsyncGenerator[ChoiceDelta]:
        top = self._plan.sampling.logprobs or 0
        return deltas_of(stream, self._api.metrics, self._lease, top, lambda: not self._open)

    def _take_in(self, delta: ChoiceDelta) -> AnswerDelta:
        parser = self._parsers[delta.choice]
        self.num_completion_tokens += len(delta.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens or 0, delta.num_cached_tokens)
        parsed, kinds = self._parsed(delta)
        finish: FinishReason | None = None
        if parser.ended:
            finish = "tool_calls"
        elif delta.finish_reason is not None:
            finish = "tool_calls" if parser.num_calls and delta.finish_reason == "stop" else delta.finish_reason
        if finish is not None:
            self._open.discard(delta.choice)
        return AnswerDelta(delta.choice, parsed, delta, finish, kinds)

    def _parsed(self, delta: ChoiceDelta) -> tuple[list[ParsedDelta], list[TokenKind]]:
        """What a delta adds, up to the end if it is the last, and the kinds of tokens where they are wanted."""
        parser, is_last = self._parsers[delta.choice], delta.finish_reason is not None
        if not self._kinds:
            parsed = parser.feed(delta.text, delta.marks)
            return (parsed + parser.finish() if is_last and not parser.ended else parsed), []
        parsed, kinds = self._kinds[delta.choice].feed(delta.text, delta.token_ids, delta.marks, is_last=is_last)
        self.num_reasoning_tokens += kinds.count("reasoning")
        return parsed, kinds
