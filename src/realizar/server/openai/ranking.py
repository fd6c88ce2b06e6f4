"""`POST /v1/rerank` and `POST /v1/score`, with vLLM's forms: how relevant texts are to a query, by a reranker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.engine.clients.async_stream import Embedding
from realizar.errors import ContextLengthError
from realizar.outputs import SnapshotUse
from realizar.server.api import Api, new_id, now_s
from realizar.server.errors import refused
from realizar.server.generation.embedding import embed_all
from realizar.server.generation.prompts import MAX_TOKENS, check_fits
from realizar.server.generation.state_snapshots import note_snapshots
from realizar.server.http.body import read_record
from realizar.server.http.request import compute, note
from realizar.server.http.work import Stop
from realizar.server.models.models import model_of
from realizar.server.models.needs import no_ranker, ranks
from realizar.server.openai.records import (
    Document,
    RerankAnswer,
    RerankRequest,
    RerankResult,
    Score,
    ScoreAnswer,
    ScoreRequest,
    Usage,
    make_usage,
)
from realizar.server.ranker import Ranker


async def rerank(request: Request) -> Response:
    record = await read_record(request, RerankRequest)
    api = await model_of(request, record.model, need=ranks)
    if record.top_n is not None and record.top_n < 0:
        raise refused("top_n must be at least 0, which is all", "top_n", "invalid_value")
    texts = [each if isinstance(each, str) else each.text for each in record.documents]
    pairs = [(record.query, text) for text in texts]
    scored = await _score_all(request, api, pairs, _Names(lambda _: "query", "documents[{}]".format, "documents"))
    order = sorted(range(len(texts)), key=lambda place: (-scored.scores[place], place))
    results = [
        RerankResult(
            place, scored.scores[place], None if record.return_documents is False else Document(text=texts[place])
        )
        for place in order[: record.top_n or None]
    ]
    return _json(RerankAnswer(new_id("rerank-"), api.model.name, scored.usage, results))


async def score(request: Request) -> Response:
    record = await read_record(request, ScoreRequest)
    api = await model_of(request, record.model, need=ranks)
    pairs = _pairs(record)
    names = _Names(_paths("text_1", record.text_1), _paths("text_2", record.text_2), "text_2")
    scored = await _score_all(request, api, pairs, names)
    data = [Score(place, value) for place, value in enumerate(scored.scores)]
    return _json(ScoreAnswer(new_id("score-"), now_s(), api.model.name, data, scored.usage))


@dataclass(frozen=True, slots=True)
class _Names:
    """Paths in the request: of a pair's first and second text, by its place, and of all second ones."""

    first: Callable[[int], str]
    second: Callable[[int], str]
    all_second: str


@dataclass(frozen=True, slots=True)
class _Scored:
    scores: list[float]
    usage: Usage


async def _score_all(request: Request, api: Api, pairs: Sequence[tuple[str, str]], names: _Names) -> _Scored:
    ranker, field, info = _ranker_of(api), names.all_second, api.engine.info
    if not pairs:
        raise refused(f"{field} must not be empty", field, "empty_array")
    if len(pairs) > api.settings.max_prompts:
        message = f"{field} holds {len(pairs)} texts; at most {api.settings.max_prompts} are allowed"
        raise refused(message, field, "array_too_long")
    prompts = await compute(request, lambda stop: _tokenized(api, ranker, pairs, names, stop))
    note(request, model=api.model.name, prompts=len(prompts), prompt=sum(map(len, prompts)))

    def keep(found: Embedding) -> tuple[float, int, SnapshotUse]:
        return ranker.score(found.vector), found.num_cached_tokens, found.snapshots

    found = await embed_all(request, api, prompts, "last", new_id("rank-"), names.second, keep)
    snapshots = note_snapshots(request, info, (used for _, _, used in found))
    num_cached = sum(cached for _, cached, _ in found)
    usage = make_usage(sum(map(len, prompts)), 0, num_cached, snapshots)
    return _Scored([value for value, _, _ in found], usage)


def _ranker_of(api: Api) -> Ranker:
    if api.model.ranker is None:
        raise no_ranker(api.model.name)
    return api.model.ranker


def _tokenized(
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
        raise refused(
            f"text_1 holds {len(firsts)} texts and text_2 {len(seconds)}: they must be as many, or text_1 only one",
            "text_1",
            "invalid_value",
        )
    return list(zip(firsts, seconds, strict=True))


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
