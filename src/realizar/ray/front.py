"""`Front`: the deployment that takes HTTP requests. It is the server's application, over the replicas' engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realizar.engine.core.metrics import EngineStats
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.messages import EngineInfo
from realizar.ray.reported_keys import RouteWish
from realizar.ray.serve_link import ServeLink
from realizar.server.app import create_app
from realizar.server.processes.messages import Start
from realizar.server.replica_figures import engine_samples
from realizar.server.served_model import ServedModel, make_served_model

_STATS_PATIENCE_S = 0.8


class Replicas:
    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._runs = handle.options(method_name="run", stream=True)

    async def run(self, request: bytes, wish: RouteWish) -> AsyncGenerator[bytes]:
        parts = self._runs.remote(request, wish)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._handle.info.remote()
        return info

    async def stats(self) -> Mapping[str, EngineStats]:
        """Replicas that don't answer in time are left out."""
        answers = await self._handle.broadcast("stats").results_async(timeout_s=_STATS_PATIENCE_S)
        return dict(answer for answer in answers if isinstance(answer, tuple))

    async def clear_caches(self) -> None:
        await self._handle.broadcast("clear_cache").results_async()


class Front:
    """The class of the deployment. `max_replicas` is of its engine, `handle` of the engine's deployment."""

    def __init__(self, start: Start, max_replicas: int, handle: Any) -> None:
        logging.getLogger("realizar").setLevel(start.log_level.upper())
        self._start, self._max_replicas, self._replicas = start, max_replicas, Replicas(handle)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Make the application. Ray Serve calls this once, on the loop on which requests are answered."""
        start = self._start
        model = await asyncio.to_thread(_served, start)
        link = ServeLink(self._replicas, self._max_replicas)
        engine = model.engine(link, start.max_queued, start.pooling)
        await engine.start()
        app = create_app(
            engine, model, start.settings, more_samples=lambda: engine_samples(link.figures.engines, start.names[0])
        )
        return PlainBodies(app)


class PlainBodies:
    """An application whose messages can be pickled: Ray Serve sends them to its proxy, and views of bytes can't be."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if "body" in message:
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._app(scope, receive, send_plain)


def _served(start: Start) -> ServedModel:
    return make_served_model(
        find_checkpoint(start.model),
        start.names,
        start.context_length,
        start.sampling,
        start.chat_template,
        start.created_s,
    )
