"""`OneModel`: the `Models` of a server with a single model, which is loaded at start and stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar

from realizar.engine.clients.async_engine import EngineState
from realizar.request import Client
from realizar.server.api import Api
from realizar.server.metrics import Metrics, MetricSamples
from realizar.server.models.models import ModelState, ModelStatus
from realizar.server.models.names import not_served

_STATES: Mapping[EngineState, ModelState] = {
    "starting": "loading",
    "ready": "ready",
    "draining": "finishing",
    "dead": "failed",
}


class OneModel:
    """A model and its own lease: nobody counts the requests that use it. See `Models` for the methods.

    `exposition` gives the metrics of a whole server of which this is a part; None takes its own and its engine's.
    `more_samples` gives further ones, once the engine's figures are there.
    """

    several: ClassVar[bool] = False
    pulls: None = None

    def __init__(
        self,
        api: Api,
        exposition: Callable[[Metrics], Awaitable[bytes]] | None = None,
        more_samples: Callable[[], tuple[MetricSamples, ...]] = tuple,
    ) -> None:
        self.api = api
        self._exposition, self._more_samples = exposition, more_samples

    @property
    def state(self) -> EngineState:
        return self.api.engine.state

    @property
    def fault(self) -> str | None:
        return self.api.engine.fault

    def listed(self) -> Sequence[ModelStatus]:
        model = self.api.model
        return (
            ModelStatus(
                model.names,
                model.created_s,
                self.api.max_model_len,
                model.default_sampling,
                model.facts,
                _STATES[self.state],
                self.fault,
                device=self.api.engine.info.device if self.state == "ready" else None,
                device_label=self.api.engine.info.device_label if self.state == "ready" else None,
            ),
        )

    def find(self, name: str | None) -> ModelStatus:
        self.take(name)
        return self.listed()[0]

    def take(self, name: str | None, keep_alive_s: float | None = None) -> OneModel:
        """The lease of the model, which may still be loading: its engine refuses requests until it is ready."""
        names = self.api.model.names
        if name is not None and name not in names:
            raise not_served(name, names, names[:1])
        return self

    async def wait(self, name: str | None, client: Client) -> OneModel:
        return self.take(name)

    def running(self, name: str | None = None) -> Sequence[Api]:
        self.take(name)
        return (self.api,) if self.state in ("ready", "draining") else ()

    def end_sleep(self, name: str) -> None:
        """The model never sleeps."""

    def release(self) -> None:
        """The model stays."""

    async def exposition(self, others: Sequence[MetricSamples]) -> bytes:
        if self._exposition is not None:
            return await self._exposition(self.api.metrics)
        stats = await self.api.engine.stats()
        return self.api.metrics.exposition(stats, (*others, *self._more_samples()))
