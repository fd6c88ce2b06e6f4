"""Optional OpenTelemetry traces: a span for each request, as part of the caller's trace, with OpenTelemetry's names.

OpenTelemetry is imported only if traces are turned on; the extra `otel` installs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realizar import __version__
from realizar.errors import RealizarError
from realizar.extras import how_to_install

_ATTRIBUTES: Mapping[str, str] = {
    "model": "gen_ai.request.model",
    "prompt": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "queue_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
}
"""Attributes of a span by the names of a request's notes; the latencies have vLLM's names."""


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
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(
            "llm_request", context=self._propagate.extract(carrier), kind=self._trace.SpanKind.SERVER
        ) as span:
            try:
                await self._app(scope, receive, send_noting)
            finally:
                self._describe(span, scope, status)

    def _describe(self, span: Any, scope: Scope, status: int) -> None:
        state = scope["state"]
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
