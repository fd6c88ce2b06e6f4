"""`POST /api/embed`, and `POST /api/embeddings`, which is older and has a single prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, compute, new_id, note
from realizar.server.errors import unsupported
from realizar.server.generation.embedding import UnitVector, embed_all, pooling_of
from realizar.server.generation.prompts import check_num_prompts, tokenize_prompts
from realizar.server.generation.state_snapshots import note_snapshots
from realizar.server.generation.work import Stop
from realizar.server.http.body import read_record
from realizar.server.http.request_memory import lease_of
from realizar.server.models.needs import embeds
from realizar.server.ollama.names import model_for
from realizar.server.ollama.records import EmbeddingsRequest, EmbedRequest
from realizar.server.ollama.times import Clock
from realizar.tokenizer.tokenizer import Tokenizer

_SLACK = 64  # tokens that cutting a text may add to its end
_GROWTH = 4


async def embed(request: Request) -> Response:
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


async def embeddings(request: Request) -> Response:
    """Embed one text."""
    record = await read_record(request, EmbeddingsRequest)
    api = await model_for(request, record.model, record.keep_alive, Clock(), embeds)
    info = api.engine.info
    units = await _embedded(request, api, [record.prompt] if record.prompt else [], "prompt", cut=True)
    note_snapshots(request, info, (unit.snapshots for unit in units))
    body = await _encoded(request, units, b'{"embedding":', b"}") if units else b'{"embedding":[]}'
    return Response(bytes(body), media_type="application/json")


async def _embedded(request: Request, api: Api, texts: Sequence[str], field: str, *, cut: bool) -> list[UnitVector]:
    """The vectors of some texts. Args: cut: cut texts that are longer than the context to their beginning."""
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
