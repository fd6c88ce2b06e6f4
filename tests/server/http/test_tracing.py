"""Spans of requests, where OpenTelemetry is installed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest
from starlette.middleware import Middleware

from realizar.errors import QueueFullError, RealizarError
from realizar.server.app import create_app
from realizar.server.http import middleware
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, *bodies: dict[str, Any]) -> list[Any]:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is absent")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("realizar.server.app.make_tracer", lambda _: provider.get_tracer("test"))
    app = create_app(cast("Any", engine), scripted_model(), ServerSettings(traces_endpoint="http://nowhere"))

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for body in bodies:
                await client.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
            await client.get("/v1/models")

    asyncio.run(main())
    return list(exporter.get_finished_spans())


def test_a_span_is_part_of_the_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = spans_of(ScriptedEngine(), monkeypatch, CHAT, {**CHAT, "stream": True})
    assert len(spans) == 2
    for span in spans:
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert span.attributes["gen_ai.request.model"] == "scripted"
        assert span.attributes["gen_ai.usage.input_tokens"] == 19
        assert span.attributes["gen_ai.usage.output_tokens"] == 2
        assert span.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.2)
        assert span.attributes["http.response.status_code"] == 200


def test_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (span,) = spans_of(ScriptedEngine(refusal=QueueFullError("full")), monkeypatch, CHAT)
    assert span.attributes["http.response.status_code"] == 429
    assert span.attributes["error.type"] == "rate_limit_exceeded"
    (span,) = spans_of(ScriptedEngine(refusal=KeyError("x")), monkeypatch, CHAT)
    assert not span.status.is_ok


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(middleware.importlib, "import_module", absent)
    with pytest.raises(RealizarError, match=r"pip install .*\[otel\]"):
        middleware.make_tracer("http://nowhere")


def test_no_traces_unless_asked_for() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings())
    assert middleware.TraceMiddleware not in [cast("Middleware", layer).cls for layer in app.user_middleware]
