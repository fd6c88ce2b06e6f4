"""Ollama's dialect: its routes, the lines of its answers, and the form of its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import HubError, UnknownModelError
from realizar.hub.pull import network_name
from realizar.request import Client
from realizar.server.api import Api, new_id
from realizar.server.errors import ApiError, cleaned, refused
from realizar.server.generation.answer import AnswerDelta, AnswerPart, AnswerParts, arguments_object
from realizar.server.generation.chat_plan import ChatPlan, after_ids, plan_chat, plan_text
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.embedding import Embedded, check_dimensions, embed_texts, vectors_answer
from realizar.server.generation.prompts import Prompt, check_ids, check_num_prompts, tokenize_prompts
from realizar.server.generation.run import Encoder
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import compute, json_response
from realizar.server.http.request_memory import lease_of
from realizar.server.http.sse import EventStream
from realizar.server.http.work import Stop
from realizar.server.models.models import models_of
from realizar.server.models.needs import chats, embeds
from realizar.server.models.pulls import PullEvent, Pulls
from realizar.server.ollama.conversation import (
    OPTION_NAMES,
    read_chat,
    read_generate,
    read_options,
    shows_thinking,
)
from realizar.server.ollama.listing import running, show, tags, version
from realizar.server.ollama.messages import read_images
from realizar.server.ollama.names import find_model, model_for, network_part, unloads
from realizar.server.ollama.records import (
    AnswerRequest,
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    PullRequest,
    ShowRequest,
)
from realizar.server.ollama.times import Clock, now
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.tokenizer import Tokenizer

# `_AnswerEncoder` makes an answer of Ollama's API: a line of JSON for each part and one for the end, or all in one.
#
# A line of a stream has what its part adds; the last one has no text, the reason of the end, and the figures.

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Shown:
    """The addition of one line of a stream to an answer, or the whole answer; `logprobs` are JSON of tokens."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)


class _AnswerEncoder(Encoder[AnswerDelta]):
    """Answers one request, whose `clock` began as it came. `context` are ids that begin the `context` of the end."""

    def __init__(self, run: ChatRun, clock: Clock, record: AnswerRequest, context: Sequence[int] | None) -> None:
        self._run, self._clock, self._record, self._context = run, clock, record, context
        self._parts = AnswerParts(with_reasoning=shows_thinking(record))
        self._open: AnswerPart | None = None  # a call that may grow

    def take_in(self, delta: AnswerDelta) -> list[tuple[AnswerPart, str]]:
        self._clock.came()
        return self._parts.take_in(delta)

    def whole(self) -> bytes:
        parts, calls = self._parts, [_call(part) for part in self._parts.of("call")]
        return self._line(_Shown(parts.text("content"), parts.text("reasoning"), calls, parts.rows), self._end())

    def grown(self, delta: AnswerDelta) -> bytes:
        lines = list(self._grown(delta))
        if delta.rows:
            lines = lines or [_Shown()]
            lines[0].logprobs = list(delta.rows)
        return b"".join(map(self._line, lines))

    def last(self) -> bytes:
        return self._line(_Shown(), self._end())

    def _grown(self, delta: AnswerDelta) -> Iterator[_Shown]:
        """What a delta adds. A call is whole when something follows it."""
        for part, text in self.take_in(delta):
            if part is not self._open:
                yield from self._whole_call()
            match part.kind:
                case "content":
                    yield _Shown(content=text)
                case "reasoning":
                    yield _Shown(thinking=text)
                case "call":
                    self._open = part
        if delta.finish_reason is not None:
            yield from self._whole_call()

    def _whole_call(self) -> Iterator[_Shown]:
        call, self._open = self._open, None
        if call is not None:
            yield _Shown(calls=[_call(call)])

    def _end(self) -> dict[str, Any]:
        run, parts = self._run, self._parts
        figures = self._clock.figures(run.num_prompt_tokens, run.num_completion_tokens, run.output)
        reason = "length" if parts.finish_reason == "length" else "stop"
        context = {} if self._context is None else {"context": [*self._context, *parts.token_ids]}
        return {"done_reason": reason, **context, **figures, **run.snapshots}

    def _line(self, shown: _Shown, end: dict[str, Any] | None = None) -> bytes:
        head = _line_of(self._record, shown)
        if shown.logprobs:
            head["logprobs"] = msgspec.Raw(b"[%b]" % b",".join(shown.logprobs))
        return _encode({**head, "done": end is not None, **(end or {})}) + b"\n"


def _call(part: AnswerPart) -> dict[str, Any]:
    call = part.call or ToolCallDelta(0, None, None, "")
    function = {"index": call.index, "name": call.name or "", "arguments": arguments_object(part.text)}
    return {"id": call.id or "", "function": function}


def _line_of(record: AnswerRequest, shown: _Shown) -> dict[str, Any]:
    """The fields of a line: a message, or the text of `/api/generate`; those of an empty one are in every answer."""
    head = {"model": record.model, "created_at": now()}
    thinking = {"thinking": shown.thinking} if shown.thinking else {}
    if isinstance(record, GenerateRequest):
        return {**head, "response": shown.content, **thinking}
    calls = {"tool_calls": shown.calls} if shown.calls else {}
    return {**head, "message": {"role": "assistant", "content": shown.content, **thinking, **calls}}


async def _answer(
    request: Request,
    api: Api,
    plan: ChatPlan,
    clock: Clock,
    record: AnswerRequest,
    context: Sequence[int] | None = None,
) -> Response:
    """Answer a request, whole or as a stream, which null is too."""
    run = ChatRun(api, plan, new_id("ollama-"), lease_of(request), listed=("content", "reasoning", "other"))
    clock.submitted()
    return await run.answer(request, _AnswerEncoder(run, clock, record, context), stream=record.stream is not False)


async def _loaded(request: Request, record: AnswerRequest) -> Response:
    """Answer a request that only asks for its model to be loaded or unloaded."""
    reason = "unload" if await unloads(request, record.model, record.keep_alive) else "load"
    return json_response({**_line_of(record, _Shown()), "done": True, "done_reason": reason})


# `POST /api/embed`, and `POST /api/embeddings`, which is older and has a single prompt.

_SLACK = 64  # tokens that cutting a text may add to its end
_GROWTH = 4


async def _embed(request: Request) -> Response:
    """Embed texts. A request without any finds the model loaded."""
    clock = Clock()
    record = await read_record(request, EmbedRequest)
    api = await model_for(request, record.model, record.keep_alive, clock, embeds)
    texts = [record.input] if isinstance(record.input, str) else record.input
    check_dimensions(api, record.dimensions)
    cut = record.truncate is not False
    found = await _embedded(request, api, [] if texts == [""] else texts, "input", cut=cut)
    counts = {"prompt_eval_count": found.num_prompt_tokens, **found.snapshots}
    start = b'{"model":%b,"embeddings":[' % msgspec.json.encode(record.model)
    end = b"],%b" % msgspec.json.encode({**clock.totals(), **counts})[1:]
    return await vectors_answer(request, start, found.kept, end, _vector)


async def _embeddings(request: Request) -> Response:
    record = await read_record(request, EmbeddingsRequest)
    api = await model_for(request, record.model, record.keep_alive, Clock(), embeds)
    units = (await _embedded(request, api, [record.prompt] if record.prompt else [], "prompt", cut=True)).kept
    start, end = (b'{"embedding":', b"}") if units else (b'{"embedding":[', b"]}")
    return await vectors_answer(request, start, units, end, _vector)


async def _embedded(
    request: Request, api: Api, texts: Sequence[str], field: str, *, cut: bool
) -> Embedded[NDArray[np.float32]]:
    """The vectors of some texts; `cut` cuts those that are longer than the context to their beginning."""

    def tokenize(stop: Stop) -> list[Prompt]:
        if not texts:
            return []
        if not cut:
            return tokenize_prompts(list(texts), api, stop, param=field)
        check_num_prompts(texts, field, api.settings.max_prompts)
        cut_ids = [_beginning(text, api.model.tokenizer, api.max_tokens, stop) for text in texts]
        return tokenize_prompts(cut_ids, api, stop, param=field)

    return await embed_texts(request, api, field, tokenize, "ollama-")


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


def _vector(_place: int, unit: NDArray[np.float32]) -> bytes:
    return _encode(unit.astype(np.float64).tolist())


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
    models = models_of(request)
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
        return EventStream(lines)
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
        raise ApiError(502, cleaned(str(error)), param="model", code="pull_failed") from None
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


def _refusing(path: str) -> Callable[[Request], Awaitable[Response]]:
    """Make a handler that refuses all requests, whose bodies are not read."""

    async def refuse(request: Request) -> Response:
        raise refused(f"{path.partition('/{')[0]} is not supported: {_CHOSEN}", None, "not_supported")

    return refuse


# `POST /api/generate`.


async def _generate(request: Request) -> Response:
    clock = Clock()
    record = await read_record(request, GenerateRequest)
    if not record.prompt and not record.suffix and not record.images:
        return await _loaded(request, record)
    api = await model_for(request, record.model, record.keep_alive, clock)
    plan = await compute(request, lambda stop: _plan_generate(api, record, stop))
    return await _answer(request, api, plan, clock, record, None if _is_text(api, record) else plan.token_ids)


def _plan_generate(api: Api, record: GenerateRequest, stop: Stop) -> ChatPlan:
    """Check a request and prepare its prompt. This may take a second, so it must not run on the event loop.

    Raises ApiError or RealizarError where the request is refused.
    """
    images = read_images("", record.images)
    _check_context(api, record.context or ())
    if not _is_text(api, record):
        plan = plan_chat(api, read_generate(api, record, images), stop)
        return after_ids(api, plan, record.context) if record.context else plan
    for name in ("system", "context", "think", "images"):
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
    check_ids(given, api.model.tokenizer, "context")
    if api.model.images is not None and api.model.images.image_bytes(given):
        raise refused("context has tokens of an image, and not the image; /api/chat takes both again", "context")


# `POST /api/chat`.


async def _chat(request: Request) -> Response:
    clock = Clock()
    record = await read_record(request, ChatRequest)
    if not record.messages:
        return await _loaded(request, record)
    api = await model_for(request, record.model, record.keep_alive, clock, chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_chat(api, record), stop))
    return await _answer(request, api, plan, clock, record)


_REFUSED = (
    *(("/api/delete", "DELETE"), ("/api/copy", "POST"), ("/api/create", "POST"), ("/api/push", "POST")),
    ("/api/blobs/{digest}", "POST"),
)


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.whole_message}


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
        *(ApiRoute(path, _refusing(path), "Refused: requests change no models.", verb=verb) for path, verb in _REFUSED),
        ApiRoute("/api/version", version, "The version of Ollama whose API this is."),
    ),
    folder="/api/",
    takes_any_type=True,  # litellm sends none, and curl's -d, as Ollama's own examples have it, that of a form
    error_body=error_body,
    error_schema={"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    # Space between the lines of JSON is no part of any: clients, who know no pings, read on.
    stream=StreamForm(ping=b" ", end=b"", error=_error_line, media_type="application/x-ndjson"),
)
