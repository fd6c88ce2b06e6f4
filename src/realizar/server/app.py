"""The application: its routes and the middleware around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import chain

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from realizar.engine.clients.async_engine import AsyncEngine
from realizar.server import health
from realizar.server.anthropic.routes import ANTHROPIC
from realizar.server.api import make_api
from realizar.server.clear_cache import reset_prefix_cache
from realizar.server.errors import ApiError, to_api_error
from realizar.server.figures import ServerFigures
from realizar.server.generation.work import WorkPool
from realizar.server.http.auth import AuthMiddleware, KeyRing
from realizar.server.http.browser_guard import BrowserGuardMiddleware
from realizar.server.http.clients import Clients
from realizar.server.http.dialects import ApiRoute, error_response
from realizar.server.http.disconnects import ClientDisconnectedError
from realizar.server.http.forwarded import ClientAddressMiddleware, TrustedProxies
from realizar.server.http.request_log import RequestLogMiddleware
from realizar.server.http.request_memory import RequestMemoryMiddleware
from realizar.server.http.tracing import TraceMiddleware, make_tracer
from realizar.server.http.unknown_fields import IGNORED, IgnoredFields
from realizar.server.metrics import Metrics, MetricSamples
from realizar.server.models.leases import ModelLeaseMiddleware
from realizar.server.models.models import Models
from realizar.server.models.one import OneModel
from realizar.server.ollama.listing import probe
from realizar.server.ollama.routes import OLLAMA
from realizar.server.openai.routes import OPENAI
from realizar.server.openapi import openapi
from realizar.server.responses.routes import RESPONSES
from realizar.server.responses.store import ResponseStore
from realizar.server.served_model import ServedModel
from realizar.server.settings import ServerSettings
from realizar.server.web import web_routes

OPEN_PATHS = ("/health", "/ready")
DIALECTS = (OPENAI, ANTHROPIC, OLLAMA, RESPONSES)
COMMON_ROUTES = (
    ApiRoute("/health", health.health, "Alive."),
    ApiRoute("/ready", health.ready, "Ready to take requests."),
    ApiRoute("/metrics", health.metrics, "Figures for Prometheus."),
    ApiRoute("/reset_prefix_cache", reset_prefix_cache, "Forget all cached prompts.", verb="POST"),
    ApiRoute("/version", health.version, "The program's version."),
    ApiRoute("/openapi.json", openapi, "This description."),
)


def create_app(
    engine: AsyncEngine,
    model: ServedModel,
    settings: ServerSettings,
    exposition: Callable[[Metrics], Awaitable[bytes]] | None = None,
    more_samples: Callable[[], tuple[MetricSamples, ...]] = tuple,
) -> Starlette:
    """Make the server of one model, without its sockets. The caller starts and closes the engine.

    Args:
        engine: may still be loading.
        exposition: gives the metrics of the whole server, where this is a part of it.
        more_samples: gives further metrics otherwise, once the engine's figures are there.
    """
    return create_app_of(OneModel(make_api(engine, model, settings), exposition, more_samples), settings)


def create_app_of(models: Models, settings: ServerSettings) -> Starlette:
    """Make the server of some models, without its sockets."""
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
    app.state.dialects, app.state.common_routes = DIALECTS, COMMON_ROUTES
    app.state.models, app.state.settings, app.state.work = models, settings, WorkPool()
    app.state.figures = figures
    app.state.response_store = _response_store(settings)
    return app


def _response_store(settings: ServerSettings) -> ResponseStore | None:
    if not settings.max_stored_responses:
        return None
    return ResponseStore(settings.max_stored_responses, settings.stored_response_bytes)


def _route(route: ApiRoute, ignored: IgnoredFields | None) -> Route:
    return Route(route.path, _answering(route.handler, ignored), methods=[route.method], name=route.path)


def _answering(
    handler: Callable[[Request], Awaitable[Response]], ignored: IgnoredFields | None
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler, so that its errors become answers. Args: ignored: takes unknown fields; None refuses them."""

    async def answer(request: Request) -> Response:
        IGNORED.set(ignored)
        try:
            return await handler(request)
        except ClientDisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 - every error is answered in one form
            return await _error(request, error)

    return answer


async def _error(request: Request, error: Exception) -> Response:
    return error_response(request.scope, to_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: an unknown path, or a method that the route does not have."""
    if not isinstance(error, HTTPException):
        return await _error(request, error)
    place = f"{request.method} {ascii(request.scope['path'])[1:-1][:200]}"
    if error.status_code == 404:
        api_error = ApiError(404, f"Unknown request URL: {place}", code="unknown_url")
    elif error.status_code == 405:
        api_error = ApiError(
            405, f"The method is not allowed: {place}", code="method_not_allowed", headers=error.headers
        )
    else:
        api_error = ApiError(error.status_code, error.detail, headers=error.headers)
    return await _error(request, api_error)


def _layers(
    settings: ServerSettings, open_paths: tuple[str, ...], figures: ServerFigures, *, names_models: bool
) -> list[Middleware]:
    """The middleware from the outside in. CORS comes before authentication, as preflight requests carry no key."""
    proxies = TrustedProxies(settings.trusted_proxies)
    layers = [
        *([Middleware(ClientAddressMiddleware, proxies=proxies)] if proxies else []),
        Middleware(RequestLogMiddleware, figures=figures, enabled=settings.log_requests, names_models=names_models),
        Middleware(
            BrowserGuardMiddleware,
            allowed_hosts=settings.allowed_hosts,
            cors_origins=settings.cors_origins,
            open_paths=OPEN_PATHS,
        ),
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
    layers.append(Middleware(AuthMiddleware, keys=KeyRing(settings.api_keys), open_paths=open_paths))
    clients = Clients(settings.api_keys, settings.key_weights, have_own_caches=settings.have_own_caches)
    layers.append(Middleware(RequestMemoryMiddleware, total_bytes=settings.request_memory_bytes, clients=clients))
    layers.append(Middleware(ModelLeaseMiddleware))
    return layers
