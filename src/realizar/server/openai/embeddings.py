"""`POST /v1/embeddings`: pooled hidden states of unit length."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, compute, new_id, note
from realizar.server.errors import refused, unsupported
from realizar.server.generation.embedding import UnitVector, embed_all, pooling_of
from realizar.server.generation.prompts import Prompt, keep_last, tokenize_prompts
from realizar.server.generation.state_snapshots import note_snapshots
from realizar.server.generation.work import Stop
from realizar.server.http.body import read_record
from realizar.server.http.request_memory import lease_of
from realizar.server.models.models import model_of
from realizar.server.models.needs import embeds
from realizar.server.openai.records.answers import EmbeddingData, make_usage
from realizar.server.openai.records.embedding import EmbeddingRequest
from realizar.server.settings import Pooling


async def embeddings(request: Request) -> Response:
    """Embed texts or token ids."""
    record = await read_record(request, EmbeddingRequest)
    api = await model_of(request, record.model, need=embeds)
    pooling, info = pooling_of(api), api.engine.info
    _check_fields(api, record)
    prompts = await compute(request, lambda stop: _tokenized(api, record, stop))
    num_given = sum(len(prompt.token_ids) for prompt in prompts)
    note(request, model=api.model.name, prompts=len(prompts), prompt=num_given)
    as_base64 = record.encoding_format == "base64"
    size = lease_of(request).hold_vectors(len(prompts), info.hidden_size, as_base64=as_base64)
    found = await _embed_all(request, api, record, prompts, pooling)
    snapshots = note_snapshots(request, info, (each.snapshots for each in found))
    num_cached = sum(each.num_cached_tokens for each in found)
    usage = make_usage(sum(each.num_prompt_tokens for each in found), 0, num_cached, snapshots)
    end = b'],"model":%b,"usage":%b}' % (msgspec.json.encode(api.model.name), msgspec.json.encode(usage))
    body = await compute(request, lambda stop: _encoded(found, end, stop, as_base64=as_base64), size)
    return Response(memoryview(body), media_type="application/json")


def _encoded(units: Sequence[UnitVector], end: bytes, stop: Stop, *, as_base64: bool) -> bytearray:
    """Encode the answer. Only one vector at a time is converted to Python's numbers.

    Args:
        end: the JSON after the vectors.
        as_base64: write little-endian float32 as base64 instead of numbers.
    """
    body = bytearray(b'{"object":"list","data":[')
    for index, unit in enumerate(units):
        stop.check()
        vector = base64.b64encode(unit.vector.data).decode() if as_base64 else unit.vector.astype(np.float64).tolist()
        body += b"," * (index > 0)
        body += msgspec.json.encode(EmbeddingData(index, vector))
    body += end
    return body


def _tokenized(api: Api, record: EmbeddingRequest, stop: Stop) -> list[Prompt]:
    return tokenize_prompts(
        record.input,
        api.model.tokenizer,
        stop,
        param="input",
        max_prompts=api.settings.max_prompts,
        max_tokens=api.max_tokens,
        add_special=record.add_special_tokens is not False,
        bounded=record.truncate_prompt_tokens is None,
    )


def _check_fields(api: Api, record: EmbeddingRequest) -> None:
    if record.encoding_format not in (None, "float", "base64"):
        raise refused("encoding_format must be float or base64", "encoding_format", "invalid_value")
    size = api.engine.info.hidden_size
    if record.dimensions is not None and record.dimensions != size:
        raise unsupported("dimensions", f"must be {size}: this model's vectors can't be shortened")


async def _embed_all(
    request: Request, api: Api, record: EmbeddingRequest, prompts: Sequence[Prompt], pooling: Pooling
) -> list[UnitVector]:
    cut = [keep_last(prompt.token_ids, record.truncate_prompt_tokens, api.max_tokens) for prompt in prompts]
    name = "input[{}]" if len(prompts) > 1 else "input"
    return await embed_all(request, api, cut, pooling, new_id("embd-"), name.format, UnitVector.of)
