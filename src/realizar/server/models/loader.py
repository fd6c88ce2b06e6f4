"""`EngineLoader` loads a model of a server that has several: its vocabulary, and an engine in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from realizar.backends.base import Transfer
from realizar.checkpoint.model_files import ModelFiles
from realizar.engine.core.metrics import EngineStats
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.child import LivenessPolicy
from realizar.engine.process.messages import Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.errors import RealizarError
from realizar.server.api import Api, make_api
from realizar.server.generation.request_templates import compile_apart
from realizar.server.metrics import Metrics
from realizar.server.models.shelved import KnownModel
from realizar.server.served_model import ServedModel, make_served_model
from realizar.server.settings import ServerSettings

_LIVENESS = LivenessPolicy(max_crashes=1)
"""An engine that ends without a request to blame is not started again: the model's next request loads it."""


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """See `Loader`.

    Attributes:
        files: of each model, by name, as they were when it was planned.
        settings: of the server. log_level: of the engines' processes. max_queued: as in `AsyncEngine`.
    """

    files: dict[str, ModelFiles]
    settings: ServerSettings
    log_level: str
    max_queued: int | None

    async def load(self, known: KnownModel, metrics: Metrics) -> Api:
        served = await asyncio.to_thread(self._served, known)
        may_sleep = known.load.host_bytes > 0
        load = Load(known.path, known.load.config, log_level=self.log_level.upper(), may_sleep=may_sleep)
        label = f"engine of {known.name}"
        link = ProcessLink(load, _LIVENESS, files=self.files[known.name], label=label)
        engine = served.engine(link, self.max_queued, known.facts.pooling)
        try:
            await engine.start()
            await engine.wait_ready()
        except BaseException:
            await engine.close(at_once=True)
            raise
        return make_api(engine, served, self.settings, metrics)

    async def unload(self, api: Api, *, at_once: bool) -> EngineStats:
        stats = EngineStats() if at_once else await api.engine.stats()
        await api.engine.close(at_once=at_once)
        return stats

    async def sleep(self, api: Api) -> Transfer:
        return await api.engine.sleep()

    async def wake(self, api: Api) -> Transfer:
        return await api.engine.wake()

    def _served(self, known: KnownModel) -> ServedModel:
        """Read the vocabulary; this takes about a second where it is large."""
        fault = self.files[known.name].fault()
        if fault is not None:
            raise RealizarError(fault)
        return make_served_model(
            find_checkpoint(known.path),
            (known.name,),
            known.load.context_length,
            known.default_sampling,
            created_s=known.created_s,
            compiler=compile_apart if known.by_client else None,
        )
