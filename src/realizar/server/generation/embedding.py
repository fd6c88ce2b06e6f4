"""Pooled hidden states of the prompts of one request, from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray
from starlette.requests import Request

from realizar.engine.frontend.async_stream import Embedding
from realizar.outputs import SnapshotUse
from realizar.request import Pooling
from realizar.server.api import Api
from realizar.server.errors import renaming
from realizar.server.generation.merge import Admission
from realizar.server.generation.run import shown_snapshots, snapshot_notes
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import note
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
    snapshots: SnapshotUse | UnsetType


def unit_vector(vector: Sequence[float]) -> NDArray[np.float32]:
    """A vector of length 1, float32 [hidden_size] (4 bytes a value; a tuple takes 32); zero stays as it is."""
    values = np.asarray(vector, np.float64)
    norm = float(np.linalg.norm(values))
    return (values / norm if norm > 0 else values).astype("<f4")


def write_vectors(
    start: bytes,
    units: Sequence[NDArray[np.float32]],
    end: bytes,
    write: Callable[[int, NDArray[np.float32]], bytes],
    stop: Stop,
) -> bytearray:
    """An answer: vectors between its start and its end. Only one at a time is converted by `write`, with its place."""
    body = bytearray(start)
    for place, unit in enumerate(units):
        stop.check()
        body += b"," * (place > 0)
        body += write(place, unit)
    body += end
    return body


def pooling_of(api: Api) -> Pooling:
    """The option's pooling, or the model's own. Raises ApiError: 400; the model was not made for embeddings."""
    return embedding_pooling(api.model.name, api.engine.pooling, api.settings)


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
