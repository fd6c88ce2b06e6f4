"""Reports of a server with several models: their states, and figures over all their engines."""

from __future__ import annotations

import asyncio
import time

from realizar.engine.core.metrics import EngineStats
from realizar.server.models.models import ModelStatus
from realizar.server.models.names import shown_fault
from realizar.server.models.shelved import ShelvedModel


async def stats_of(model: ShelvedModel) -> EngineStats:
    """Figures of all engines that a model had."""
    earlier = model.earlier_stats  # an engine that is unloaded meanwhile is added to it, and would count twice
    current = EngineStats() if model.running is None else await model.running.engine.stats()
    return current.plus(earlier)


def status_of(model: ShelvedModel) -> ModelStatus:
    """A model as lists of models show it."""
    known, running = model.known, model.running
    unloads_s = None
    if model.unloads_s is not None:
        unloads_s = round(time.time() + model.unloads_s - asyncio.get_running_loop().time(), 3)
    alive = None if running is None or running.engine.state != "ready" else running.api
    return ModelStatus(
        (known.name,),
        known.created_s,
        known.load.context_length if running is None or running.engine.state == "dead" else running.api.max_model_len,
        known.default_sampling,
        known.facts if running is None else running.api.model.facts,
        model.state,
        None if model.fault is None else shown_fault(model.fault),
        model.num_bytes,
        unloads_s,
        None if alive is None else alive.engine.info.device,
        model.held_bytes,
        model.held_host_bytes or None,
        None if alive is None else alive.engine.info.device_label,
    )
