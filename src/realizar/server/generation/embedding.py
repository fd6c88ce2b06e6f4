"""Pooled hidden states of the prompts of one request, from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from realizar.engine.frontend.async_stream import Embedding
from realizar.outputs import SnapshotUse
from realizar.request import Pooling
from realizar.server.api import Api, new_id
from realizar.server.errors import renaming, unsupported
from realizar.server.generation.merge import Admission
from realizar.server.generation.prompts import Prompt
from realizar.server.generation.run import shown_snapshots, snapshot_notes
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import compute, note
from realizar.server.http.request_memory import lease_of
from realizar.server.http.work import Stop
from realizar.server.models.needs import embedding_pooling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embedded(Generic[T]):
    """What was kept of each of a request's prompts, in their order, and what all of them took."""

    kept: list[T]
    num_prompt_tokens: int
    num_cached_tokens: int
    snapshots: Mapping[str, SnapshotUse]
    num_completion_tokens: int = 0  # as of a `Run`


def unit_vector(vector: Sequence[float]) -> NDArray[np.float32]:
    """A vector of length 1, float32 [hidden_size] (4 bytes a value; a tuple takes 32); zero stays as it is."""
    values = np.asarray(vector, np.float64)
    norm = float(np.linalg.norm(values))
    return (values / norm if norm > 0 else values).astype("<f4")


def check_dimensions(api: Api, wanted: int | None) -> None:
    """Raise ApiError (400) for vectors of another length than the model's."""
    size = api.engine.info.hidden_size
    if wanted is not None and wanted != size:
        raise unsupported("dimensions", f"must be {size}: this model's vectors can't be shortened")


async def vectors_answer(
    request: Request,
    start: bytes,
    units: Sequence[NDArray[np.float32]],
    end: bytes,
    write: Callable[[int, NDArray[np.float32]], bytes],
) -> Response:
    """An answer: vectors between its start and its end. Only one at a time is converted by `write`, with its place."""

    def written(stop: Stop) -> memoryview:
        body = bytearray(start)
        for place, unit in enumerate(units):
            stop.check()
            body += b"," * (place > 0)
            body += write(place, unit)
        body += end
        return memoryview(body)

    body = await compute(request, written, sum(unit.nbytes for unit in units))
    return Response(body, media_type="application/json")


async def embed_texts(
    request: Request,
    api: Api,
    field: str,
    tokenize: Callable[[Stop], Sequence[Prompt]],
    id_prefix: str,
    *,
    as_base64: bool = False,
) -> Embedded[NDArray[np.float32]]:
    """The unit vectors of the prompts in a field, which `tokenize` makes. The memory of their answer is held.

    Raises ApiError: 400; the model was not made for embeddings. Other errors are those of `embed_all`.
    """
    pooling = embedding_pooling(api.model.name, api.engine.pooling, api.settings)
    prompts = [prompt.token_ids for prompt in await compute(request, tokenize)]
    note_prompts(request, api, prompts)
    lease_of(request).hold_vectors(len(prompts), api.engine.info.hidden_size, as_base64=as_base64)
    name = f"{field}[{{}}]" if len(prompts) > 1 else field
    return await embed_all(request, api, prompts, pooling, new_id(id_prefix), name.format, unit_vector)


def note_prompts(request: Request, api: Api, prompts: Sequence[Sequence[int]]) -> None:
    """Have the request's log line say what is to be embedded, before memory for the answer may be refused."""
    note(request, model=api.model.name, prompts=len(prompts), prompt=sum(map(len, prompts)))


async def embed_all(
    request: Request,
    api: Api,
    prompts: Sequence[Sequence[int]],
    pooling: Pooling,
    request_id: str,
    name: Callable[[int], str],
    keep: Callable[[Sequence[float]], T],
) -> Embedded[T]:
    """Embed a request's prompts, as many at once as the engine runs. The snapshots that they used are noted.

    Args:
        request_id: to which the engine's names for each prompt are added.
        name: the request's field that holds a prompt, by its place, for errors.
        keep: makes what is kept of a vector when it comes: it takes 32 bytes a value, and there may be thousands.

    Raises:
        RealizarError: of any prompt; the others are given up. ClientDisconnectedError: the client disconnected.
    """
    client, info = lease_of(request).client, api.engine.info
    admission = Admission(info.max_running)

    async def one(place: int, token_ids: Sequence[int]) -> tuple[T, Embedding]:
        async with admission.slots:
            with renaming({"prompt": name(place)}):
                made = await admission.enter(
                    lambda: api.engine.embed(token_ids, pooling, request_id=f"{request_id}-{place}", client=client)
                )
                return keep(made.vector), replace(made, vector=())

    async def all_of_them() -> list[tuple[T, Embedding]]:
        tasks = [asyncio.ensure_future(one(place, token_ids)) for place, token_ids in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    found = await unless_disconnected(request.receive, all_of_them())
    snapshots = [made.snapshots for _, made in found]
    note(request, **snapshot_notes(snapshots))
    return Embedded(
        [kept for kept, _ in found],
        sum(made.num_prompt_tokens for _, made in found),
        sum(made.num_cached_tokens for _, made in found),
        shown_snapshots(info, snapshots),
    )
