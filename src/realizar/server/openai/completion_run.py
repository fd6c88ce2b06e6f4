"""`CompletionRun`: a running completion request, with one part for each prompt and its echo."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from realizar.engine.clients.async_stream import AsyncStream
from realizar.outputs import PromptProgress, RequestOutput, SnapshotUse, TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api, deltas_of, replica_notes, timing_notes
from realizar.server.errors import renaming
from realizar.server.generation.merge import Admission, merged
from realizar.server.generation.prompts import Prompt
from realizar.server.generation.state_snapshots import snapshot_notes, state_snapshots
from realizar.server.http.request_memory import RequestLease
from realizar.server.openai.records.answers import Usage, make_usage


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A prepared completion request.

    Attributes:
        sampling: the engine's sampling parameters for every prompt; `echo` uses its `prompt_logprobs` too.
        score_only: generate nothing.
        echo: return the prompt before the generated text.
        logprobs: most probable tokens to list; None without log-probabilities.
        prompt_logprobs: the same for vLLM's field.
        stream: True if the answer is streamed.
        bounded_by_context: True if `max_tokens` may be more than the context leaves.
        reports_progress: True to get deltas that tell how much of a prompt has been read.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    score_only: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stream: bool
    bounded_by_context: bool
    reports_progress: bool
    priority: int
    cache_salt: str | None
    structured_field: str


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class CompletionDelta:
    """The output that one choice gained; `echoed` marks the echo of the prompt.

    With `progress` it tells of the choice's prompt, and of nothing else; of several choices the first one's has it.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    echoed: bool = False
    progress: PromptProgress | None = None


class CompletionRun:
    """A completion request in the engine; `outputs` holds the finished parts, by prompt."""

    def __init__(self, api: Api, plan: CompletionPlan, request_id: str, lease: RequestLease) -> None:
        self._api, self._plan, self._request_id, self._lease = api, plan, request_id, lease
        self._info = api.engine.info
        self._admission = Admission(max(1, self._info.max_running // plan.sampling.n))
        self.outputs: dict[int, RequestOutput] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._snapshots: dict[tuple[int, int], SnapshotUse] = {}  # by prompt and choice; -1 is a prompt's scoring
        self._streams: list[AsyncStream] = []
        self.num_completion_tokens = 0

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._plan.prompts)
        found = self._num_cached_tokens
        cached = sum(found.values()) if len(found) == len(self._plan.prompts) else None
        return make_usage(
            num_prompt, self.num_completion_tokens, cached, state_snapshots(self._info, self._all_snapshots)
        )

    @property
    def _all_snapshots(self) -> SnapshotUse:
        return SnapshotUse.total(self._snapshots.values())

    @property
    def notes(self) -> dict[str, Any]:
        """Figures for the request's line in the log; times are included for a single prompt."""
        only = next(iter(self.outputs.values())) if len(self.outputs) == 1 == len(self._plan.prompts) else None
        cached = {} if only is None else {"cached": self._num_cached_tokens[0]}
        figures = {"tokens": self.num_completion_tokens, **cached, **timing_notes(only)}
        return {**figures, **snapshot_notes(self._all_snapshots), **replica_notes(self._streams)}

    def deltas(self) -> AsyncGenerator[CompletionDelta]:
        """Iterate the deltas of all choices as they arrive. The deltas of one choice come in order, except that an echo
        with log-probabilities comes last unless the answer is streamed.

        Raises:
            ApiError: the log-probabilities would take too much memory.
            RealizarError: from the iteration; the engine refused a prompt, or stopped.
        """
        if (scored := self._plan.sampling.prompt_logprobs) is not None:
            self._lease.hold_logprobs(sum(len(prompt.token_ids) for prompt in self._plan.prompts), scored)
        if self._plan.logprobs is not None:
            self._lease.begin_logprobs()
        parts = [functools.partial(self._named_part, place) for place in range(len(self._plan.prompts))]
        return merged(parts)

    async def _named_part(self, place: int) -> AsyncGenerator[CompletionDelta]:
        where = f"prompt[{place}]" if len(self._plan.prompts) > 1 else "prompt"
        with renaming({"prompt": where, "structured": self._plan.structured_field}):
            async with aclosing(self._part(place)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _part(self, place: int) -> AsyncGenerator[CompletionDelta]:
        plan = self._plan
        async with self._admission.slots:
            echo_scored = plan.echo and plan.logprobs is not None
            if plan.echo and not echo_scored:
                for echoed in self._echo(place, None):
                    yield echoed
            if echo_scored and plan.stream and not plan.score_only:
                scored = await self._score(place)
                self._num_cached_tokens[place] = (
                    scored.num_cached_tokens
                )  # the generation finds these tokens in the cache
                self._snapshots[place, -1] = scored.snapshots
                for echoed in self._echo(place, scored):
                    yield echoed
            sampling = plan.sampling
            if plan.stream and not plan.score_only:
                sampling = replace(sampling, prompt_logprobs=plan.prompt_logprobs)
            stream = await self._admission.enter(lambda: self._submit(place, sampling, score_only=plan.score_only))
            self._streams.append(stream)
            async with aclosing(deltas_of(stream, self._api.metrics, self._lease, plan.logprobs or 0)) as deltas:
                async for delta in deltas:
                    self.num_completion_tokens += len(delta.token_ids)
                    self._snapshots[place, delta.choice] = delta.snapshots
                    yield CompletionDelta(
                        place * sampling.n + delta.choice,
                        delta.text,
                        delta.token_ids,
                        delta.logprobs,
                        delta.finish_reason,
                        delta.stop_reason,
                        progress=delta.prompt_progress,
                    )
            output = self.outputs[place] = await stream.result()
            self._num_cached_tokens.setdefault(place, output.num_cached_tokens)
            if echo_scored and not (plan.stream and not plan.score_only):
                for echoed in self._echo(place, output):
                    yield echoed

    async def _score(self, place: int) -> RequestOutput:
        """Score a prompt by itself, so that its log-probabilities can be sent before the first token."""
        sampling = replace(self._plan.sampling, n=1, structured=None, max_tokens=None, min_tokens=0)
        stream = await self._admission.enter(lambda: self._submit(place, sampling, score_only=True))
        async with stream:
            return await stream.result()

    def _echo(self, place: int, scored: RequestOutput | None) -> list[CompletionDelta]:
        prompt, count = self._plan.prompts[place], self._plan.sampling.n
        text = prompt.text
        if text is None:
            text = self._api.model.tokenizer.decode(prompt.token_ids, skip_special=False)
        entries: Sequence[TokenLogprobs | None] = ()
        token_ids: Sequence[int] = ()
        if scored is not None and scored.prompt_logprobs is not None:
            entries, token_ids = scored.prompt_logprobs, prompt.token_ids
        return [
            CompletionDelta(place * count + choice, text, token_ids, entries, echoed=True) for choice in range(count)
        ]

    async def _submit(self, place: int, sampling: SamplingParams, *, score_only: bool) -> AsyncStream:
        prompt = self._plan.prompts[place]
        scoring = score_only and not self._plan.score_only
        room = self._info.max_request_tokens - len(prompt.token_ids)
        if self._plan.bounded_by_context and sampling.max_tokens is not None and 0 < room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        return await self._api.engine.generate(
            prompt.token_ids,
            sampling,
            request_id=f"{self._request_id}-{place}{'-scored' if scoring else ''}",
            prompt=prompt.text,
            priority=self._plan.priority,
            cache_salt=self._plan.cache_salt,
            client=self._lease.client,
            score_only=score_only,
            reports_progress=self._plan.reports_progress and not scoring,
        )
