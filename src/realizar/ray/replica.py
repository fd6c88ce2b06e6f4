"""`EngineReplica`: one replica of a model's deployment. Its engine runs in a process of its own, beside the actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from ray import serve

from realizar.checkpoint.model_files import ModelFiles
from realizar.config import EngineConfig
from realizar.engine.core.metrics import EngineStats
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.messages import EngineInfo, Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.ray.calls import EngineCalls
from realizar.ray.reported_keys import RouteWish
from realizar.request import Request

_REQUESTS = msgspec.msgpack.Decoder(Request)


class EngineReplica:
    """The class of the deployment. Ray Serve calls the constructor, and `run` and the others for fronts.

    `model` is a path, or a name that this host finds it by. RealizarError: it can't be found or loaded.
    """

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, model: str, config: EngineConfig, *, max_queued: int | None, log_level: str
    ) -> None:
        logging.getLogger("realizar").setLevel(log_level.upper())
        checkpoint = await asyncio.to_thread(find_checkpoint, model)
        load = Load(str(checkpoint.path), config, log_level=log_level.upper())
        self._calls = EngineCalls(replica_name(), ProcessLink(load, files=ModelFiles(checkpoint)), max_queued)
        await self._calls.engine.start()
        try:
            await self._calls.engine.wait_ready()
        except BaseException:
            await self._calls.engine.close()
            raise

    async def run(self, request: bytes, wish: RouteWish) -> AsyncGenerator[bytes]:
        """See `Engines.run`. The wish was for the router."""
        async for reports in self._calls.run(_REQUESTS.decode(request)):
            yield reports

    async def info(self) -> EngineInfo:
        return self._calls.engine.info

    async def stats(self) -> tuple[str, EngineStats]:
        return self._calls.name, await self._calls.engine.stats()

    async def clear_cache(self) -> None:
        await self._calls.engine.clear_cache()

    def record_routing_stats(self) -> dict[str, Any]:
        """Keys of the prefix cache, for routers. Ray Serve calls this again and again."""
        return self._calls.report()

    async def check_health(self) -> None:
        """Raise the reason why the engine is gone for good, so that Ray Serve replaces the replica."""
        if self._calls.engine.state == "dead":
            raise await self._calls.engine.wait_dead()

    async def __del__(self) -> None:
        """End the engine. Ray Serve awaits it when the last requests have ended."""
        calls = getattr(self, "_calls", None)
        if calls is not None:
            await calls.engine.close()


def replica_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)
