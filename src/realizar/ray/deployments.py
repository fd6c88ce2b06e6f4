"""The deployments of one model's application, and their configuration.

`Front` takes HTTP requests: it is the server's application, over the replicas' engines. `EngineReplica` is one replica
of a model's deployment; its engine runs in a process of its own, beside the actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realizar.backends.devices import TRAITS
from realizar.backends.machine import default_threads
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.model_files import ModelFiles
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import PlannedLoad
from realizar.engine.process.messages import EngineInfo, Load
from realizar.engine.process.planning import plan_loads
from realizar.engine.process.supervisor import ProcessLink
from realizar.engine.stats import EngineStats
from realizar.models.pooling import default_pooling
from realizar.ray.calls import EngineCalls
from realizar.ray.options import Placement, RayOptions, placement_of
from realizar.ray.reported_keys import RouteWish
from realizar.ray.serve_link import Engines, ServeLink
from realizar.request import Request
from realizar.server.app import create_app
from realizar.server.models.names import default_name
from realizar.server.processes.main import model_of_start
from realizar.server.processes.messages import Start
from realizar.server.replica_figures import samples_of_engines
from realizar.tokenizer.generation_defaults import default_sampling

_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 5.0, 30.0
_FRONT_REQUESTS = 1024  # open at once in one front: its memory bounds them further
_REQUESTS = msgspec.msgpack.Decoder(Request)


class EngineReplica:
    """The class of the engines' deployment. Ray Serve calls the constructor, and `run` and the others for fronts.

    `model` is a path, or a name that this host finds it by. RealizarError: it can't be found or loaded.
    """

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, model: str, config: EngineConfig, *, max_queued: int | None, log_level: str
    ) -> None:
        logging.getLogger("realizar").setLevel(log_level.upper())
        checkpoint = await asyncio.to_thread(find_checkpoint, model)
        load = Load(str(checkpoint.path), config, log_level=log_level.upper())
        self._calls = EngineCalls(_replica_name(), ProcessLink(load, files=ModelFiles(checkpoint)), max_queued)
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


def _replica_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


class Front:
    """The class of the fronts' deployment. `max_replicas` is of its engine, `handle` of the engine's deployment."""

    def __init__(self, start: Start, max_replicas: int, handle: Any) -> None:
        logging.getLogger("realizar").setLevel(start.log_level.upper())
        self._start, self._max_replicas, self._replicas = start, max_replicas, Engines(handle)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Make the application. Ray Serve calls this once, on the loop on which requests are answered."""
        start = self._start
        model = await asyncio.to_thread(model_of_start, start)
        link = ServeLink(self._replicas, self._max_replicas)
        engine = model.engine(link, start.max_queued, start.pooling)
        await engine.start()
        app = create_app(
            engine, model, start.settings, more_samples=lambda: samples_of_engines(link.figures.engines, start.names[0])
        )
        return _PlainBodies(app)


class _PlainBodies:
    """An application whose messages can be pickled: Ray Serve sends them to its proxy, and views of bytes can't be."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if "body" in message:
                message = {**message, "body": bytes(message["body"])}
            await send(message)

        await self._app(scope, receive, send_plain)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that was found, and what an engine of it takes.

    `place` is its path on every host, or the name by which hosts find it; `names` are those in the API.
    """

    place: str
    names: tuple[str, ...]
    checkpoint: Checkpoint
    load: PlannedLoad
    placement: Placement


def plan_model(model: str, options: RayOptions) -> PlannedModel:
    """Find a model, and plan the memory of an engine of it. RealizarError: it can't be found or does not fit."""
    checkpoint = find_checkpoint(model)
    (answer,) = plan_loads([str(checkpoint.path)], options.config, options.memory_bytes)
    load = answer.checked()
    place = str(Path(model).resolve()) if Path(model).exists() else model
    names = options.names or (default_name(model),)
    threads = load.config.threads or default_threads()
    # A replica sees the GPU that Ray gave it as its first one; a host with more cores is no reason for more threads;
    # and one host may get all replicas.
    device = "cpu" if load.device == "cpu" else "cuda"
    config = replace(load.config, device=device, threads=threads, host_sharers=options.max_replicas)
    load = msgspec.structs.replace(load, config=config)
    return PlannedModel(place, names, checkpoint, load, placement_of(load, threads))


def make_application(model: PlannedModel, options: RayOptions) -> Application:
    start = Start(
        model=model.place,
        names=model.names,
        context_length=model.load.context_length,
        sampling=options.sampling or default_sampling(model.checkpoint),
        chat_template=options.chat_template,
        created_s=int(time.time()),
        settings=options.settings,
        max_queued=options.max_queued,
        pooling=default_pooling(model.checkpoint),
        log_level=options.log_level,
        config=model.load.config,
    )
    engines = _engines(model.load, model.placement, options).bind(
        model.place, model.load.config, max_queued=options.max_queued, log_level=options.log_level
    )
    return _fronts(options).bind(start, options.max_replicas, engines)


def _engines(load: PlannedLoad, placement: Placement, options: RayOptions) -> Any:
    max_running = load.config.max_running or TRAITS["cpu" if load.device == "cpu" else "cuda"].rows
    return serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={**placement.actor_options(), "resources": options.engine_resources},
        max_ongoing_requests=load.max_open,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            initial_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_requests or float(max_running),
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="realizar.ray.router.PrefixRequestRouter",
            request_router_kwargs={"block_tokens": load.config.block_size},
            request_routing_stats_period_s=options.stats_interval_s,
        ),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=options.drain_s,
        max_constructor_retry_count=3,
    )


def _fronts(options: RayOptions) -> Any:
    return serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=options.fronts,
        ray_actor_options={"num_cpus": 0, "resources": options.front_resources},
        max_ongoing_requests=_FRONT_REQUESTS,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=options.drain_s,
    )
