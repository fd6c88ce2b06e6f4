"""OpenAI's dialect: its routes, with vLLM's for rerankers and the tokenizer, and the form of its errors."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import ContextLengthError
from realizar.images.prepare import read_bounds
from realizar.request import Pooling
from realizar.sampling_params import SAMPLERS
from realizar.server.api import Api, new_id, now_s
from realizar.server.errors import PLAIN_SCHEMA, about, plain_body, refused, unsupported
from realizar.server.generation.chat_plan import render_prompt, template_variables
from realizar.server.generation.conversation import text_of
from realizar.server.generation.embedding import check_dimensions, embed_all, embed_texts, note_prompts, vectors_answer
from realizar.server.generation.prompts import MAX_TOKENS, check_fits, tokenize_prompts
from realizar.server.generation.tools import shown_tools
from realizar.server.http.body import read_record
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.http.request import compute, json_response, settings_of
from realizar.server.http.sse import encode_event
from realizar.server.http.work import Stop
from realizar.server.model_facts import capabilities
from realizar.server.models.models import ModelStatus, model_of, models_of
from realizar.server.models.needs import embeds, no_ranker, ranks
from realizar.server.openai.chat import chat_completions
from realizar.server.openai.chunks import usage_of
from realizar.server.openai.completions import completions
from realizar.server.openai.conversation import check_messages, check_tools, continues_last
from realizar.server.openai.records import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from realizar.server.ranker import Ranker

# `/tokenize`, `/detokenize` and `/tokenizer_info`, for lm-eval's remote tokenizer and vLLM's clients.

MAX_BYTES = 1 << 19
"""Limit of a text in UTF-8, unless the context needs more. Tokenizing takes about a hundred times as much memory."""
_BYTES_PER_TOKEN = 8


async def _tokenize(request: Request) -> Response:
    record = await read_record(request, TokenizeRequest)
    api = await model_of(request, record.model)
    if (record.prompt is None) == (record.messages is None):
        raise refused("the request needs either prompt or messages", "prompt", "missing_required_parameter")
    answer = await compute(request, lambda _: _token_report(api, record))
    return Response(answer, media_type="application/json")


async def _detokenize(request: Request) -> Response:
    record = await read_record(request, DetokenizeRequest)
    api = await model_of(request, record.model)
    with about("tokens"):
        text = await compute(request, lambda _: api.model.tokenizer.decode(record.tokens, skip_special=False))
    return json_response({"prompt": text})


async def _tokenizer_info(request: Request) -> Response:
    """Answer with the facts that a client needs to render prompts and count tokens by itself."""
    model = (await model_of(request, request.query_params.get("model"))).model
    answer: dict[str, Any] = {
        "tokenizer_class": type(model.tokenizer).__name__,
        "vocab_size": model.tokenizer.vocab_size,
        "model_max_length": model.context_length,
        "add_bos_token": model.tokenizer.add_bos,
        "add_eos_token": model.tokenizer.add_eos,
        "chat_template": None if model.template is None else model.template.source(),
        **model.tokenizer.special_texts,
    }
    return json_response(answer)


def _token_report(api: Api, record: TokenizeRequest) -> bytes:
    """Make and encode the answer here, on the worker thread, since it may have a million tokens."""
    tokens = _tokens(api, record)
    texts = [api.model.tokenizer.token_text(token_id) for token_id in tokens] if record.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": api.max_model_len, "tokens": tokens, "token_strs": texts}
    return msgspec.json.encode(answer)


def _tokens(api: Api, record: TokenizeRequest) -> list[int]:
    # Longer texts than the context are allowed, so that clients can count them.
    messages = check_messages(record.messages) if record.messages is not None else []
    text = record.prompt if record.prompt is not None else text_of(messages)
    size = len(text.encode("utf-8", "surrogatepass"))
    most = max(MAX_BYTES, _BYTES_PER_TOKEN * api.max_model_len)
    if size > most:
        param = "messages" if messages else "prompt"
        raise refused(f"{param} has {size} bytes; at most {most} are tokenized at once", param, "string_too_long")
    if record.prompt is not None:
        with about("prompt"):
            return api.model.tokenizer.encode(record.prompt, add_special=record.add_special_tokens is not False)
    if api.model.template is None:
        raise refused("the model has no chat template; give a prompt", "messages", "no_chat_template")
    variables = template_variables(record.chat_template_kwargs)
    if record.add_special_tokens:
        raise unsupported("add_special_tokens", "must be false: the chat template writes special tokens")
    tools = shown_tools(check_tools(record.tools))
    continues = continues_last(record, messages[-1])
    with about("messages"):
        add_prompt = record.add_generation_prompt is not False
        return render_prompt(
            api, api.model.template, messages, tools, variables, add_prompt=add_prompt, continues=continues,
            bounds=read_bounds(record.mm_processor_kwargs),
        ).token_ids  # fmt: skip


# `GET /v1/models` and `GET /v1/models/{id}`; answered also while the weights are being loaded.

_SHOWN = (*(each.name for each in SAMPLERS), "max_tokens", "seed")
"""Sampling fields whose defaults are shown; a `max_tokens` of null is the rest of the context."""


async def _list_models(request: Request) -> Response:
    listed, pooling = models_of(request).listed(), settings_of(request).embeddings
    answer = {"object": "list", "data": [_card(model, name, pooling) for model in listed for name in model.names]}
    return json_response(answer)


async def _show_model(request: Request) -> Response:
    """Show one of the names, which may contain slashes."""
    name = request.path_params["name"]
    card = _card(models_of(request).find(name), name, settings_of(request).embeddings)
    return json_response(card)


def _card(model: ModelStatus, name: str, pooling: Pooling | None) -> dict[str, Any]:
    facts, largest = model.facts, model.facts.largest_image
    card = {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "realizar",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
        "default_sampling": {name: getattr(model.default_sampling, name) for name in _SHOWN},
        "state": model.state,
    }
    optional = {
        "capabilities": capabilities(facts, pooling) if facts.are_known else None,
        "largest_image": None if largest is None else {"edge": largest.edge, "pixels": largest.pixels},
        "reason": model.reason,
        "device": model.device_label,
        "memory_bytes": model.num_bytes,
        "host_memory_bytes": model.host_bytes,
        "unloads_at": model.unloads_s,
    }
    return card | {name: value for name, value in optional.items() if value is not None}


async def _embeddings(request: Request) -> Response:
    record = await read_record(request, EmbeddingRequest)
    api = await model_of(request, record.model, need=embeds)
    if record.encoding_format not in (None, "float", "base64"):
        raise refused("encoding_format must be float or base64", "encoding_format", "invalid_value")
    check_dimensions(api, record.dimensions)
    as_base64 = record.encoding_format == "base64"
    special, last = record.add_special_tokens is not False, record.truncate_prompt_tokens
    tokenize = functools.partial(tokenize_prompts, record.input, api, param="input", add_special=special, last=last)
    found = await embed_texts(request, api, "input", tokenize, "embd-", as_base64=as_base64)
    end = b'],"model":%b,"usage":%b}' % (msgspec.json.encode(api.model.name), msgspec.json.encode(usage_of(found)))
    write = functools.partial(_vector_data, as_base64=as_base64)
    return await vectors_answer(request, b'{"object":"list","data":[', found.kept, end, write)


def _vector_data(index: int, unit: NDArray[np.float32], *, as_base64: bool) -> bytes:
    """A vector as JSON: `as_base64` of little-endian float32, or as numbers."""
    vector = base64.b64encode(unit.data).decode() if as_base64 else unit.astype(np.float64).tolist()
    return msgspec.json.encode({"index": index, "embedding": vector, "object": "embedding"})


async def _rerank(request: Request) -> Response:
    record = await read_record(request, RerankRequest)
    api = await model_of(request, record.model, need=ranks)
    if record.top_n is not None and record.top_n < 0:
        raise refused("top_n must be at least 0, which is all", "top_n", "invalid_value")
    texts = [each if isinstance(each, str) else each.text for each in record.documents]
    pairs = [(record.query, text) for text in texts]
    names = _Names(lambda _: "query", "documents[{}]".format, "documents")
    scores, usage = await _score_all(request, api, pairs, names)
    order = sorted(range(len(texts)), key=lambda place: (-scores[place], place))
    results: list[dict[str, Any]] = [
        {"index": place, "relevance_score": scores[place]} for place in order[: record.top_n or None]
    ]
    if record.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return json_response({"id": new_id("rerank-"), "model": api.model.name, "usage": usage, "results": results})


async def _score(request: Request) -> Response:
    record = await read_record(request, ScoreRequest)
    api = await model_of(request, record.model, need=ranks)
    pairs = _pairs(record)
    names = _Names(_paths("text_1", record.text_1), _paths("text_2", record.text_2), "text_2")
    scores, usage = await _score_all(request, api, pairs, names)
    data = [{"index": place, "score": value, "object": "score"} for place, value in enumerate(scores)]
    head = {"id": new_id("score-"), "object": "list", "created": now_s(), "model": api.model.name}
    return json_response({**head, "data": data, "usage": usage})


@dataclass(frozen=True, slots=True)
class _Names:
    """Paths in the request: of a pair's first and second text, by its place, and of all second ones."""

    first: Callable[[int], str]
    second: Callable[[int], str]
    all_second: str


async def _score_all(
    request: Request, api: Api, pairs: Sequence[tuple[str, str]], names: _Names
) -> tuple[list[float], dict[str, Any]]:
    """The scores of pairs, in their order."""
    ranker, field = api.model.ranker, names.all_second
    if ranker is None:
        raise no_ranker(api.model.name)
    if not pairs:
        raise refused(f"{field} must not be empty", field, "empty_array")
    if len(pairs) > api.settings.max_prompts:
        message = f"{field} holds {len(pairs)} texts; at most {api.settings.max_prompts} are allowed"
        raise refused(message, field, "array_too_long")
    prompts = await compute(request, lambda stop: _tokenized_pairs(api, ranker, pairs, names, stop))
    note_prompts(request, api, prompts)
    found = await embed_all(request, api, prompts, "last", new_id("rank-"), names.second, ranker.score)
    return found.kept, usage_of(found)


def _tokenized_pairs(
    api: Api, ranker: Ranker, pairs: Sequence[tuple[str, str]], names: _Names, stop: Stop
) -> list[list[int]]:
    """The prompts of all pairs.

    Raises ApiError or InvalidRequestError: 400; a text is empty or too long, or all are together.
    """
    prompts: list[list[int]] = []
    num_tokens, most = 0, max(MAX_TOKENS, api.max_tokens)
    checked: str | None = None
    for place, (query, text) in enumerate(pairs):
        stop.check()
        if query != checked:
            _check_text(api, query, names.first(place))
            checked = query
        _check_text(api, text, names.second(place))
        prompts.append(ranker.prompt(query, text))
        if len(prompts[-1]) > api.max_tokens:
            raise ContextLengthError(
                f"{names.first(place)} and {names.second(place)} have {len(prompts[-1])} tokens; this model's maximum "
                f"context length is {api.max_tokens}",
                names.second(place),
            )
        num_tokens += len(prompts[-1])
        if num_tokens > most:
            message = f"all pairs have more than {most} tokens; send fewer at once"
            raise refused(message, names.second(place), "array_too_long")
    return prompts


def _check_text(api: Api, text: str, where: str) -> None:
    if not text:
        raise refused(f"{where} must not be empty", where, "empty_prompt")
    check_fits(text, api.model.tokenizer, api.max_tokens, where)


def _paths(field: str, given: str | Sequence[str]) -> Callable[[int], str]:
    """The path of a pair's text, by the pair's place: the one that all share, or one of each."""
    if isinstance(given, str):
        return lambda place: field
    return lambda place: f"{field}[{place if len(given) > 1 else 0}]"


def _pairs(record: ScoreRequest) -> list[tuple[str, str]]:
    firsts = [record.text_1] if isinstance(record.text_1, str) else record.text_1
    seconds = [record.text_2] if isinstance(record.text_2, str) else record.text_2
    if len(firsts) == 1:
        return [(firsts[0], each) for each in seconds]
    if len(firsts) != len(seconds):
        counts = f"text_1 holds {len(firsts)} texts and text_2 {len(seconds)}"
        raise refused(f"{counts}: they must be as many, or text_1 only one", "text_1", "invalid_value")
    return list(zip(firsts, seconds, strict=True))


_RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")  # paths of Jina's clients, of Cohere's and of vLLM's
_SCORE = ("/v1/score", "/score")

OPENAI = Dialect(
    name="OpenAI",
    routes=(
        ApiRoute("/v1/chat/completions", chat_completions, "Answer a conversation.", ChatCompletionRequest),
        ApiRoute("/v1/completions", completions, "Complete prompts.", CompletionRequest),
        ApiRoute("/v1/embeddings", _embeddings, "Embed texts.", EmbeddingRequest),
        *(ApiRoute(path, _rerank, "Order documents by a query.", RerankRequest) for path in _RERANK),
        *(ApiRoute(path, _score, "Scores of pairs of texts.", ScoreRequest) for path in _SCORE),
        ApiRoute("/v1/models", _list_models, "Names of the model."),
        ApiRoute("/v1/models/{name:path}", _show_model, "One of them."),
        ApiRoute("/tokenize", _tokenize, "Token ids of a text or of messages.", TokenizeRequest),
        ApiRoute("/detokenize", _detokenize, "The text of token ids.", DetokenizeRequest),
        ApiRoute("/tokenizer_info", _tokenizer_info, "What a client needs to tokenize by itself."),
    ),
    error_body=plain_body,
    error_schema=PLAIN_SCHEMA,
    stream=StreamForm(
        ping=b": ping\n\n",
        end=b"data: [DONE]\n\n",
        error=lambda error: encode_event(plain_body(error)),
    ),
)
