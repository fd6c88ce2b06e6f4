"""`POST /reset_prefix_cache`: refused unless the operator allows it, for one model and for several."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app, create_app_of
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, run
from server.scripted_engine import ScriptedEngine, scripted_model

PATH = "/reset_prefix_cache"
ALLOWED = ServerSettings(allow_cache_clearing=True)


def clear(engine: ScriptedEngine, settings: ServerSettings, path: str = PATH, **headers: str) -> httpx.Response:
    app = create_app(cast("Any", engine), scripted_model(), settings)

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, headers=headers)

    return asyncio.run(main())


def test_a_client_clears_the_cache_only_where_the_operator_allows_it() -> None:
    engine = ScriptedEngine()
    refused = clear(engine, ServerSettings())
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "cache_clearing_not_allowed")
    assert "--allow-cache-clearing" in refused.json()["error"]["message"]
    assert engine.num_cleared == 0
    done = clear(engine, ALLOWED)
    assert (done.status_code, done.json(), engine.num_cleared) == (200, {"models": ["scripted"]}, 1)


def test_it_needs_a_key_as_every_route_does() -> None:
    engine, settings = ScriptedEngine(), ServerSettings(allow_cache_clearing=True, api_keys=("secret",))
    assert clear(engine, settings).status_code == 401
    assert engine.num_cleared == 0
    assert clear(engine, settings, authorization="Bearer secret").status_code == 200


def test_a_page_of_another_origin_does_not_clear_it() -> None:
    engine = ScriptedEngine()
    assert clear(engine, ALLOWED, origin="https://example.org").status_code == 403
    assert engine.num_cleared == 0


@pytest.mark.parametrize("state", ["starting", "dead"])
def test_a_model_that_is_not_loaded_has_nothing_to_clear(state: str) -> None:
    assert clear(ScriptedEngine(state=state), ALLOWED).json() == {"models": []}


def test_an_unknown_model_is_named() -> None:
    engine = ScriptedEngine()
    answer = clear(engine, ALLOWED, f"{PATH}?model=other")
    assert (answer.status_code, engine.num_cleared) == (404, 0)
    assert "'other'" in answer.json()["error"]["message"]


def test_several_models_are_cleared_by_name_or_all_that_are_loaded() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b")
        app = create_app_of(case.shelf, ALLOWED)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for query, names in (("", ["a", "b"]), ("?model=b", ["b"]), ("?model=c", [])):
                assert (await client.post(f"{PATH}{query}")).json() == {"models": names}
            unknown = await client.post(f"{PATH}?model=x")
        assert unknown.status_code == 404
        assert [case.loader.engines[name].num_cleared for name in ("a", "b")] == [1, 2]
        assert case.loader.log == ["+a", "+b"]

    run(main)
