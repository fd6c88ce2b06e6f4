"""The application: its routes and the middleware around them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from realizar import __version__
from realizar.engine.frontend.async_engine import AsyncEngine, EngineState
from realizar.errors import EngineDeadError
from realizar.request import Client
from realizar.server.anthropic.routes import ANTHROPIC
from realizar.server.api import Api, make_api
from realizar.server.errors import ApiError, to_api_error
from realizar.server.figures import ServerFigures, own_samples
from realizar.server.http.clients import Clients
from realizar.server.http.dialects import ApiRoute, Dialect, error_response
from realizar.server.http.disconnects import ClientDisconnectedError
from realizar.server.http.forwarded import ClientAddressMiddleware, TrustedProxies
from realizar.server.http.middleware import (
    BrowserGuard,
    GuardMiddleware,
    KeyRing,
    RequestLogMiddleware,
    TraceMiddleware,
    make_tracer,
)
from realizar.server.http.request import json_response, settings_of
from realizar.server.http.request_memory import RequestMemoryMiddleware
from realizar.server.http.unknown_fields import IGNORED, IgnoredFields
from realizar.server.http.work import WorkPool
from realizar.server.metrics import CONTENT_TYPE, MetricSamples, exposition_of
from realizar.server.models.models import ModelLease, Models, ModelState, ModelStatus, models_of
from realizar.server.models.names import not_served
from realizar.server.ollama.listing import probe
from realizar.server.ollama.routes import OLLAMA
from realizar.server.openai.routes import OPENAI
from realizar.server.responses.routes import RESPONSES
from realizar.server.responses.store import ResponseStore
from realizar.server.served_model import ServedModel
from realizar.server.settings import ServerSettings
from realizar.server.web import web_routes

# `GET /openapi.json`: the API's description, generated from the routes and the request records.

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_SCHEMAS = "#/components/schemas/"

_STATES: Mapping[EngineState, ModelState] = {
    "starting": "loading",
    "ready": "ready",
    "draining": "finishing",
    "dead": "failed",
}


async def _openapi(request: Request) -> Response:
    return json_response(describe(DIALECTS, COMMON_ROUTES))


def describe(dialects: Sequence[Dialect], common: Sequence[ApiRoute]) -> dict[str, Any]:
    """The API in the format of OpenAPI 3.1; errors of `common` routes, of no dialect, have the first one's form."""
    listed = [(route, dialect) for dialect in dialects for route in dialect.routes]
    listed += [(route, dialects[0]) for route in common]
    records = [route.body for route, _ in listed if route.body is not None]
    schemas, components = msgspec.json.schema_components(records, ref_template=f"{_SCHEMAS}{{name}}")
    bodies = dict(zip(records, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, dialect in listed:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {}).update(_described(route, dialect, bodies))
    errors = {_error_name(dialect): dialect.error_schema for dialect in dialects}
    return {
        "openapi": "3.1.0",
        "info": {"title": "realizar", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **errors},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"header": []}],
    }


def _described(route: ApiRoute, dialect: Dialect, bodies: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{_error_name(dialect)}"}}}
    responses = {
        "200": {"description": "The answer."},
        "default": {"description": "An error.", "content": error},
    }
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if names := _PARAMETER.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        content = {"application/json": {"schema": bodies[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return {route.method.lower(): operation}


def _error_name(dialect: Dialect) -> str:
    return f"{dialect.name}Error"


# Routes for monitoring: health, readiness, metrics and version.


async def _health(request: Request) -> Response:
    """Answer 200 while the server is alive, even while it loads; 503 once no engine is left."""
    dead = models_of(request).state == "dead"
    return _state("dead" if dead else "ok", 503 if dead else 200)


async def _ready(request: Request) -> Response:
    """Answer 200 while requests are accepted; otherwise 503, with the reason if one is known."""
    models = models_of(request)
    return _state(models.state, 200 if models.state == "ready" else 503, models.fault)


async def _metrics(request: Request) -> Response:
    figures: ServerFigures = request.app.state.figures
    text = await models_of(request).exposition((*figures.samples(), *own_samples()))
    return Response(text, media_type=CONTENT_TYPE)


async def _version(request: Request) -> Response:
    return json_response({"version": __version__})


def _state(state: str, status: int, reason: str | None = None) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    answer = {"status": state} if status == 200 or reason is None else {"status": state, "reason": reason}
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


async def _reset_prefix_cache(request: Request) -> Response:
    """Clear the cache of each model that is loaded, or of that in the query's `model`; answer with their names.

    The cache is every client's: one that clears it makes all others wait for their prompts to be read again, so that an
    API key alone does not do. A client that wants no more of its own blocks sends another `cache_salt`.
    """
    if not settings_of(request).allow_cache_clearing:
        raise ApiError(
            403,
            "this server's prefix cache is cleared by whoever runs it: it was started without --allow-cache-clearing."
            " Requests with another cache_salt find nothing that was computed before",
            code="cache_clearing_not_allowed",
        )
    running = models_of(request).running(request.query_params.get("model"))
    cleared = await asyncio.gather(*map(_cleared, running))
    names = [api.model.name for api, done in zip(running, cleared, strict=True) if done]
    return json_response({"models": names})


async def _cleared(api: Api) -> bool:
    """Clear the cache of one model; False if its engine ends meanwhile, and its cache with it."""
    try:
        await api.engine.clear_cache()
    except EngineDeadError:
        return False
    return True


OPEN_PATHS = ("/health", "/ready")
DIALECTS = (OPENAI, ANTHROPIC, OLLAMA, RESPONSES)
COMMON_ROUTES = (
    ApiRoute("/health", _health, "Alive."),
    ApiRoute("/ready", _ready, "Ready to take requests."),
    ApiRoute("/metrics", _metrics, "Figures for Prometheus."),
    ApiRoute("/reset_prefix_cache", _reset_prefix_cache, "Forget all cached prompts.", verb="POST"),
    ApiRoute("/version", _version, "The program's version."),
    ApiRoute("/openapi.json", _openapi, "This description."),
)


def create_app(
    engine: AsyncEngine,
    model: ServedModel,
    settings: ServerSettings,
    exposition: Callable[[], Awaitable[bytes]] | None = None,
    more_samples: Callable[[], tuple[MetricSamples, ...]] = tuple,
) -> Starlette:
    """Make the server of one model, without its sockets. The caller starts and closes the engine, which may be loading.

    Args:
        exposition: gives the metrics of the whole server, where this is a part of it.
        more_samples: gives further metrics otherwise, once the engine's figures are there.
    """
    return create_app_of(_OneModel(make_api(engine, model, settings), exposition, more_samples), settings)


def create_app_of(models: Models, settings: ServerSettings) -> Starlette:
    pages = web_routes() if settings.web_page else [Route("/", probe, methods=["GET"], name="probe")]
    open_paths = (*OPEN_PATHS, *(page.path for page in pages), *(("/metrics",) if settings.open_metrics else ()))
    figures = ServerFigures()
    api_routes = (*chain.from_iterable(dialect.routes for dialect in DIALECTS), *COMMON_ROUTES)
    ignored = IgnoredFields() if settings.ignore_unknown_fields else None
    app = Starlette(
        routes=[*(_route(each, ignored) for each in api_routes), *pages],
        middleware=_layers(settings, open_paths, figures, names_models=models.several),
        exception_handlers={HTTPException: _http_error, Exception: _error},
    )
    app.router.redirect_slashes = False
    app.state.dialects = DIALECTS
    app.state.models, app.state.settings, app.state.work = models, settings, WorkPool()
    app.state.figures = figures
    app.state.response_store = _response_store(settings)
    return app


def _response_store(settings: ServerSettings) -> ResponseStore | None:
    if not settings.max_stored_responses:
        return None
    return ResponseStore(settings.max_stored_responses, settings.stored_response_bytes)


def _route(route: ApiRoute, ignored: IgnoredFields | None) -> Route:
    """Its handler's errors become answers; `ignored` takes unknown fields, None refuses them."""

    async def answer(request: Request) -> Response:
        IGNORED.set(ignored)
        try:
            return await route.handler(request)
        except ClientDisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - every error is answered in one form
            return await _error(request, error)

    return Route(route.path, answer, methods=[route.method], name=route.path)


async def _error(request: Request, error: Exception) -> Response:
    return error_response(request.scope, to_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return await _error(request, error)
    place = f"{request.method} {ascii(request.scope['path'])[1:-1][:200]}"
    if error.status_code == 404:
        api_error = ApiError(404, f"Unknown request URL: {place}", code="unknown_url")
    elif error.status_code == 405:
        message = f"The method is not allowed: {place}"
        api_error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
    else:
        api_error = ApiError(error.status_code, error.detail, headers=error.headers)
    return await _error(request, api_error)


def _layers(
    settings: ServerSettings, open_paths: tuple[str, ...], figures: ServerFigures, *, names_models: bool
) -> list[Middleware]:
    """The middleware from the outside in. CORS comes before authentication, as preflight requests carry no key."""
    proxies = TrustedProxies(settings.trusted_proxies)
    browsers = BrowserGuard(settings.allowed_hosts, settings.cors_origins)
    layers = [
        *([Middleware(ClientAddressMiddleware, proxies=proxies)] if proxies else []),
        Middleware(RequestLogMiddleware, figures=figures, enabled=settings.log_requests, names_models=names_models),
        Middleware(GuardMiddleware, fault=browsers.fault, open_paths=OPEN_PATHS),  # probes have host names of their own
    ]
    if settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],  # official clients send a dozen of their own, and origins are what is checked
                expose_headers=["x-request-id", ANTHROPIC.request_id_header],
            )
        )
    if settings.traces_endpoint is not None:
        layers.append(Middleware(TraceMiddleware, tracer=make_tracer(settings.traces_endpoint)))
    layers.append(Middleware(GuardMiddleware, fault=KeyRing(settings.api_keys).fault, open_paths=open_paths))
    clients = Clients(settings.api_keys, settings.key_weights, have_own_caches=settings.have_own_caches)
    total, images = settings.request_memory_bytes, settings.image_memory_bytes
    layers.append(Middleware(RequestMemoryMiddleware, total_bytes=total, image_bytes=images, clients=clients))
    return layers


class _OneModel:
    """The `Models` of a server with a single model: nobody counts the requests that use it.

    `exposition` gives the metrics of a whole server of which this is a part; None takes its own and its engine's.
    `more_samples` gives further ones, once the engine's figures are there.
    """

    several: ClassVar[bool] = False
    pulls: None = None

    def __init__(
        self,
        api: Api,
        exposition: Callable[[], Awaitable[bytes]] | None = None,
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
        model, info = self.api.model, self.api.engine.info if self.state == "ready" else None
        device = None if info is None else info.device
        return (
            ModelStatus(
                model.names,
                model.created_s,
                self.api.max_model_len,
                model.default_sampling,
                model.facts,
                _STATES[self.state],
                self.fault,
                device=device,
                device_label=None if info is None else info.device_label,
            ),
        )

    def find(self, name: str | None) -> ModelStatus:
        self.take(name)
        return self.listed()[0]

    def take(self, name: str | None, keep_alive_s: float | None = None) -> ModelLease:
        """The lease of the model, which may still be loading: its engine refuses requests until it is ready."""
        names = self.api.model.names
        if name is not None and name not in names:
            raise not_served(name, names, names[:1])
        return ModelLease(self.api)

    async def wait(self, name: str | None, client: Client) -> ModelLease:
        return self.take(name)

    def running(self, name: str | None = None) -> Sequence[Api]:
        self.take(name)
        return (self.api,) if self.state in ("ready", "draining") else ()

    def end_sleep(self, name: str) -> None:
        """The model never sleeps."""

    async def exposition(self, others: Sequence[MetricSamples]) -> bytes:
        if self._exposition is not None:
            return await self._exposition()
        stats = await self.api.engine.stats()
        samples = (*self.api.metrics.samples(), *others, *self._more_samples())
        return exposition_of({self.api.model.name: stats}, samples)
