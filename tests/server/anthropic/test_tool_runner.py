"""The official client's runner of tools begins a thread unasked; told that there are none, it sends all by itself."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

TEMPLATE = (
    "{{ tools | tojson if tools }}<tool_call>{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "Weather in Paris? My word is BANANA."}]


@beta_async_tool
async def weather(city: str) -> str:
    """Weather of a city."""
    return f"It rains in {city}."


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_runner_goes_on_without_a_thread(*, ignore: bool, stream: bool) -> None:
    engine = ScriptedEngine(deltas=(CALL,))
    app = create_app(cast("Any", engine), scripted_model(TEMPLATE), ServerSettings(ignore_unknown_fields=ignore))

    async def main() -> None:
        transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with anthropic.AsyncAnthropic(
            base_url="http://server", api_key="x", http_client=transport, max_retries=0
        ) as client:
            runner = client.beta.messages.tool_runner(
                model="scripted", max_tokens=99, messages=ASK, tools=[weather], max_iterations=2, stream=stream
            )
            async for turn in runner:
                message = await turn.get_final_message() if stream else turn  # type: ignore[union-attr]
                assert message.stop_reason == "tool_use"  # type: ignore[union-attr]

    asyncio.run(main())
    assert len(engine.asked) == 2
    last = bytes(engine.asked[-1][0]).decode()
    assert "BANANA" in last
    assert "tool: It rains in Paris." in last
    assert '"name": "weather"' in last


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}])
def test_a_thread_is_refused_with_the_code_that_clients_know(
    path: str, thread: dict[str, Any], *, ignore: bool
) -> None:
    settings = ServerSettings(ignore_unknown_fields=ignore)
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), settings)
    body = {"model": "scripted", "messages": ASK, "thread": thread}

    async def main() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body if path.endswith("tokens") else {**body, "max_tokens": 5})

    answer = asyncio.run(main())
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
