"""A server of several models over HTTP: every dialect finds its model, lists show states, and clients may go."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest

from realizar.errors import RealizarError
from realizar.server.app import create_app_of
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, run

HI = [{"role": "user", "content": "Hi"}]
SETTINGS = ServerSettings(embeddings="last", ping_interval_s=0.05)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}


def client_of(case: Case) -> httpx.AsyncClient:
    app = create_app_of(case.shelf, SETTINGS)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize("path", BODIES)
def test_every_route_uses_the_model_that_its_request_names(path: str) -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            for name in ("a", "b"):
                response = await client.post(path, json={"model": name, **BODIES[path]})
                assert response.status_code == 200, response.text
                assert response.json().get("model", name) == name
                assert case.state(name) == "ready"
            assert case.shelf.num_open == 0
            unknown = await client.post(path, json={"model": "x", **BODIES[path]})
            assert unknown.status_code == 404
            assert "(this server has 'a', 'b', 'c')" in unknown.text
            if not path.startswith("/v1/messages"):  # there the field is required
                missing = await client.post(path, json=BODIES[path])
                assert missing.status_code == 400
                assert missing.json()["error"]["message"] == "model is missing: this server has 'a', 'b', 'c'"

    assert run(main).loader.log[:2] == ["+a", "+b"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_keeps_its_model_to_its_end(path: str) -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            response = await client.post(path, json={"model": "a", "stream": True, **BODIES[path]})
        assert response.text.rstrip().endswith("data: [DONE]")
        assert case.shelf.num_open == 0

    run(main)


def test_a_failed_load_in_the_form_of_each_dialect() -> None:
    async def main(case: Case) -> None:
        case.loader.errors["a"] = RealizarError("/srv/models/a.gguf: offset 0: not a GGUF file")
        async with client_of(case) as client:
            first = await client.post("/v1/completions", json={"model": "a", "prompt": "Hi"})
            second = await client.post("/v1/messages", json={"model": "a", "messages": HI, "max_tokens": 3})
            listed = (await client.get("/v1/models/a")).json()
        assert first.status_code == 503
        assert first.json()["error"]["code"] == "model_not_loaded"
        assert "not a GGUF file" in first.json()["error"]["message"]
        assert second.status_code == 529
        assert second.json()["error"]["type"] == "overloaded_error"
        assert (listed["state"], listed["reason"]) == ("failed", "a file: offset 0: not a GGUF file")
        assert "/srv" not in first.text + second.text + json.dumps(listed)

    run(main)


def test_lists_health_and_the_facts_of_a_tokenizer() -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(each["id"], each["state"], each["memory_bytes"]) for each in listed] == [
                ("a", "known", 1),
                ("b", "known", 1),
                ("c", "known", 1),
            ]
            await client.post("/v1/completions", json={"model": "b", "prompt": "Hi"})
            listed = (await client.get("/v1/models")).json()["data"]
            assert [each["state"] for each in listed] == ["known", "ready", "known"]
            assert listed[1]["unloads_at"] > listed[1]["created"]
            for path in ("/health", "/ready"):
                assert (await client.get(path)).status_code == 200
            assert (await client.get("/tokenizer_info")).status_code == 400
            assert (await client.get("/tokenizer_info?model=b")).json()["vocab_size"] == 256
            text = (await client.get("/metrics")).text
            assert 'realizar:request_success_total{finished_reason="stop",model_name="b"} 1.0' in text

    run(main, keep_alive_s=1000.0)


def test_log_lines_name_the_model(caplog: pytest.LogCaptureFixture) -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            await client.post("/v1/completions", json={"model": "b", "prompt": "Hi"})

    with caplog.at_level("INFO"):
        run(main)
    assert [line for line in caplog.messages if line.startswith("POST") and " model=b " in line]
    assert [line for line in caplog.messages if line.startswith("b: ready after ")]


@pytest.mark.parametrize("moment", ["while it waits", "while it runs"])
def test_a_client_that_goes_gives_its_model_back(moment: str) -> None:
    async def main(case: Case) -> None:
        app = create_app_of(case.shelf, SETTINGS)
        left = asyncio.Event()
        body = {"model": "a", "prompt": "Hi", "stream": True}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        if moment == "while it waits":
            case.loader.held.add("a")

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if moment == "while it runs":
                left.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "http_version": "1.1",
        }
        running = asyncio.ensure_future(app(cast("Any", scope), cast("Any", receive), cast("Any", send)))
        await case.settled()
        if moment == "while it waits":
            assert case.state("a") == "loading"
            left.set()
        await running
        assert case.shelf.num_open == 0
        assert not case.shelf._models["a"].waiters
        case.loader.let_go("a")
        await case.use("b", "c")  # nothing is in their way

    run(main)
