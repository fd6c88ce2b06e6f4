"""`ChatRun`: a running chat request. It parses the text delta by delta, for streams and whole answers alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from realizar.engine.frontend.outputs import ChoiceDelta
from realizar.engine.images import PlacedImage
from realizar.errors import RealizarError
from realizar.request import PromptEmbeddings
from realizar.server.api import Api
from realizar.server.errors import renaming
from realizar.server.generation.answer import AnswerDelta, FinishReason
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.logprob_rows import RowsOfKinds
from realizar.server.generation.run import Run, deltas_of
from realizar.server.generation.token_kinds import TokenKind, TokenKinds
from realizar.server.generation.tools import naming_tools
from realizar.server.http.request_memory import RequestLease
from realizar.tokenizer.parsers.base import ParsedDelta
from realizar.tokenizer.parsers.incremental import OutputParser

_TEXT: tuple[TokenKind, ...] = ("content",)


class ChatRun(Run[AnswerDelta]):
    """A chat request in the engine.

    Attributes:
        num_reasoning_tokens: generated tokens that belong to reasoning, its marks included, if these are counted.
    """

    def __init__(
        self,
        api: Api,
        plan: ChatPlan,
        request_id: str,
        lease: RequestLease,
        *,
        listed: Collection[TokenKind] = _TEXT,
        counts_reasoning: bool = False,
    ) -> None:
        """Make the run of a plan; `listed` are the kinds of tokens whose log-probabilities are wanted, if any are."""
        super().__init__(api, request_id, lease, len(plan.token_ids))
        self.plan, choices = plan, range(plan.sampling.n)
        self._parsers: list[OutputParser] = [plan.new_parser() for _ in choices]
        self._kinds: list[TokenKinds] = []
        self._rows = [] if plan.rows is None else [RowsOfKinds(plan.rows, listed) for _ in choices]
        if (counts_reasoning and plan.may_reason) or self._rows:
            tokenizer = api.model.tokenizer
            self._kinds = [TokenKinds(parser, tokenizer.answer_bytes) for parser in self._parsers]
        self._open = set(choices)
        self.num_reasoning_tokens = 0

    @property
    def num_created_tokens(self) -> int:
        """Tokens of the prompt that were computed in whole blocks, which stay in the cache, as far as known by now."""
        block = self.info.cached_block_tokens
        return max(self.num_prompt_tokens // block * block - (self.num_cached_tokens or 0), 0) if block else 0

    def asked(self) -> dict[str, Any]:
        return super().asked() | ({"dropped": self.plan.num_dropped} if self.plan.num_dropped else {})

    async def deltas(self) -> AsyncGenerator[AnswerDelta]:
        plan, sampling = self.plan, self.plan.sampling
        with renaming(plan.names), naming_tools(plan.tools):
            if sampling.prompt_logprobs is not None:
                self._lease.hold_logprobs(self.num_prompt_tokens, sampling.prompt_logprobs)
            if sampling.logprobs is not None:
                self._lease.begin_logprobs()
            pictures = await self._pictures(plan.images)
            plan = self.plan = replace(plan, images=())  # they take more memory than all else
            stream = await self.api.engine.generate(
                plan.token_ids,
                sampling,
                request_id=self.id,
                priority=plan.priority,
                cache_salt=plan.cache_salt,
                client=self._lease.client,
                reports_progress=plan.reports_progress,
                prediction=plan.prediction,
                call_ids=plan.call_ids,
                embeddings=pictures,
                rope_positions=plan.rope_positions,
            )
            self._streams.append(stream)
            counted = deltas_of(stream, self.api.metrics, self._lease, sampling.logprobs or 0, lambda: not self._open)
            async with aclosing(counted) as deltas:
                async for delta in deltas:
                    if delta.prompt_progress is not None:
                        yield AnswerDelta(delta.choice, [], delta, None)
                        continue
                    self._snapshots[stream, delta.choice] = delta.snapshots  # also of a choice that a call ended here
                    if delta.choice in self._open:
                        yield self._take_in(delta)
        with suppress(RealizarError):  # the stream was closed before its end, as the answers were complete
            self.output = await stream.result()

    async def _pictures(self, images: Sequence[PlacedImage]) -> tuple[PromptEmbeddings, ...]:
        model = self.api.model
        if not images or (reader := model.images) is None:
            return ()
        self._lease.hold_images(reader.image_bytes(self.plan.token_ids))
        return await model.image_lane.run(self._lease.client.name, lambda stop: reader.pictures(images, stop.check))

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
        rows = self._rows[delta.choice].take_in(delta.logprobs, kinds) if self._rows else ()
        return AnswerDelta(delta.choice, parsed, delta, finish, rows)

    def _parsed(self, delta: ChoiceDelta) -> tuple[list[ParsedDelta], list[TokenKind]]:
        """What a delta adds, up to the end if it is the last, and the kinds of tokens where they are wanted."""
        parser, is_last = self._parsers[delta.choice], delta.finish_reason is not None
        if not self._kinds:
            parsed = parser.feed(delta.text, delta.marks)
            return (parsed + parser.finish() if is_last and not parser.ended else parsed), []
        parsed, kinds = self._kinds[delta.choice].feed(delta.text, delta.token_ids, delta.marks, is_last=is_last)
        self.num_reasoning_tokens += kinds.count("reasoning")
        return parsed, kinds
