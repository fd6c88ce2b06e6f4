"""The middleware around every route: the log of requests, the guard against browsers, traces, and API keys.

The guard refuses browsers' requests from pages of other origins, by the headers Host, Origin and Sec-Fetch-*. Any page
that a user has open can make the browser send requests here, and read the answers if its name resolves to this machine
(DNS rebinding). Programs other than browsers send neither Origin nor Sec-Fetch-Site.

Traces are optional: a span for each request, as part of the caller's trace, with OpenTelemetry's names. OpenTelemetry
is imported only if traces are turned on; the extra `otel` installs it.

Keys are compared as digests in constant time. Only the listed open paths need none.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realizar import __version__
from realizar.errors import RealizarError
from realizar.extras import how_to_install
from realizar.server.errors import ApiError, to_api_error
from realizar.server.figures import ServerFigures
from realizar.server.http.clients import offered_key
from realizar.server.http.dialects import dialect_of, error_response, note_error
from realizar.server.http.disconnects import ClientDisconnectedError

_LOG = logging.getLogger("realizar.access")
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_QUIET = ("/health", "/ready", "/metrics")
_PAGE_FILES = "/static/"  # the chat page asks for some thirty when it opens

_ANY = "*"

_ATTRIBUTES: Mapping[str, str] = {
    "model": "gen_ai.request.model",
    "prompt": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "queue_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
}
"""Attributes of a span by the names of a request's notes; the latencies have vLLM's names."""


class RequestLogMiddleware:
    """The outermost: gives a request an id, or keeps the client's own if it is well-formed, and logs the request's end.

    Handlers put further figures into `scope["state"]["notes"]`. `names_models`: lines name the model, one of several.
    """

    def __init__(
        self, app: ASGIApp, figures: ServerFigures, *, enabled: bool = True, names_models: bool = False
    ) -> None:
        self._app, self._figures, self._enabled = app, figures, enabled
        self._hidden = () if names_models else ("model",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["status"], state["notes"] = request_id, 0, {}
        header = dialect_of(scope).request_id_header.encode()
        started_s = time.monotonic()

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (header, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientDisconnectedError:
            state["disconnected"] = True
        except Exception as error:  # noqa: BLE001 - the last barrier: no exception may reach the client
            api_error = to_api_error(error)
            note_error(scope, api_error)
            if not state["status"]:
                await error_response(scope, api_error)(scope, receive, send_noting)
        finally:
            self._count(scope)
            if self._enabled:
                _write_line(scope, time.monotonic() - started_s, self._hidden)

    def _count(self, scope: Scope) -> None:
        state = scope["state"]
        if "error_status" in state:
            self._figures.failed(state["error_status"], state["error_code"])
        if not _is_quiet(scope):
            self._figures.ended(state["status"], disconnected=state.get("disconnected", False))


def _request_id(scope: Scope) -> str:
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _GOOD_ID.fullmatch(given[0]):
        return given[0].decode()
    return f"req-{secrets.token_hex(12)}"


def _is_quiet(scope: Scope) -> bool:
    """True for a usual answer to a probe or a scrape. 503 is usual for `/ready` during loading."""
    return scope["path"] in _QUIET and scope["state"]["status"] in (200, 503)


def _level(scope: Scope) -> int:
    """The level of a request's line: DEBUG for what comes often and says nothing."""
    is_page_file = scope["path"].startswith(_PAGE_FILES) and scope["state"]["status"] in (200, 304)
    return logging.DEBUG if is_page_file or _is_quiet(scope) else logging.INFO


def _write_line(scope: Scope, duration_s: float, hidden: Collection[str]) -> None:
    """One line, whose `fields` are what it says, for lines of JSON."""
    state = scope["state"]
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": ascii(scope["path"])[1:-1][:200],
        "status": "disconnected" if state.get("disconnected", False) else state["status"],
        "duration_s": round(duration_s, 3),
        "id": state["request_id"],
        "client": client[0] if client else "",
        **{name: round(value, 3) if isinstance(value, float) else value for name, value in state["notes"].items()},
    }
    if code := state.get("error_code"):
        fields["error"] = code
    shown = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in list(fields.items())[4:]
        if name not in hidden and value != ""
    )
    _LOG.log(
        _level(scope),
        "%s %s %s %.3fs %s",
        fields["method"],
        fields["path"],
        fields["status"],
        duration_s,
        shown,
        extra={"fields": fields},
    )


class GuardMiddleware:
    """Refuses requests before routing: those for which `fault` gives an error. `open_paths` are not guarded.

    It compares the whole path as the router will see it, so that neither `Host` nor an encoded path can make a guarded
    route look open.
    """

    def __init__(self, app: ASGIApp, fault: Callable[[Scope], ApiError | None], open_paths: Collection[str]) -> None:
        self._app, self._fault, self._open_paths = app, fault, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        fault = None if is_open else self._fault(scope)
        answer = self._app if fault is None else error_response(scope, fault)
        await answer(scope, receive, send)


class BrowserGuard:
    """Refuses a browser's request with 403 unless a page of this server or of an allowed origin sent it.

    Args:
        allowed_hosts: names that a Host header may have, without port; an empty list or `*` allows all.
        cors_origins: origins whose pages may call; `*` is all.
    """

    def __init__(self, allowed_hosts: Iterable[str], cors_origins: Iterable[str]) -> None:
        hosts = frozenset(_bare(host) for host in allowed_hosts)
        self._hosts = frozenset() if _ANY in hosts else hosts
        self._origins = frozenset(origin.lower() for origin in cors_origins)

    def fault(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"):
                if name in headers:
                    return ApiError(400, f"the request has two {name.decode()} headers", code="invalid_headers")
                headers[name] = value
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _bare(host) not in self._hosts:
            return _refused(
                f"the Host header {host[:100]!a} is not a name of this server; --allowed-host {_shown(_bare(host))} "
                "allows it",
                "host_not_allowed",
            )
        if _ANY in self._origins:
            return None
        return self._foreign(scope["method"], headers, host)

    def _foreign(self, method: str, headers: dict[bytes, bytes], host: str) -> ApiError | None:
        # A page can't set Sec-Fetch-Site, and the header is valid even if a proxy changes Host or drops its port.
        # Browsers send it only over HTTPS and to localhost, so requests to a rebound name do not have it.
        site = headers.get(b"sec-fetch-site")
        if site == b"same-origin":
            return None
        origin = headers[b"origin"].decode("latin-1").lower() if b"origin" in headers else None
        if origin is not None and (origin in self._origins or _is_of(origin, host)):
            return None
        if origin is not None:
            return _refused(
                f"pages of {origin[:100]!a} may not call this server; --cors-origin {_shown(origin)} allows them",
                "origin_not_allowed",
            )
        followed_link = (
            method in ("GET", "HEAD")
            and headers.get(b"sec-fetch-mode") == b"navigate"
            and headers.get(b"sec-fetch-dest") == b"document"
        )
        if site is None or site == b"none" or followed_link:
            return None
        return _refused(
            "a page of another site may not use this server (Sec-Fetch-Site); --cors-origin allows an origin",
            "origin_not_allowed",
        )


def _refused(message: str, code: str) -> ApiError:
    return ApiError(403, message, code=code)


def _bare(host: str) -> str:
    """A host name without port and trailing dot; an IPv6 address gets brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    if host.count(":") > 1:
        return f"[{host}]"
    return host.partition(":")[0].removesuffix(".")


def _is_of(origin: str, host: str) -> bool:
    """True if an origin is the server itself, as the Host header names it; a proxy may terminate TLS before it."""
    try:
        theirs, own = urlsplit(origin), urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(theirs.scheme)
        if default is None or theirs.hostname is None:
            return False
        return theirs.hostname == own.hostname and (theirs.port or default) == (own.port or default)
    except ValueError:  # no address, or no port
        return False


def _shown(text: str) -> str:
    return ascii(text[:100])[1:-1] or "NAME"


def make_tracer(endpoint: str) -> Any:
    """An OpenTelemetry tracer that sends to a collector over HTTP, such as `http://collector:4318/v1/traces`.

    It raises RealizarError if OpenTelemetry is not installed.
    """
    try:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ModuleNotFoundError:
        raise RealizarError(f"traces need OpenTelemetry: {how_to_install('otel')}") from None
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "realizar"}))
    provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("realizar", __version__)


class TraceMiddleware:
    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app, self._tracer = app, tracer
        self._trace = importlib.import_module("opentelemetry.trace")
        self._propagate = importlib.import_module("opentelemetry.propagate")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate", b"baggage")
        }
        with self._tracer.start_as_current_span(
            "llm_request", context=self._propagate.extract(carrier), kind=self._trace.SpanKind.SERVER
        ) as span:
            try:
                await self._app(scope, receive, send)
            finally:
                self._describe(span, scope)

    def _describe(self, span: Any, scope: Scope) -> None:
        state, status = scope["state"], scope["state"]["status"]
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("url.path", scope["path"])
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("gen_ai.request.id", state["request_id"])
        for name, value in state["notes"].items():
            if name in _ATTRIBUTES:
                span.set_attribute(_ATTRIBUTES[name], value)
        code = state.get("error_code")
        if code is not None or status >= 500 or state.get("disconnected"):
            span.set_attribute(
                "error.type", code or ("client_disconnected" if state.get("disconnected") else str(status))
            )
        if status >= 500:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))


class KeyRing:
    """The server's API keys, kept as digests; without keys every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def opens(self, key: bytes | None) -> bool:
        if not self._digests:
            return True
        offered = _digest(key or b"")
        found = [hmac.compare_digest(digest, offered) for digest in self._digests]  # of all: the time reveals nothing
        return any(found) and key is not None

    def fault(self, scope: Scope) -> ApiError | None:
        if self.opens(offered_key(scope["headers"])):
            return None
        message = "the request needs a valid API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
