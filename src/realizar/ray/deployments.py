"""The deployments of one model's application, and their configuration."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from realizar.backends.machine import default_threads
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import DEFAULT_ROWS
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import PlannedLoad
from realizar.engine.process.planning import plan_loads
from realizar.models.pooling import default_pooling
from realizar.ray.front import Front
from realizar.ray.options import Placement, RayOptions, placement_of
from realizar.ray.replica import EngineReplica
from realizar.server.models.names import default_name
from realizar.server.processes.messages import Start
from realizar.tokenizer.generation_defaults import default_sampling

_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 5.0, 30.0
_FRONT_REQUESTS = 1024  # open at once in one front: its memory bounds them further


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
    )
    engines = _engines(model.load, model.placement, options).bind(
        model.place, model.load.config, max_queued=options.max_queued, log_level=options.log_level
    )
    return _fronts(options).bind(start, options.max_replicas, engines)


def _engines(load: PlannedLoad, placement: Placement, options: RayOptions) -> Any:
    max_running = load.config.max_running or DEFAULT_ROWS["cpu" if load.device == "cpu" else "cuda"]
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
