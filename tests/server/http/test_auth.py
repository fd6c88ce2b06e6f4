"""Keys guard every route but those named, whatever path, host or header is made up."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from realizar.errors import InvalidRequestError
from realizar.server.app import OPEN_PATHS, create_app
from realizar.server.http.middleware import KeyRing
from realizar.server.settings import ServerSettings
from realizar.server.web import web_routes
from server.scripted_engine import ScriptedEngine, scripted_model

KEYS = ("first-key", "second-key")
_CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": _CHAT,
    "/v1/messages": {**_CHAT, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
    "/api/chat": _CHAT,
    "/api/generate": {"model": "scripted", "prompt": "x", "stream": False},
    "/v1/embeddings": {"input": "x"},
    "/api/embed": {"model": "scripted", "input": "x"},
}


def make_app(**settings: Any) -> Starlette:
    return create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings(api_keys=KEYS, **settings))


def ask(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def test_every_route_needs_a_key_but_those_named() -> None:
    app = make_app()
    routes = [(route.path, route) for route in app.routes if isinstance(route, Route)]
    pages = {route.path for route in web_routes()}
    assert all(path == "/" or path.startswith("/static/") for path in pages)
    known = {path for path, _ in routes}
    assert {"/v1/chat/completions", "/metrics", "/openapi.json", "/tokenizer_info", "/version"} < known
    for path, route in routes:
        concrete = path.replace("{name:path}", "scripted")
        for method in route.methods or ():
            status = ask(app, method, concrete).status_code
            assert (status == 401) == (path not in OPEN_PATHS and path not in pages), (method, path)
            if path not in OPEN_PATHS and path not in pages:
                with_key = ask(app, method, concrete, headers={"authorization": f"Bearer {KEYS[1]}"})
                assert with_key.status_code != 401
    assert len(routes) == len(app.routes)  # nothing is mounted that this does not see


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/health/",
            "/health/../v1/models",
            "/x//health",
            "/ready/x",
            "/v1/models?x=/health",
            "/%68ealth/x",
            "/Health",
        ),
        *("/health%2f..%2fv1%2fmodels", "/v1/models/..%2f..%2fhealth", "/static/../v1/models", "/v1/models#/health"),
    ],
)
def test_paths_made_to_look_open(path: str) -> None:
    response = ask(make_app(), "GET", path)
    assert response.status_code in (401, 404)
    assert "scripted" not in response.text


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "server@x/health", "localhost:1/ready/?", ""])
def test_hosts_made_to_look_open(host: str) -> None:
    assert ask(make_app(), "GET", "/v1/models", headers={"host": host}).status_code == 401


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Basic first-key",
            "first-key",
            "Bearer first-key x",
            "Bearer first-ke",
        ),
        *("Bearer first-key,second-key", "Bearer FIRST-KEY", f"Bearer {hashlib.sha256(b'first-key').hexdigest()}"),
    ],
)
def test_keys_that_are_none(value: str) -> None:
    response = ask(make_app(), "GET", "/v1/models", headers={"authorization": value})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first" not in response.text


def test_keys_that_open() -> None:
    app = make_app()
    for value in ("Bearer first-key", "bearer second-key", "Bearer  first-key"):
        assert ask(app, "GET", "/v1/models", headers={"authorization": value}).status_code == 200
    twice = [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")]
    assert ask(app, "GET", "/v1/models", headers=twice).status_code == 401
    assert ask(app, "GET", "/v1/models", headers={"x-authorization": "Bearer first-key"}).status_code == 401


def test_keys_in_the_other_header() -> None:
    """Anthropic's clients send the key alone; beside `Authorization` it counts for nothing."""
    app = make_app()
    assert ask(app, "GET", "/v1/models", headers={"x-api-key": "second-key"}).status_code == 200
    for headers in (
        [("x-api-key", "wrong")],
        [("x-api-key", "first-key"), ("x-api-key", "first-key")],
        [("x-api-key", "first-key"), ("authorization", "Bearer wrong")],
        [("x-api-key", "first-key"), ("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")],
    ):
        assert ask(app, "GET", "/v1/models", headers=headers).status_code == 401
    both = [("x-api-key", "wrong"), ("authorization", "Bearer first-key")]
    assert ask(app, "GET", "/v1/models", headers=both).status_code == 200


def test_the_body_is_not_read_without_a_key() -> None:
    response = ask(make_app(), "POST", "/v1/completions", content=b"{")
    assert response.status_code == 401


def test_no_keys_is_open_to_all() -> None:
    assert KeyRing(()).opens(None)
    assert not KeyRing(("k",)).opens(None)


def test_other_origins_are_kept_out_unless_allowed() -> None:
    names = "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-lang"
    preflight = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": names,
    }
    closed = ask(make_app(), "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert "access-control-allow-origin" not in closed.headers
    app = make_app(cors_origins=("http://page",))
    allowed = ask(app, "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://page"
    assert allowed.headers["access-control-allow-headers"] == names
    other = ask(app, "OPTIONS", "/v1/chat/completions", headers={**preflight, "origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers
    assert ask(app, "POST", "/v1/chat/completions", headers={"origin": "http://page"}).status_code == 401


def test_a_lone_key_has_no_one_to_keep_its_cache_from() -> None:
    assert not ServerSettings(api_keys=("k",)).have_own_caches
    assert ServerSettings(api_keys=("k",), cache_sharing="key").have_own_caches
    assert not ServerSettings(api_keys=KEYS, cache_sharing="all").have_own_caches
    with pytest.raises(InvalidRequestError, match="API keys"):
        ServerSettings(cache_sharing="key")


@pytest.mark.parametrize("path", BODIES)
def test_the_engine_gets_the_client_of_a_request(path: str) -> None:
    """A digest of the key where there are keys; without them, what a header says makes nobody another client."""
    clients = []
    for keys, header in ((KEYS, KEYS[0]), (KEYS, KEYS[1]), (KEYS, KEYS[0]), ((), "a"), ((), "b")):
        engine = ScriptedEngine()
        settings = ServerSettings(api_keys=keys, key_weights=(5, 2) if keys else (), embeddings="last")
        app = create_app(cast("Any", engine), scripted_model(), settings)
        answer = ask(app, "POST", path, json=BODIES[path], headers={"authorization": f"Bearer {header}"})
        assert answer.status_code == 200, answer.text
        clients.append(engine.asked[0][2]["client"])
    assert clients[0] == clients[2] != clients[1]
    assert clients[3] == clients[4]
    assert [client.weight for client in clients] == [5, 2, 5, 1, 1]
    assert [client.has_own_cache for client in clients] == [True, True, True, False, False]
    assert not any(key in client.name for key in KEYS for client in clients)
