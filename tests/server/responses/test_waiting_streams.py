"""Streams whose first output takes long: the response begins meanwhile, and goes on being there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.errors import EngineDeadError
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.responses.test_response_answers import BODY, EVENT, PATH, TEMPLATE, events_of
from server.scripted_engine import ScriptedEngine, scripted_model


class HeldEngine(ScriptedEngine):
    """Gives nothing until it is freed."""

    free: asyncio.Event

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> AsyncStream:
        await self.free.wait()
        return await super().generate(prompt_token_ids, sampling, **options)


def watched(engine: ScriptedEngine, enough: asyncio.Event, leaves: bool) -> list[dict[str, Any]]:
    """The events of a stream whose first output waits; `enough` is set once three of them say that it goes on.

    Args:
        leaves: True if the client leaves then.
    """
    app = create_app(cast("Any", engine), scripted_model(TEMPLATE), ServerSettings(ping_interval_s=0.01))
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"".join(sent).count(b"event: response.in_progress") > 2:
            enough.set()

    async def main() -> None:
        body = json.dumps({**BODY, "stream": True}).encode()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            if (message := next(given, None)) is not None:
                return message
            await (enough.wait() if leaves else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        headers = [(b"host", b"server"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b"", "state": {}}
        await app({**scope, "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1)}, receive, send)

    asyncio.run(main())
    parts = b"".join(sent).decode().split("\n\n")
    return events_of("\n\n".join(part for part in parts if not part.startswith(":")))


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_waits_long_sees_the_response_begin(fails: bool) -> None:
    engine = HeldEngine(deltas=("</think>Yes",), refusal=EngineDeadError("gone") if fails else None)
    engine.free = asyncio.Event()
    events = watched(engine, engine.free, leaves=False)
    names = [event["type"] for event in events]
    assert names[:4] == ["response.created", *["response.in_progress"] * 3]
    assert names[-1] == ("response.failed" if fails else "response.completed")
    state = ResponseStreamState[Any](input_tools=[], text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))


def test_a_client_that_leaves_while_it_waits_frees_its_request() -> None:
    engine = ScriptedEngine(deltas=(None,))
    events = watched(engine, asyncio.Event(), leaves=True)
    assert events[-1]["type"] == "response.in_progress"
    assert (engine.num_asked, engine.num_closed) == (1, 1)
