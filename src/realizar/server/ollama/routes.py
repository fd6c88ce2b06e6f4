"""Ollama's dialect: its routes, the lines of its answers, and the form of its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import HubError, UnknownModelError
from realizar.hub.pull import network_name
from realizar.request import Client
from realizar.server.api import Api, new_id
from realizar.server.errors import ApiError, cleaned, refused, unsupported
from realizar.server.generation.answer import AnswerDelta, FinishReason, WholeCall, arguments_object
from realizar.server.generation.answer_events import AnswerEvents, Encoder
from realizar.server.generation.chat_plan import ChatPlan, after_ids, plan_chat, plan_text
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.embedding import UnitVector, embed_all, pooling_of
from realizar.server.generation.logprob_rows import RowsOfKinds, chat_rows
from realizar.server.generation.prompts import check_num_prompts, tokenize_prompts
from realizar.server.generation.state_snapshots import note_snapshots
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import compute, note, settings_of
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.http.work import Stop
from realizar.server.models.models import models_of
from realizar.server.models.needs import chats, embeds
from realizar.server.models.pulls import PullEvent, Pulls
from realizar.server.ollama.conversation import (
    OPTION_NAMES,
    check_answer_fields,
    read_chat,
    read_generate,
    read_options,
    shows_thinking,
)
from realizar.server.ollama.listing import running, show, tags, version
from realizar.server.ollama.messages import check_images
from realizar.server.ollama.names import find_model, model_for, network_part, unloads
from realizar.server.ollama.records import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    RefusedRequest,
    ShowRequest,
)
from realizar.server.ollama.times import Clock, now
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta
from realizar.tokenizer.tokenizer import Tokenizer

# `Answering` makes an answer of Ollama's API: a line of JSON for each part and one for the end, or all in one object.
#
# A line of a stream has what its part adds; the last one has no text, the reason of the end, and the figures.

_encode = msgspec.json.Encoder().encode


class Form(Protocol):
    def show(self, part: _Part) -> dict[str, Any]:
        """The fields of a part; those of an empty one are in every answer."""

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        """Fields of the end alone. Args: token_ids: those that were generated."""


class Answering(Encoder[AnswerDelta]):
    """Answers one request, whose model has the name that it gave; `clock` began as it came."""

    def __init__(
        self, api: Api, plan: ChatPlan, run: ChatRun, form: Form, clock: Clock, name: str, *, with_thinking: bool
    ) -> None:
        self._api, self._plan, self._run, self._form, self._clock, self._name = api, plan, run, form, clock, name
        self._parts = _Parts(with_thinking=with_thinking)
        self._token_ids: list[int] = []
        self._reason: FinishReason = "stop"
        top = plan.sampling.logprobs
        rows = None if top is None else api.token_names.rows(chat_rows, top)
        self._rows = None if rows is None else RowsOfKinds(rows, ("content", "reasoning", "other"))

    def grown(self, delta: AnswerDelta) -> bytes:
        return b"".join(map(self._line, self.take_in(delta)))

    def last(self) -> bytes:
        return self._line(_Part(), self._end())

    def whole(self, parts: list[_Part]) -> bytes:
        return self._line(_joined(parts), self._end())

    def take_in(self, delta: AnswerDelta) -> list[_Part]:
        self._clock.came()
        self._token_ids += delta.source.token_ids
        made = list(self._parts.take_in(delta.parsed))
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            made += self._parts.finish()
        if self._rows is not None and (listed := self._rows.take_in(delta)):
            made = made or [_Part()]
            made[0].logprobs = listed
        return made

    def _end(self) -> dict[str, Any]:
        run = self._run
        figures = self._clock.figures(len(self._plan.token_ids), run.num_completion_tokens, run.output)
        reason = "length" if self._reason == "length" else "stop"
        snapshots = run.state_snapshots
        used = {} if snapshots is UNSET else {"state_snapshots": snapshots}
        return {"done_reason": reason, **self._form.last(self._token_ids), **figures, **used}

    def _line(self, part: _Part, end: dict[str, Any] | None = None) -> bytes:
        head = {"model": self._name, "created_at": now(), **self._form.show(part)}
        if part.logprobs:
            head["logprobs"] = msgspec.Raw(b"[%b]" % b",".join(part.logprobs))
        return _encode({**head, "done": end is not None, **(end or {})}) + b"\n"


async def answer(
    request: Request,
    api: Api,
    plan: ChatPlan,
    form: Form,
    clock: Clock,
    name: str,
    *,
    stream: bool,
    with_thinking: bool,
) -> Response:
    """Answer a request, whole or as a stream. For the arguments see `Answering`."""
    note(request, model=api.model.name, prompt=len(plan.token_ids))
    run = ChatRun(api, plan, new_id("ollama-"), lease_of(request))
    answering = Answering(api, plan, run, form, clock, name, with_thinking=with_thinking)
    events, parts = AnswerEvents(request, run, api.settings), list[_Part]()
    clock.submitted()
    if stream:
        return events.stream(answering)
    await events.whole(lambda delta: parts.extend(answering.take_in(delta)))
    return Response(answering.whole(parts), media_type="application/json")


def loaded(form: Form, name: str, *, unload: bool) -> Response:
    """The answer to a request that only asks for its model to be loaded or unloaded: it is."""
    reason = "unload" if unload else "load"
    body = {"model": name, "created_at": now(), **form.show(_Part()), "done": True, "done_reason": reason}
    return Response(_encode(body), media_type="application/json")


# `POST /api/embed`, and `POST /api/embeddings`, which is older and has a single prompt.

_SLACK = 64  # tokens that cutting a text may add to its end
_GROWTH = 4


async def _embed(request: Request) -> Response:
    """Embed texts. A request without any finds the model loaded."""
    clock = Clock()
    record = await read_record(request, EmbedRequest)
    api = await model_for(request, record.model, record.keep_alive, clock, embeds)
    texts = [record.input] if isinstance(record.input, str) else record.input
    info = api.engine.info
    size = info.hidden_size
    if record.dimensions is not None and record.dimensions != size:
        raise unsupported("dimensions", f"must be {size}: this model's vectors can't be shortened")
    cut = record.truncate is not False
    units = await _embedded(request, api, [] if texts == [""] else texts, "input", cut=cut)
    figures: dict[str, Any] = {**clock.totals(), "prompt_eval_count": sum(unit.num_prompt_tokens for unit in units)}
    snapshots = note_snapshots(request, info, (unit.snapshots for unit in units))
    if snapshots is not UNSET:
        figures["state_snapshots"] = snapshots
    start = b'{"model":%b,"embeddings":[' % msgspec.json.encode(record.model)
    end = b"],%b" % msgspec.json.encode(figures)[1:]
    body = await _encoded(request, units, start, end)
    return Response(memoryview(body), media_type="application/json")


async def _embeddings(request: Request) -> Response:
    record = await read_record(request, EmbeddingsRequest)
    api = await model_for(request, record.model, record.keep_alive, Clock(), embeds)
    info = api.engine.info
    units = await _embedded(request, api, [record.prompt] if record.prompt else [], "prompt", cut=True)
    note_snapshots(request, info, (unit.snapshots for unit in units))
    body = await _encoded(request, units, b'{"embedding":', b"}") if units else b'{"embedding":[]}'
    return Response(bytes(body), media_type="application/json")


async def _embedded(request: Request, api: Api, texts: Sequence[str], field: str, *, cut: bool) -> list[UnitVector]:
    """The vectors of some texts; `cut` cuts those that are longer than the context to their beginning."""
    pooling = pooling_of(api)
    if not texts:
        return []
    prompts = await compute(request, lambda stop: _tokenized(api, texts, field, stop, cut=cut))
    note(request, model=api.model.name, prompts=len(prompts), prompt=sum(map(len, prompts)))
    lease_of(request).hold_vectors(len(prompts), api.engine.info.hidden_size, as_base64=False)
    name = f"{field}[{{}}]" if len(prompts) > 1 else field
    return await embed_all(request, api, prompts, pooling, new_id("ollama-"), name.format, UnitVector.of)


def _tokenized(api: Api, texts: Sequence[str], field: str, stop: Stop, *, cut: bool) -> list[tuple[int, ...]]:
    given: list[str | Sequence[int]] = list(texts)
    if cut:
        check_num_prompts(texts, field, api.settings.max_prompts)
        given = [_beginning(text, api.model.tokenizer, api.max_tokens, stop) for text in texts]
    prompts = tokenize_prompts(
        given,
        api.model.tokenizer,
        stop,
        param=field,
        max_prompts=api.settings.max_prompts,
        max_tokens=api.max_tokens,
        add_special=True,
    )
    return [prompt.token_ids for prompt in prompts]


def _beginning(text: str, tokenizer: Tokenizer, most: int, stop: Stop) -> list[int]:
    """The ids of a text, cut to `most`. Longer and longer beginnings are tokenized until one has more."""
    size = 2 * most + _SLACK
    while True:
        stop.check()
        ids = tokenizer.encode(text[:size]) if text else []
        if len(ids) > most + _SLACK or size >= len(text):
            break
        size *= _GROWTH
    if len(ids) <= most:
        return ids
    kept = 1 if tokenizer.add_eos else 0  # a vector of the last token is that of the end
    return [*ids[: most - kept], *ids[len(ids) - kept :]]


async def _encoded(request: Request, units: Sequence[UnitVector], start: bytes, end: bytes) -> bytearray:
    """The answer: vectors between its start and its end. Only one at a time is converted to Python's numbers."""

    def encode(stop: Stop) -> bytearray:
        body = bytearray(start)
        for place, unit in enumerate(units):
            stop.check()
            body += b"," * (place > 0)
            body += msgspec.json.encode(unit.vector.astype(np.float64).tolist())
        return body + end

    return await compute(request, encode, sum(unit.vector.nbytes for unit in units))


# Routes that change the models of Ollama. `/api/pull` fetches models where the operator allows it; others are
# refused.
#
# A server's models are chosen by whoever runs it: a client that may pull could fill the disk, and one that may delete
# could take a model from all others.

_CHOSEN = "the models of this server are chosen by whoever runs it, with `realizar pull`, `realizar rm` and `serve`"
_SUCCESS = msgspec.json.encode({"status": "success"})


async def _pull(request: Request) -> Response:
    """Fetch a model, which is served then. One that is served already is there: nothing is asked of the network."""
    record = await read_record(request, PullRequest)
    models, settings = models_of(request), settings_of(request)
    name = record.model or record.name or ""
    try:
        find_model(models, name)
    except ApiError as error:
        if error.status != 404:
            raise
        if models.pulls is None:
            raise refused(
                f"{error.message}, and no request can pull another without --allow-pull: {_CHOSEN}", "model"
            ) from None
        lines = _lines(models.pulls, _checked(name), lease_of(request).client)
    else:
        lines = _no_lines()
    if record.stream is not False:
        return EventStream(lines, settings.ping_interval_s, settings.write_timeout_s)
    await unless_disconnected(request.receive, _whole(lines))
    return Response(_SUCCESS, media_type="application/json")


def _checked(name: str) -> str:
    """The name of a model of the network. Raises ApiError: 400; it is none."""
    try:
        return network_name(network_part(name))
    except UnknownModelError as error:
        raise refused(str(error), "model", "invalid_value") from None


async def _lines(pulls: Pulls, name: str, client: Client) -> AsyncGenerator[bytes]:
    """The lines of a stream. Raises ApiError: 404; no model has the name. 502; it can't be fetched or served."""
    try:
        async with aclosing(pulls.events(name, client)) as events:
            async for event in events:
                yield _line(event)
    except UnknownModelError as error:
        raise ApiError(404, cleaned(str(error)), param="model", code="model_not_found") from None
    except HubError as error:
        raise ApiError(502, cleaned(str(error)), kind="server_error", param="model", code="pull_failed") from None
    yield _SUCCESS + b"\n"


async def _no_lines() -> AsyncGenerator[bytes]:
    yield _SUCCESS + b"\n"


async def _whole(lines: AsyncGenerator[bytes]) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass


def _line(event: PullEvent) -> bytes:
    fields = {"status": event.status, "digest": event.digest, "total": event.total, "completed": event.completed}
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None}) + b"\n"


def _refusing(name: str, record: type[msgspec.Struct] | None) -> Callable[[Request], Awaitable[Response]]:
    """Make a handler that refuses all requests, well-formed ones too; a record of None does not read the body."""

    async def refuse(request: Request) -> Response:
        if record is not None:
            await read_record(request, record)
        raise refused(f"{name} is not supported: {_CHOSEN}", None, "not_supported")

    return refuse


# `POST /api/generate`.


class _GenerateForm:
    """The form of `/api/generate`: a text. The prompt begins the `context` of the end; None gives none."""

    def __init__(self, prompt_ids: Sequence[int] | None = None) -> None:
        self._prompt_ids = prompt_ids

    def show(self, part: _Part) -> dict[str, Any]:
        return {"response": part.content, **({"thinking": part.thinking} if part.thinking else {})}

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        return {} if self._prompt_ids is None else {"context": [*self._prompt_ids, *token_ids]}


async def _generate(request: Request) -> Response:
    clock = Clock()
    record = await read_record(request, GenerateRequest)
    if not record.prompt and not record.suffix:
        return loaded(_GenerateForm(), record.model, unload=await unloads(request, record.model, record.keep_alive))
    api = await model_for(request, record.model, record.keep_alive, clock)
    plan = await compute(request, lambda stop: _plan_generate(api, record, stop))
    return await answer(
        request,
        api,
        plan,
        _GenerateForm(None if _is_text(api, record) else plan.token_ids),
        clock,
        record.model,
        stream=record.stream is not False,
        with_thinking=shows_thinking(record),
    )


def _plan_generate(api: Api, record: GenerateRequest, stop: Stop) -> ChatPlan:
    """Check a request and prepare its prompt. This may take a second, so it must not run on the event loop.

    Raises ApiError or RealizarError where the request is refused.
    """
    check_answer_fields(record)
    check_images("", record.images)
    _check_context(api, record.context or ())
    if not _is_text(api, record):
        plan = plan_chat(api, read_generate(api, record), stop)
        return after_ids(api, plan, record.context) if record.context else plan
    for name in ("system", "context", "think"):
        if getattr(record, name):
            raise refused(f"{name} can't be combined with {_reason(record)}", name)
    wishes = read_options(api, record)
    return plan_text(api, record.prompt or "", record.suffix or "", wishes, OPTION_NAMES, stop)


def _is_text(api: Api, record: GenerateRequest) -> bool:
    """True if the answer goes on with the prompt, or fills a hole after it."""
    return bool(record.raw or record.suffix) or api.model.template is None


def _reason(record: GenerateRequest) -> str:
    if record.suffix:
        return "suffix"
    return "raw" if record.raw else "a model that has no chat template"


def _check_context(api: Api, given: Sequence[int]) -> None:
    if len(given) > api.max_tokens:
        raise refused(f"context has {len(given)} tokens, above the context of {api.max_tokens}", "context")
    size = api.model.tokenizer.vocab_size
    wrong = next((token_id for token_id in given if not 0 <= token_id < size), None)
    if wrong is not None:
        raise refused(f"context holds token id {wrong}; the vocabulary has 0 to {size - 1}", "context")


# `POST /api/chat`.


class _ChatForm:
    def show(self, part: _Part) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            message["tool_calls"] = part.calls
        return {"message": message}

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        return {}


async def _chat(request: Request) -> Response:
    clock = Clock()
    record = await read_record(request, ChatRequest)
    if not record.messages:
        return loaded(_ChatForm(), record.model, unload=await unloads(request, record.model, record.keep_alive))
    api = await model_for(request, record.model, record.keep_alive, clock, chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_chat(api, record), stop))
    return await answer(
        request,
        api,
        plan,
        _ChatForm(),
        clock,
        record.model,
        stream=record.stream is not False,
        with_thinking=shows_thinking(record),
    )


_REFUSED = (("/api/delete", "DELETE"), ("/api/copy", "POST"), ("/api/create", "POST"), ("/api/push", "POST"))


def error_body(error: ApiError) -> dict[str, Any]:
    """Its form has no place for the field at fault: the message names it."""
    message = error.message if (error.param or "") in error.message else f"{error.param}: {error.message}"
    return {"error": message}


def _error_line(error: ApiError) -> bytes:
    return msgspec.json.encode(error_body(error)) + b"\n"


OLLAMA = Dialect(
    name="Ollama",
    routes=(
        ApiRoute("/api/chat", _chat, "Answer a conversation (Ollama's).", ChatRequest),
        ApiRoute("/api/generate", _generate, "Answer a prompt (Ollama's).", GenerateRequest),
        ApiRoute("/api/tags", tags, "The models (Ollama's)."),
        ApiRoute("/api/ps", running, "The models that are loaded (Ollama's)."),
        ApiRoute("/api/show", show, "A model (Ollama's).", ShowRequest),
        ApiRoute("/api/embed", _embed, "Embed texts (Ollama's).", EmbedRequest),
        ApiRoute("/api/embeddings", _embeddings, "Embed a text (Ollama's older route).", EmbeddingsRequest),
        ApiRoute("/api/pull", _pull, "Find a model, or fetch it where the server allows it.", PullRequest),
        *(
            ApiRoute(path, _refusing(path, RefusedRequest), "Refused: requests change no models.", RefusedRequest, verb)
            for path, verb in _REFUSED
        ),
        ApiRoute(
            "/api/blobs/{digest}", _refusing("/api/blobs", None), "Refused: requests change no models.", verb="POST"
        ),
        ApiRoute("/api/version", version, "The version of Ollama whose API this is."),
    ),
    folder="/api/",
    takes_any_type=True,  # litellm sends none, and curl's -d, as Ollama's own examples have it, that of a form
    error_body=error_body,
    error_schema={"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    # Space between the lines of JSON is no part of any: clients, who know no pings, read on.
    stream=StreamForm(ping=b" ", end=b"", error=_error_line, media_type="application/x-ndjson"),
)


@dataclass(slots=True)
class _Part:
    """The addition of one line of a stream to an answer, or the whole answer; `logprobs` are JSON of tokens."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)


class _Parts:
    """Takes in what an answer gains, reasoning only with `with_thinking`, and gives the parts that are complete."""

    def __init__(self, *, with_thinking: bool) -> None:
        self._with_thinking = with_thinking
        self._call: WholeCall | None = None
        self._num_calls = 0

    def take_in(self, parsed: Iterable[ParsedDelta]) -> Iterator[_Part]:
        """The parts that some output completes. A call is complete when something follows it."""
        for delta in parsed:
            match delta:
                case ContentDelta(text):
                    yield from self.finish()
                    yield _Part(content=text)
                case ReasoningDelta(text):
                    yield from self.finish()
                    if self._with_thinking:
                        yield _Part(thinking=text)
                case ToolCallDelta():
                    if delta.index >= self._num_calls:
                        yield from self.finish()
                        self._call = WholeCall(delta.id or "", delta.name or "")
                        self._num_calls += 1
                    if self._call is not None:
                        self._call.arguments += delta.arguments

    def finish(self) -> Iterator[_Part]:
        """The call that is open, if one is."""
        if self._call is not None:
            call, self._call = self._call, None
            function = {
                "index": self._num_calls - 1,
                "name": call.name,
                "arguments": arguments_object(call.arguments),
            }
            yield _Part(calls=[{"id": call.id, "function": function}])


def _joined(parts: Iterable[_Part]) -> _Part:
    found = list(parts)
    return _Part(
        "".join(part.content for part in found),
        "".join(part.thinking for part in found),
        [call for part in found for call in part.calls],
        [token for part in found for token in part.logprobs],
    )
