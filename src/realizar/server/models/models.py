"""`Models`: the models of one server. Every handler gets the model of its request here, whatever the dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.requests import Request

from realizar.engine.clients.async_engine import EngineState
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.metrics import MetricSamples
from realizar.server.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as lists of models show it.

    Attributes:
        names: ids that requests may use; answers carry the first.
        created_s: Unix time.
        max_model_len: tokens of the longest request, prompt and output.
        default_sampling: sampling of requests without parameters.
        facts: of its files.
    """

    names: tuple[str, ...]
    created_s: int
    max_model_len: int
    default_sampling: SamplingParams
    facts: ModelFacts


class ModelLease(Protocol):
    """The right of one request to use a model, until it is released.

    Attributes:
        api: what handlers work with.
    """

    @property
    def api(self) -> Api: ...

    def release(self) -> None:
        """Give the model back. The request has ended."""


class Models(Protocol):
    """The models of one server."""

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

        Raises:
            ApiError: 404 model_not_found; the model is not served.
        """

    def take(self, name: str | None) -> ModelLease | None:
        """The lease of a model; None if the request has to wait for it.

        Raises:
            ApiError: as of `find`.
        """

    async def wait(self, name: str | None) -> ModelLease:
        """The lease of a model, when it is the request's turn."""

    async def exposition(self, others: Sequence[MetricSamples]) -> bytes:
        """The metrics of the whole server in Prometheus' text format; `others` are those of no model."""


def models_of(request: Request) -> Models:
    """The models of the server that a request came to."""
    return cast("Models", request.app.state.models)


async def model_of(request: Request, name: str | None) -> Api:
    """What a request works with to use the model of a name; the model is there until the request has ended.

    The request's body must have been read.

    Raises:
        ApiError: 404 model_not_found; the model is not served.
        ClientDisconnectedError: the client disconnected while it waited for the model.
    """
    models = models_of(request)
    lease = models.take(name)
    if lease is None:
        lease = await unless_disconnected(request.receive, models.wait(name))
    request.scope["state"]["model_leases"].append(lease)
    return lease.api
