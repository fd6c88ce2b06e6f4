"""Pooled hidden states of the prompts of one request, from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from realizar.engine.clients.async_stream import Embedding
from realizar.outputs import NO_SNAPSHOTS, SnapshotUse
from realizar.request import Pooling
from realizar.server.api import Api
from realizar.server.errors import renaming
from realizar.server.generation.merge import Admission
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request_memory import lease_of
from realizar.server.models.needs import embedding_pooling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnitVector:
    """A vector of unit length, float32 [hidden_size] (4 bytes a value; a tuple takes 32), and what it took."""

    vector: NDArray[np.float32]
    num_prompt_tokens: int
    num_cached_tokens: int
    snapshots: SnapshotUse = NO_SNAPSHOTS

    @classmethod
    def of(cls, embedding: Embedding) -> UnitVector:
        """Normalise an embedding; a zero vector stays as it is."""
        values = np.asarray(embedding.vector, np.float64)
        norm = float(np.linalg.norm(values))
        unit = (values / norm if norm > 0 else values).astype("<f4")
        return cls(unit, embedding.num_prompt_tokens, embedding.num_cached_tokens, embedding.snapshots)


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
    keep: Callable[[Embedding], T],
) -> list[T]:
    """Embed a request's prompts, as many at once as the engine runs; results are in the prompts' order.

    Args:
        request_id: to which the engine's names for each prompt are added.
        name: the request's field that holds a prompt, by its place, for errors.
        keep: makes what is kept of a result when it comes: a vector takes 32 bytes a value, and there may be thousands.

    Raises:
        RealizarError: of any prompt; the others are given up. ClientDisconnectedError: the client disconnected.
    """
    client, admission = lease_of(request).client, Admission(api.engine.info.max_running)

    async def one(place: int, token_ids: Sequence[int]) -> T:
        async with admission.slots:
            with renaming({"prompt": name(place)}):
                return keep(
                    await admission.enter(
                        lambda: api.engine.embed(token_ids, pooling, request_id=f"{request_id}-{place}", client=client)
                    )
                )

    async def all_of_them() -> list[T]:
        tasks = [asyncio.ensure_future(one(place, token_ids)) for place, token_ids in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return await unless_disconnected(request.receive, all_of_them())
