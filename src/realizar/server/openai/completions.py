"""`POST /v1/completions`."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from realizar.engine.clients.async_stream import AsyncStream
from realizar.outputs import PromptProgress, RequestOutput, SnapshotUse, TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api, new_id, now_s
from realizar.server.errors import refused, renaming, unsupported
from realizar.server.generation.answer_events import AnswerEvents, Encoder, deltas_of, replica_notes, timing_notes
from realizar.server.generation.merge import Admission, merged
from realizar.server.generation.prompt_read import PromptRead, check_progress
from realizar.server.generation.prompts import Prompt, keep_last, read_hole, tokenize_prompts
from realizar.server.generation.sampling import build_sampling, check_listed_ids, check_priority, check_top
from realizar.server.generation.state_snapshots import snapshot_notes, state_snapshots
from realizar.server.http.body import read_record
from realizar.server.http.request import compute, note
from realizar.server.http.request_memory import RequestLease, lease_of
from realizar.server.http.sse import EventTemplate, encode_event
from realizar.server.http.work import Stop
from realizar.server.models.models import model_of
from realizar.server.models.needs import completes
from realizar.server.openai.fields import check_neutral, find_structured, read_wishes
from realizar.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsMaker,
    completion_rows,
    prompt_logprobs,
)
from realizar.server.openai.records import Answer, CompletionChoice, CompletionRequest, StreamOptions, Usage, make_usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint, where the model has none


async def completions(request: Request) -> Response:
    record = await read_record(request, CompletionRequest)
    given = None if record.truncate_prompt_tokens is not None else record.prompt
    api = await model_of(request, record.model, need=completes(given, record.max_tokens))
    plan = await compute(request, lambda stop: plan_completions(api, record, stop))
    request_id = new_id("cmpl-")
    num_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
    note(request, model=api.model.name, prompts=len(plan.prompts), prompt=num_tokens)
    run = _CompletionRun(api, plan, request_id, lease_of(request))
    maker = _AnswerMaker(api, record, plan, run, request_id)
    events, deltas = AnswerEvents(request, run, api.settings), list[_CompletionDelta]()
    if record.stream:
        return events.stream(maker)
    await events.whole(deltas.append)
    return Response(msgspec.json.encode(maker.whole(deltas)), media_type="application/json")


def plan_completions(api: Api, record: CompletionRequest, stop: Stop) -> _CompletionPlan:
    """Check a request and tokenize its prompts. This may take a second, so it must not run on the event loop.

    `stop` is checked between the parts of the work. Raises ApiError or RealizarError where the request is refused.
    """
    check_neutral(record)
    _check_stream(record)
    echo = bool(record.echo)
    score_only = record.max_tokens == 0 and (echo or record.prompt_logprobs is not None)
    logprobs = check_top(record.logprobs, "logprobs")
    listed = check_top(record.prompt_logprobs, "prompt_logprobs")
    echoed = logprobs if echo else None
    scored = max((count for count in (echoed, listed) if count is not None), default=None)
    found = find_structured(record, record.response_format)
    wishes = read_wishes(
        record,
        max_tokens=None if score_only else record.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=scored,
        structured=None if found is None else found[1],
    )
    sampling = build_sampling(wishes, api.model)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=DEFAULT_MAX_TOKENS)
    prompts = _tokenized(api, record, stop)
    _check_answers(len(prompts), sampling.n, api.settings.max_choices)
    check_listed_ids(sampling, len(prompts))
    if logprobs is not None:
        api.names(as_ids=record.return_tokens_as_token_ids).prepare()
    return _CompletionPlan(
        prompts=prompts,
        sampling=sampling,
        score_only=score_only,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=listed,
        stream=bool(record.stream),
        bounded_by_context=not wishes.bounds_answer,
        reports_progress=check_progress(record.return_progress, stream=record.stream),
        priority=check_priority(record.priority, allowed=api.settings.allow_request_priority),
        cache_salt=record.cache_salt,
        structured_field="structured" if found is None else found[0],
    )


def _tokenized(api: Api, record: CompletionRequest, stop: Stop) -> list[Prompt]:
    add_special = record.add_special_tokens is not False
    hole = None
    if record.suffix:
        _check_suffix(record)
        hole = read_hole(record.suffix, api.model.tokenizer, api.max_tokens, add_special=add_special)
    prompts = tokenize_prompts(
        record.prompt,
        api.model.tokenizer,
        stop,
        param="prompt",
        max_prompts=api.settings.max_prompts,
        max_tokens=api.max_tokens,
        add_special=add_special,
        bounded=record.truncate_prompt_tokens is None,
        hole=hole,
    )
    if record.truncate_prompt_tokens is not None:
        return [_shortened(prompt, record.truncate_prompt_tokens, api.max_tokens) for prompt in prompts]
    return prompts


def _check_suffix(record: CompletionRequest) -> None:
    if record.prompt is None:
        raise refused("suffix needs a prompt, the text before the hole; it may be empty", "prompt", "invalid_value")
    if record.echo:
        raise unsupported("echo", "can't be combined with suffix")
    if record.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "can't be combined with suffix")


def _check_stream(record: CompletionRequest) -> None:
    if record.stream_options is not None and not record.stream:
        raise refused("stream_options needs stream to be true", "stream_options", "invalid_value")
    if record.stream and record.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "can't be combined with stream; echo with logprobs can")


def _check_answers(prompts: int, n: int, most: int) -> None:
    if prompts * n > most:
        message = f"{prompts} prompts with n={n}; at most {most} answers are made for one request"
        raise refused(message, "n", "invalid_value")


def _shortened(prompt: Prompt, asked: int, most: int) -> Prompt:
    ids = keep_last(prompt.token_ids, asked, most)
    return prompt if len(ids) == len(prompt.token_ids) else Prompt(ids, None)


# `_CompletionRun`: a running completion request, with one part for each prompt and its echo.


@dataclass(frozen=True, slots=True)
class _CompletionPlan:
    """A prepared completion request.

    Attributes:
        sampling: the engine's sampling parameters for every prompt; `echo` uses its `prompt_logprobs` too.
        score_only: generate nothing.
        echo: return the prompt before the generated text.
        logprobs: most probable tokens to list; None without log-probabilities.
        prompt_logprobs: the same for vLLM's field.
        bounded_by_context: `max_tokens` may be more than the context leaves.
        reports_progress: get deltas that tell how much of a prompt has been read.
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
class _CompletionDelta:
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


class _CompletionRun:
    """A completion request in the engine; `outputs` holds the finished parts, by prompt."""

    def __init__(self, api: Api, plan: _CompletionPlan, request_id: str, lease: RequestLease) -> None:
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
        """Times are included for a single prompt."""
        only = next(iter(self.outputs.values())) if len(self.outputs) == 1 == len(self._plan.prompts) else None
        cached = {} if only is None else {"cached": self._num_cached_tokens[0]}
        figures = {"tokens": self.num_completion_tokens, **cached, **timing_notes(only)}
        return {**figures, **snapshot_notes(self._all_snapshots), **replica_notes(self._streams)}

    def deltas(self) -> AsyncGenerator[_CompletionDelta]:
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

    async def _named_part(self, place: int) -> AsyncGenerator[_CompletionDelta]:
        where = f"prompt[{place}]" if len(self._plan.prompts) > 1 else "prompt"
        with renaming({"prompt": where, "structured": self._plan.structured_field}):
            async with aclosing(self._part(place)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _part(self, place: int) -> AsyncGenerator[_CompletionDelta]:
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
                    yield _CompletionDelta(
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

    def _echo(self, place: int, scored: RequestOutput | None) -> list[_CompletionDelta]:
        prompt, count = self._plan.prompts[place], self._plan.sampling.n
        text = prompt.text
        if text is None:
            text = self._api.model.tokenizer.decode(prompt.token_ids, skip_special=False)
        entries: Sequence[TokenLogprobs | None] = ()
        token_ids: Sequence[int] = ()
        if scored is not None and scored.prompt_logprobs is not None:
            entries, token_ids = scored.prompt_logprobs, prompt.token_ids
        return [
            _CompletionDelta(place * count + choice, text, token_ids, entries, echoed=True) for choice in range(count)
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


class _AnswerMaker(Encoder[_CompletionDelta]):
    def __init__(
        self, api: Api, record: CompletionRequest, plan: _CompletionPlan, run: _CompletionRun, request_id: str
    ) -> None:
        self._api, self._plan, self._run, self._request_id = api, plan, run, request_id
        options = record.stream_options or StreamOptions()
        self._last_usage = bool(options.include_usage)
        self._every_usage = self._last_usage and bool(options.continuous_usage_stats)
        self._with_ids = bool(record.return_token_ids)
        self._named: set[int] = set()  # choices whose prompt was sent
        self._names = api.names(as_ids=record.return_tokens_as_token_ids)
        self._makers: dict[int, CompletionLogprobsMaker] = {}
        self._created, self._started_s = now_s(), time.monotonic()
        self._templates: dict[int, EventTemplate] = {}

    def grown(self, delta: _CompletionDelta) -> bytes:
        if delta.progress is not None:
            return self._progress(delta, delta.progress)
        if not delta.text and not delta.token_ids and delta.finish_reason is None:
            return b""
        return self._only_text(delta) or encode_event(self._answer([self._choice(delta)], self._usage_so_far()))

    def last(self) -> bytes:
        return encode_event(self._answer([], self._run.usage)) if self._last_usage else b""

    def _progress(self, delta: _CompletionDelta, read: PromptProgress) -> bytes:
        chunk = self._answer([CompletionChoice(delta.index, "", None, None)], self._usage_so_far())
        chunk.prompt_progress = PromptRead.of(read, self._started_s)
        return encode_event(chunk)

    def _only_text(self, delta: _CompletionDelta) -> bytes | None:
        """The event of a delta that is one text; None for the last of a choice, and with usage in every event."""
        if self._every_usage or self._with_ids or delta.finish_reason is not None:
            return None
        template = self._templates.get(delta.index)
        if template is None:
            empty = CompletionChoice(delta.index, "", None, None)
            varying = None if self._plan.logprobs is None else "logprobs"
            template = EventTemplate(self._answer([empty], self._usage_so_far()), "text", varying)
            self._templates[delta.index] = template
        maker = self._maker_of(delta.index)
        if maker is None:
            return template.encode(delta.text)
        return template.encode(delta.text, maker.text(delta.token_ids, delta.logprobs, spelled=delta.echoed))

    def whole(self, deltas: Sequence[_CompletionDelta]) -> Answer:
        parts: dict[int, list[_CompletionDelta]] = {}
        for delta in deltas:
            parts.setdefault(delta.index, []).append(delta)
        return self._answer([self._joined(parts[index]) for index in sorted(parts)], self._run.usage)

    def _joined(self, deltas: list[_CompletionDelta]) -> CompletionChoice:
        ordered = sorted(deltas, key=lambda delta: not delta.echoed)
        last = next(delta for delta in reversed(ordered) if delta.finish_reason is not None)
        whole = CompletionChoice(
            deltas[0].index, "".join(delta.text for delta in ordered), None, last.finish_reason, last.stop_reason
        )
        maker = self._maker_of(whole.index)
        if maker is not None:
            listed = CompletionLogprobs()
            for delta in ordered:
                listed.extend(maker.make(delta.token_ids, delta.logprobs, spelled=delta.echoed))
            whole.logprobs = msgspec.Raw(listed.write())
        wanted = self._plan.prompt_logprobs
        whole.prompt_logprobs = None
        if wanted is not None:
            output = self._run.outputs[whole.index // self._plan.sampling.n]
            whole.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._names, wanted)
        return self._with_token_ids(whole, ordered)

    def _choice(self, delta: _CompletionDelta) -> CompletionChoice:
        maker, logprobs = self._maker_of(delta.index), None
        if maker is not None:
            logprobs = msgspec.Raw(maker.text(delta.token_ids, delta.logprobs, spelled=delta.echoed))
        choice = CompletionChoice(delta.index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        return self._with_token_ids(choice, [delta])

    def _with_token_ids(self, choice: CompletionChoice, deltas: Sequence[_CompletionDelta]) -> CompletionChoice:
        """A choice, if they are wanted with the ids that it gained, and the first time with its prompt's."""
        if self._with_ids:
            choice.token_ids = [token_id for delta in deltas if not delta.echoed for token_id in delta.token_ids]
            if choice.index not in self._named:
                self._named.add(choice.index)
                choice.prompt_token_ids = self._plan.prompts[choice.index // self._plan.sampling.n].token_ids
        return choice

    def _maker_of(self, index: int) -> CompletionLogprobsMaker | None:
        """Makes the log-probabilities of a choice, whose deltas come in order; None where the request wants none."""
        top_n = self._plan.logprobs
        if top_n is None:
            return None
        maker = self._makers.get(index)
        if maker is None:
            rows = self._names.rows(completion_rows, top_n)
            maker = self._makers[index] = CompletionLogprobsMaker(self._names, rows)
        return maker

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._every_usage:
            return self._run.usage
        return None if self._last_usage else UNSET

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Answer:
        return Answer(
            id=self._request_id,
            object="text_completion",
            created=self._created,
            model=self._api.model.name,
            system_fingerprint=self._api.fingerprint,
            choices=choices,
            usage=usage,
        )
