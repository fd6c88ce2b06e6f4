"""Ollama's API on a server of several models: names, states, and how long a model stays loaded."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import httpx
import pytest

from realizar.images.prepare import LargestImage
from realizar.request import Pooling
from realizar.server.app import create_app_of
from realizar.server.errors import ApiError
from realizar.server.model_facts import ModelFacts, capabilities
from realizar.server.ollama.times import read_keep_alive
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, run

HI = [{"role": "user", "content": "Hi"}]


def client_of(case: Case, *, allowed: bool = True) -> httpx.AsyncClient:
    app = create_app_of(case.shelf, ServerSettings(embeddings="last", allow_request_keep_alive=allowed))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def running(client: httpx.AsyncClient) -> dict[str, Any]:
    return {model["name"]: model for model in (await client.get("/api/ps")).json()["models"]}


def test_requests_load_the_model_that_they_name() -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            listed = (await client.get("/api/tags")).json()["models"]
            assert [model["name"] for model in listed] == ["a:latest", "b:latest", "c:latest"]
            assert await running(client) == {}
            shown = await client.post("/api/show", json={"model": "b"})
            assert (shown.status_code, shown.json()["license"]) == (200, "")
            assert case.state("b") == "known"
            for path, body in (
                ("/api/chat", {"messages": HI, "stream": False}),
                ("/api/generate", {"prompt": "Hi", "stream": False}),
                ("/api/embed", {"input": "Hi"}),
                ("/api/embeddings", {"prompt": "Hi"}),
            ):
                response = await client.post(path, json={"model": "b:latest", "keep_alive": "5m", **body})
                assert response.status_code == 200, response.text
                assert case.state("b") == "ready"
            assert list(await running(client)) == ["b:latest"]
            unknown = await client.post("/api/chat", json={"model": "x", "messages": HI})
            assert (unknown.status_code, "'b:latest'" in unknown.json()["error"]) == (404, True)

    run(main)


def test_a_model_stays_for_as_long_as_its_last_request_says() -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            loaded = await client.post("/api/generate", json={"model": "a", "keep_alive": "1h"})
            assert (loaded.json()["done_reason"], case.state("a")) == ("load", "ready")
            expires = datetime.fromisoformat((await running(client))["a:latest"]["expires_at"])
            assert 3_000 < expires.timestamp() - time.time() < 3_601
            await client.post("/api/chat", json={"model": "a", "messages": HI, "keep_alive": -1})
            assert (await running(client))["a:latest"]["expires_at"].startswith("9999")
            unloaded = await client.post("/api/chat", json={"model": "a", "keep_alive": 0})
            assert unloaded.json()["done_reason"] == "unload"
            await case.settled()
            assert (await running(client), case.state("a")) == ({}, "known")
            again = await client.post("/api/generate", json={"model": "a", "prompt": "", "keep_alive": "0s"})
            assert (again.json()["done_reason"], case.state("a")) == ("unload", "known")
            assert case.loader.log == ["+a", "-a"]

    run(main)


def test_a_client_has_no_say_in_how_long_a_model_stays_unless_the_operator_allows_it() -> None:
    """It neither unloads what all use, nor keeps it beyond the operator's time."""

    async def main(case: Case) -> None:
        async with client_of(case, allowed=False) as client:
            for path, body in (
                ("/api/chat", {"messages": HI, "stream": False}),
                ("/api/generate", {"prompt": "Hi", "stream": False}),
                ("/api/generate", {}),
                ("/api/embed", {"input": "Hi"}),
                ("/api/embeddings", {"prompt": "Hi"}),
            ):
                for given in (0, "5m", -1) if body else ("5m", -1):
                    response = await client.post(path, json={"model": "a", "keep_alive": given, **body})
                    assert response.status_code == 200, response.text
                    await case.settled()
                    assert case.state("a") == "ready"
                    expires = datetime.fromisoformat((await running(client))["a:latest"]["expires_at"])
                    assert 80 < expires.timestamp() - time.time() < 101
            for path in ("/api/chat", "/api/generate"):
                refused = await client.post(path, json={"model": "a", "keep_alive": 0})
                assert (refused.status_code, "--allow-request-keep-alive" in refused.json()["error"]) == (403, True)
                odd = await client.post(path, json={"model": "a", "keep_alive": "soon"})
                assert odd.status_code == 400
            assert case.loader.log == ["+a"]

    run(main, keep_alive_s=100.0)


@pytest.mark.parametrize(
    ("facts", "embeddings", "wanted"),
    [
        ({}, None, ["completion"]),
        ({"tools": True, "reasoning": True, "fills_in": True}, None, ["completion", "tools", "thinking", "insert"]),
        ({"tools": True}, "last", ["completion", "tools", "embedding"]),
        ({"tools": True, "pooling": "mean"}, None, ["embedding"]),
        ({"tools": True, "ranks": True}, None, []),
        ({"largest_image": LargestImage(96, None)}, None, ["completion", "vision"]),
    ],
)
def test_capabilities(facts: dict[str, Any], embeddings: Pooling | None, wanted: list[str]) -> None:
    assert capabilities(ModelFacts(**facts), embeddings) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (1.5, 1.5),
        (-1, -1),
        (-7.5, -1),
        (1e300, -1),
        ("5m", 300),
        ("1h30m0.5s", 5400.5),
        ("250ms", 0.25),
        ("-1m", -1),
        ("0", 0),
        ("-1", -1),
        ("600", 600),
    ],
)
def test_durations(given: float | str | None, wanted: float | None) -> None:
    assert read_keep_alive(given) == wanted


@pytest.mark.parametrize("given", ["", "m", "5 m", "5x", "1.2.3s", "٥m", "1m" * 9, "9" * 99, "x" * 9_000])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        read_keep_alive(given)
