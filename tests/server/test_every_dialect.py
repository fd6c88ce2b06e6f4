"""What holds in every dialect alike, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import pytest

from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

CONTEXT = 100_000
HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Route:
    """A route that generates. Attributes: body: of a question. unbounded: that of one for the whole context, if any."""

    path: str
    body: Mapping[str, Any]
    unbounded: Mapping[str, Any] = field(default_factory=dict)


WHOLE = {"stream": False}
ROUTES = {
    "chat": Route("/v1/chat/completions", {"messages": HI}),
    "completions": Route("/v1/completions", {"prompt": "Hi"}),
    "responses": Route("/v1/responses", {"input": "Hi"}),
    "ollama": Route("/api/chat", {"messages": HI, **WHOLE}, {"options": {"num_predict": -1}}),
    "generate": Route("/api/generate", {"prompt": "Hi", **WHOLE}, {"options": {"num_predict": -2}}),
    "raw": Route("/api/generate", {"prompt": "Hi", "raw": True, **WHOLE}, {"options": {"num_predict": 0}}),
}


def sampling_of(route: Route, default: SamplingParams, **fields: Any) -> SamplingParams:
    """The sampling that a request reaches the engine with."""
    engine = ScriptedEngine()
    app = create_app(cast("Any", engine), replace(scripted_model(), default_sampling=default), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(route.path, json={"model": "scripted", **route.body, **fields})

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return engine.asked[-1][1]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_the_servers_max_tokens_are_the_default_of_requests(route: Route) -> None:
    assert sampling_of(route, SamplingParams(max_tokens=10)).max_tokens == 10
    # A default that is more than the context leaves is no fault of the request.
    bounded = sampling_of(route, SamplingParams(max_tokens=CONTEXT)).max_tokens
    assert bounded is not None
    assert CONTEXT - 50 < bounded < CONTEXT
    if route.unbounded:
        assert sampling_of(route, SamplingParams(max_tokens=10), **route.unbounded).max_tokens is None
