"""`Models`: the models of one server. Every handler gets the model of its request here, whatever the dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias, cast

from starlette.requests import Request

from realizar.config import Device
from realizar.engine.frontend.async_engine import EngineState
from realizar.request import Client
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import settings_of
from realizar.server.http.request_memory import lease_of
from realizar.server.metrics import MetricSamples
from realizar.server.model_facts import ModelFacts
from realizar.server.models.needs import Need, nothing
from realizar.server.models.pulls import Pulls

ModelState: TypeAlias = Literal["known", "loading", "ready", "finishing", "asleep", "failed"]
"""`known`: not loaded, which its first request changes. `loading`: also while it wakes. `finishing`: its last requests
run before it makes room, or it is doing so. `asleep`: its weights wait in the host's memory. `failed`: not loaded
after a failure, and tried again for a request after a pause."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as lists of models show it.

    Attributes:
        names: ids that requests may use; answers carry the first.
        created_s: Unix time.
        max_model_len: tokens of the longest request, prompt and output.
        default_sampling: sampling of requests without parameters.
        reason: why it failed.
        num_bytes: memory that it takes once it is loaded; None if it was not planned.
        unloads_s: Unix time at which it is unloaded if no request comes; None if none is set.
        device: the device that runs it, also while it is asleep; None while it is not loaded.
        held_bytes: memory of its device that it takes now; 0 where that is not planned.
        host_bytes: memory of the host that is kept for its weights now; None where none is.
    """

    names: tuple[str, ...]
    created_s: int
    max_model_len: int
    default_sampling: SamplingParams
    facts: ModelFacts
    state: ModelState
    reason: str | None = None
    num_bytes: int | None = None
    unloads_s: float | None = None
    device: Device | None = None
    held_bytes: int = 0
    host_bytes: int | None = None
    device_label: str | None = None


@dataclass(frozen=True, slots=True)
class ModelLease:
    """The right of one request to use a model: `release`, called once, gives it back. Handlers work with `api`."""

    api: Api
    release: Callable[[], None] = lambda: None


class Models(Protocol):
    """The models of one server.

    `several`: requests have to name one of them. `pulls` are models that clients fetch; None where they may not.
    """

    several: ClassVar[bool]

    @property
    def pulls(self) -> Pulls | None: ...

    @property
    def state(self) -> EngineState:
        """`ready` while requests are accepted, `dead` once none will ever be again."""

    @property
    def fault(self) -> str | None:
        """The reason why no request is accepted, if one is known."""

    def listed(self) -> Sequence[ModelStatus]:
        """All models."""

    def find(self, name: str | None) -> ModelStatus:
        """The model of a name; None is that of a request that names none.

        It raises ApiError: 404 model_not_found where it is not served, 400 where there are several, and none is named.
        """

    def take(self, name: str | None, keep_alive_s: float | None = None) -> ModelLease | None:
        """The lease of a model; None if the request has to wait for it.

        Args:
            keep_alive_s: seconds for which the model stays loaded after the request, if no other one comes: 0 unloads
                it at once, and below 0 it stays until its place is needed. None takes the server's. A server with a
                single model keeps it in any case.

        Raises:
            ApiError: as of `find`; 503 model_not_loaded, while the error of a failed load is answered.
            EngineUnavailableError: the server shuts down.
        """

    async def wait(self, name: str | None, client: Client) -> ModelLease:
        """The lease of a model, when it is the request's turn. Errors are those of `take`, and of a full queue."""

    def running(self, name: str | None = None) -> Sequence[Api]:
        """The `Api` of each model whose engine is ready; only that of a name, if one is given.

        It raises ApiError 404 model_not_found if the model is not served.
        """

    def end_sleep(self, name: str) -> None:
        """Unload a model if it is asleep, or makes room, and no request waits for it; those that use it end first."""

    async def exposition(self, others: Sequence[MetricSamples]) -> bytes:
        """The metrics of the whole server in Prometheus' text format; `others` are those of no model."""


def models_of(request: Request) -> Models:
    return cast("Models", request.app.state.models)


async def model_of(request: Request, name: str | None, keep_alive_s: float | None = None, need: Need = nothing) -> Api:
    """What a request works with to use the model of a name; the model is there until the request has ended.

    The request's body must have been read. `need` is checked before waiting. `keep_alive_s` is as in `Models.take`.

    Raises:
        ApiError, EngineUnavailableError, QueueFullError: as of `Models.wait`.
        ApiError, ContextLengthError: the model has not what the request needs.
        ClientDisconnectedError: the client disconnected while it waited for the model.
    """
    models = models_of(request)
    lease = models.take(name, keep_alive_s)
    if lease is None:
        status = models.find(name)
        if status.facts.are_known:
            need(status.names[0], status.facts, status.max_model_len, settings_of(request))
        lease = await unless_disconnected(request.receive, models.wait(name, lease_of(request).client))
    lease_of(request).at_end(lease.release)
    return lease.api
