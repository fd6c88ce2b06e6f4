"""`POST /v1/completions`."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api, new_id
from realizar.server.errors import refused, renaming, unsupported
from realizar.server.generation.logprob_rows import LogprobRows
from realizar.server.generation.merge import Admission, merged
from realizar.server.generation.objects import check_neutral
from realizar.server.generation.prompt_read import check_progress
from realizar.server.generation.prompts import Prompt, tokenize_prompts
from realizar.server.generation.run import Run, deltas_of
from realizar.server.generation.sampling import build_sampling, check_listed_ids, check_priority, check_top, fitting
from realizar.server.http.body import read_record
from realizar.server.http.request import compute
from realizar.server.http.request_memory import RequestLease, lease_of
from realizar.server.http.sse import encode_event
from realizar.server.http.work import Stop
from realizar.server.models.models import model_of
from realizar.server.models.needs import completes
from realizar.server.openai.chunks import ChunkEncoder, usage_of
from realizar.server.openai.fields import check_stream, find_structured, read_wishes
from realizar.server.openai.logprobs import (
    CompletionLogprobsMaker,
    CompletionToken,
    completion_rows,
    prompt_logprobs,
    write_completion,
)
from realizar.server.openai.records import NEUTRAL, CompletionChoice, CompletionRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint, where the model has none


async def completions(request: Request) -> Response:
    record = await read_record(request, CompletionRequest)
    given = None if record.truncate_prompt_tokens is not None else record.prompt
    api = await model_of(request, record.model, need=completes(given, record.max_tokens))
    plan = await compute(request, lambda stop: plan_completions(api, record, stop))
    run = _CompletionRun(api, plan, new_id("cmpl-"), lease_of(request))
    return await run.answer(request, _CompletionEncoder(record, run), stream=record.stream)


def plan_completions(api: Api, record: CompletionRequest, stop: Stop) -> _CompletionPlan:
    """Check a request and tokenize its prompts. This may take a second, so it must not run on the event loop.

    `stop` is checked between the parts of the work. Raises ApiError or RealizarError where the request is refused.
    """
    check_neutral(record, NEUTRAL)
    check_stream(record, "; echo with logprobs can")
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
    if record.suffix:
        _check_suffix(record)
    prompts = tokenize_prompts(
        record.prompt,
        api,
        stop,
        param="prompt",
        add_special=record.add_special_tokens is not False,
        suffix=record.suffix or "",
        last=record.truncate_prompt_tokens,
    )
    _check_answers(len(prompts), sampling.n, api.settings.max_choices)
    check_listed_ids(sampling, len(prompts))
    check_progress(record.return_progress, stream=record.stream)
    names = api.names(as_ids=record.return_tokens_as_token_ids)
    return _CompletionPlan(
        record=record,
        prompts=prompts,
        sampling=sampling,
        score_only=score_only,
        rows=None if logprobs is None else names.rows(completion_rows, logprobs),
        bounded_by_context=not wishes.bounds_answer,
        priority=check_priority(record.priority, allowed=api.settings.allow_request_priority),
        structured_field="structured" if found is None else found[0],
    )


def _check_suffix(record: CompletionRequest) -> None:
    if record.prompt is None:
        raise refused("suffix needs a prompt, the text before the hole; it may be empty", "prompt", "invalid_value")
    if record.echo:
        raise unsupported("echo", "can't be combined with suffix")
    if record.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "can't be combined with suffix")


def _check_answers(prompts: int, n: int, most: int) -> None:
    if prompts * n > most:
        message = f"{prompts} prompts with n={n}; at most {most} answers are made for one request"
        raise refused(message, "n", "invalid_value")


# `_CompletionRun`: a running completion request, with one part for each prompt and its echo.


@dataclass(frozen=True, slots=True)
class _CompletionPlan:
    """A prepared completion request.

    Attributes:
        sampling: the engine's sampling parameters for every prompt; `echo` uses its `prompt_logprobs` too.
        score_only: generate nothing.
        rows: writes log-probabilities, if they are wanted.
        bounded_by_context: `max_tokens` may be more than the context leaves.
        structured_field: the field that constrains the answer.
    """

    record: CompletionRequest
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    score_only: bool
    rows: LogprobRows | None
    bounded_by_context: bool
    priority: int
    structured_field: str


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class _CompletionDelta:
    """The output that one choice gained; `echoed` marks the echo of the prompt.

    Where `source` tells of a prompt, `index` is that of the first of its choices.
    """

    index: int
    source: ChoiceDelta
    echoed: bool = False


class _CompletionRun(Run[_CompletionDelta]):
    """A completion request in the engine.

    Its deltas come as they arrive. Those of one choice come in order, except that an echo with log-probabilities comes
    last unless the answer is streamed.

    Attributes:
        outputs: the finished parts, by prompt.
    """

    def __init__(self, api: Api, plan: _CompletionPlan, request_id: str, lease: RequestLease) -> None:
        super().__init__(api, request_id, lease, sum(len(prompt.token_ids) for prompt in plan.prompts))
        self.plan = plan
        self._admission = Admission(max(1, self.info.max_running // plan.sampling.n))
        self.outputs: dict[int, RequestOutput] = {}
        self._cached: dict[int, int] = {}  # tokens found in the cache, by prompt

    def asked(self) -> dict[str, Any]:
        return {"prompts": len(self.plan.prompts), **super().asked()}

    def deltas(self) -> AsyncGenerator[_CompletionDelta]:
        if (scored := self.plan.sampling.prompt_logprobs) is not None:
            self._lease.hold_logprobs(self.num_prompt_tokens, scored)
        if self.plan.rows is not None:
            self._lease.begin_logprobs()
        return merged([functools.partial(self._part, place) for place in range(len(self.plan.prompts))])

    async def _part(self, place: int) -> AsyncGenerator[_CompletionDelta]:
        plan, sampling = self.plan, self.plan.sampling
        echo, streams = plan.record.echo, plan.record.stream and not plan.score_only
        is_scored = echo and plan.rows is not None
        scores_first = is_scored and streams
        where = f"prompt[{place}]" if len(plan.prompts) > 1 else "prompt"
        with renaming({"prompt": where, "structured": plan.structured_field}):
            async with self._admission.slots:
                if scores_first:
                    for echoed in self._echo(place, await self._score(place)):
                        yield echoed
                if streams:
                    sampling = replace(sampling, prompt_logprobs=plan.record.prompt_logprobs)
                stream = await self._admission.enter(lambda: self._submit(place, sampling, score_only=plan.score_only))
                self._streams.append(stream)
                counted = deltas_of(stream, self.api.metrics, self._lease, plan.record.logprobs or 0)
                async with stream, aclosing(counted) as deltas:
                    if echo and not is_scored:  # only now: a refusal before any output is an ordinary answer
                        for echoed in self._echo(place, None):
                            yield echoed
                    async for delta in deltas:
                        self.num_completion_tokens += len(delta.token_ids)
                        self._snapshots[stream, delta.choice] = delta.snapshots
                        yield _CompletionDelta(place * sampling.n + delta.choice, delta)
                output = self.outputs[place] = await stream.result()
                self._ended(place, output)
                self.output = output if len(plan.prompts) == 1 else None
                if is_scored and not scores_first:
                    for echoed in self._echo(place, output):
                        yield echoed

    async def _score(self, place: int) -> RequestOutput:
        """Score a prompt by itself, so that its log-probabilities can be sent before the first token."""
        sampling = replace(self.plan.sampling, n=1, structured=None, max_tokens=None, min_tokens=0)
        stream = await self._admission.enter(lambda: self._submit(place, sampling, score_only=True))
        async with stream:
            scored = await stream.result()
        self._snapshots[stream, 0] = scored.snapshots
        self._ended(place, scored)  # the generation finds these tokens in the cache
        return scored

    def _ended(self, place: int, output: RequestOutput) -> None:
        self._cached.setdefault(place, output.num_cached_tokens)
        if len(self._cached) == len(self.plan.prompts):
            self.num_cached_tokens = sum(self._cached.values())

    def _echo(self, place: int, scored: RequestOutput | None) -> list[_CompletionDelta]:
        prompt, count = self.plan.prompts[place], self.plan.sampling.n
        text = prompt.text
        if text is None:
            text = self.api.model.tokenizer.decode(prompt.token_ids, skip_special=False)
        echo = ChoiceDelta(self.id, 0, text, ())
        if scored is not None and scored.prompt_logprobs is not None:
            echo.token_ids = prompt.token_ids
            echo.logprobs = cast("Sequence[TokenLogprobs]", scored.prompt_logprobs)  # the first token has none
        return [_CompletionDelta(place * count + choice, echo, echoed=True) for choice in range(count)]

    async def _submit(self, place: int, sampling: SamplingParams, *, score_only: bool) -> AsyncStream:
        plan, prompt = self.plan, self.plan.prompts[place]
        scoring = score_only and not plan.score_only
        if plan.bounded_by_context:
            sampling, _ = fitting(sampling, self.info.max_request_tokens - len(prompt.token_ids))
        return await self.api.engine.generate(
            prompt.token_ids,
            sampling,
            request_id=f"{self.id}-{place}{'-scored' if scoring else ''}",
            prompt=prompt.text,
            priority=plan.priority,
            cache_salt=plan.record.cache_salt,
            client=self._lease.client,
            score_only=score_only,
            reports_progress=bool(plan.record.return_progress) and not scoring,
        )


class _CompletionEncoder(ChunkEncoder[_CompletionDelta]):
    def __init__(self, record: CompletionRequest, run: _CompletionRun) -> None:
        super().__init__(record, run, "text_completion")
        self._run, self._plan = run, run.plan
        self._named: set[int] = set()  # choices whose prompt was sent
        self._makers: dict[int, CompletionLogprobsMaker] = {}
        self._deltas: dict[int, list[_CompletionDelta]] = {}  # of a whole answer, by choice

    def take_in(self, delta: _CompletionDelta) -> None:
        self._deltas.setdefault(delta.index, []).append(delta)

    def grown(self, delta: _CompletionDelta) -> bytes:
        source = delta.source
        if source.prompt_progress is not None:
            return self._progress(CompletionChoice(delta.index, "", None, None), source.prompt_progress)
        if not source.text and not source.token_ids and source.finish_reason is None:
            return b""
        maker = self._maker_of(delta.index)
        logprobs = None if maker is None else maker.text(source.token_ids, source.logprobs, spelled=delta.echoed)
        data = self._only_text(delta, logprobs)
        if data is None:
            listed = None if logprobs is None else msgspec.Raw(logprobs)
            choice = CompletionChoice(delta.index, source.text, listed, source.finish_reason, source.stop_reason)
            data = encode_event(self._chunk(self._with_token_ids(choice, [delta])))
        return data

    def _only_text(self, delta: _CompletionDelta, logprobs: bytes | None) -> bytes | None:
        """The event of a delta that is one text; None for the last of a choice, and with usage in every event."""
        if self._every_usage or self._with_ids or delta.source.finish_reason is not None:
            return None
        template = self._templates.get(delta.index)
        if template is None:
            empty = CompletionChoice(delta.index, "", None, None)
            template = self._template(empty, "text", has_logprobs=logprobs is not None)
        return template.encode(delta.source.text, logprobs or b"")

    def whole(self) -> bytes:
        return msgspec.json.encode(
            self._answer([self._joined(self._deltas[index]) for index in sorted(self._deltas)], usage_of(self._run))
        )

    def _joined(self, deltas: list[_CompletionDelta]) -> CompletionChoice:
        ordered = sorted(deltas, key=lambda delta: not delta.echoed)
        last = next(delta.source for delta in reversed(ordered) if delta.source.finish_reason is not None)
        text = "".join(delta.source.text for delta in ordered)
        whole = CompletionChoice(deltas[0].index, text, None, last.finish_reason, last.stop_reason)
        maker = self._maker_of(whole.index)
        if maker is not None:
            listed = list[CompletionToken]()
            for delta in ordered:
                listed += maker.make(delta.source.token_ids, delta.source.logprobs, spelled=delta.echoed)
            whole.logprobs = msgspec.Raw(write_completion(listed))
        wanted = self._plan.record.prompt_logprobs
        whole.prompt_logprobs = None
        if wanted is not None:
            output = self._run.outputs[whole.index // self._plan.sampling.n]
            whole.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._names, wanted)
        return self._with_token_ids(whole, ordered)

    def _with_token_ids(self, choice: CompletionChoice, deltas: Sequence[_CompletionDelta]) -> CompletionChoice:
        """A choice, if they are wanted with the ids that it gained, and the first time with its prompt's."""
        if self._with_ids:
            choice.token_ids = [token_id for delta in deltas if not delta.echoed for token_id in delta.source.token_ids]
            if choice.index not in self._named:
                self._named.add(choice.index)
                choice.prompt_token_ids = self._plan.prompts[choice.index // self._plan.sampling.n].token_ids
        return choice

    def _maker_of(self, index: int) -> CompletionLogprobsMaker | None:
        """Makes the log-probabilities of a choice, whose deltas come in order; None where the request wants none."""
        maker = self._makers.get(index)
        if maker is None and self._plan.rows is not None:
            maker = self._makers[index] = CompletionLogprobsMaker(self._names, self._plan.rows)
        return maker
