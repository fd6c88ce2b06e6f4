"""A client that leaves: its request ends in the engine, streamed or not, and at whatever moment."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model
from server_thread import RunningServer
from waits import HANG_S, wait_until

MODEL = "org/smollm2"
LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}
BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **LONG},
    "/v1/completions": {"model": MODEL, "prompt": ["Hi", "Ho", "He"], **LONG},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_blocks_are_free_while_others_run(server: RunningServer, path: str, stream: bool) -> None:
    """The request itself would take minutes."""
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with server.held_steps():
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), HANG_S) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.wait(server.engine.stats()).num_running > 0)
            begun = b""
            while stream and b"data: {" not in begun:
                part = connection.recv(65536)
                assert part, begun
                begun += part
        server.stats_when_idle()


def test_a_consumer_that_stops_early(server: RunningServer) -> None:
    with server.held_steps(), httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        body = {**BODIES["/v1/chat/completions"], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
        server.stats_when_idle()
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
def test_disconnect_before_the_first_token(path: str, body: dict[str, Any]) -> None:
    """The engine has the request and gives nothing; an idle stream is pinged meanwhile."""
    engine = ScriptedEngine(deltas=(None,))
    app = create_app(cast("Any", engine), scripted_model(), ServerSettings(embeddings="last", ping_interval_s=0.05))
    sent: list[dict[str, Any]] = []
    num_asked = len(body.get("prompt", body.get("input", "x")))

    def pings() -> int:
        return [message.get("body") for message in sent].count(b": ping\n\n")

    async def main() -> None:
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps({"model": "scripted", **body}).encode()}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "http_version": "1.1",
        }
        running = asyncio.ensure_future(app(cast("Any", scope), cast("Any", receive), cast("Any", send)))
        async with asyncio.timeout(HANG_S):
            while engine.num_asked < num_asked or (body.get("stream") and not pings()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not running.done()
        assert engine.num_closed == 0
        left.set()
        await asyncio.wait_for(running, HANG_S)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert engine.num_closed == num_asked
    assert sent == [] or body.get("stream")


def test_a_client_that_takes_nothing() -> None:
    """Its request ends after a while, and so does the connection."""
    engine = ScriptedEngine(deltas=("a", "b", None))
    settings = ServerSettings(ping_interval_s=0.05, write_timeout_s=0.1)
    app = create_app(cast("Any", engine), scripted_model(), settings)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stream": True}

    async def main() -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(3600)
            return messages.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(3600)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        await asyncio.wait_for(app(cast("Any", scope), cast("Any", receive), cast("Any", send)), HANG_S)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert engine.num_closed == 1
