"""Answers, refusals and errors are counted by kind, whatever layer they come from; `/metrics` is open by choice."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import httpx

from realizar import __version__
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.http.http_door import Door
from server.scripted_engine import ScriptedEngine, scripted_model

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEY = {"authorization": "Bearer key"}


def figures(text: str, name: str) -> dict[str, float]:
    """The values of a metric by its labels."""
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


def test_answers_and_errors_by_kind() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings(api_keys=("key",)))

    async def main() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=KEY) as client:
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/chat/completions", json={**CHAT, "n": 0})
            await client.post("/v1/messages", json={"max_tokens": 0})
            await client.get("/nowhere")
            await client.get("/v1/models", headers={"authorization": ""})
            await client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
            await client.get("/health")
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    answers = figures(text, "realizar:http_requests_total")
    assert answers == {'status="200"': 1, 'status="400"': 2, 'status="404"': 1, 'status="401"': 1, 'status="415"': 1}
    errors = figures(text, "realizar:request_errors_total")
    assert errors['code="unknown_url",status="404"'] == errors['code="invalid_api_key",status="401"'] == 1
    assert sum(errors.values()) == 5
    assert figures(text, "realizar_build_info").keys() > set()
    assert f'version="{__version__}"' in text


def test_what_is_refused_before_the_application_is_counted() -> None:
    async def main() -> str:
        async with Door(ServerSettings(log_requests=False)) as door:
            for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
                reader, writer = await door.connect()
                writer.write(sent)
                await reader.read()
            async with httpx.AsyncClient() as client:
                return (await client.get(f"http://127.0.0.1:{door.port}/metrics")).text

    errors = figures(asyncio.run(main()), "realizar:request_errors_total")
    assert errors == {'code="invalid_http",status="400"': 1, 'code="invalid_host",status="400"': 1}


def test_metrics_need_a_key_unless_they_are_opened() -> None:
    async def status(*, is_open: bool) -> list[int]:
        settings = ServerSettings(api_keys=("key",), open_metrics=is_open)
        app = create_app(cast("Any", ScriptedEngine()), scripted_model(), settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [(await client.get(path)).status_code for path in ("/metrics", "/v1/models", "/metrics/")]

    assert asyncio.run(status(is_open=False)) == [401, 401, 401]
    assert asyncio.run(status(is_open=True)) == [200, 401, 401]
