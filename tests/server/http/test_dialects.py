"""The form of an error is that of the dialect whose path was asked for, in every layer that answers one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from realizar.errors import QueueFullError
from realizar.server import app as app_module
from realizar.server.app import COMMON_ROUTES, DIALECTS, create_app, describe
from realizar.server.errors import ApiError, refused
from realizar.server.http.dialects import ApiRoute, Dialect, StreamForm
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model


class OtherBody(msgspec.Struct):
    """A body of another dialect."""

    text: str


async def fail(request: Request) -> Response:
    raise refused("nothing works here", "text")


async def overload(request: Request) -> Response:
    raise QueueFullError("full")


def other_error(error: ApiError) -> Any:
    return {"fault": [error.status, error.message]}


OTHER = Dialect(
    "Other",
    (ApiRoute("/other/fail", fail, "Fail.", OtherBody), ApiRoute("/other/by/{name}", overload, "Be full.")),
    other_error,
    {"type": "object", "required": ["fault"]},
    StreamForm(b"", b"", lambda error: b""),
)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(app_module, "DIALECTS", (*DIALECTS, OTHER))
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings(api_keys=("k",)))

    def send(method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        async def main() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
                return await client.request(method, path, headers={"authorization": "Bearer k"} | (headers or {}))

        return asyncio.run(main())

    return send


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/other/fail", None, 400),
        ("GET", "/other/fail", None, 405),
        ("GET", "/other/by/full", None, 429),
        ("GET", "/other/by/full", {"authorization": "Bearer wrong"}, 401),
        ("GET", "/other/by/full", {"sec-fetch-site": "cross-site", "origin": "http://evil"}, 403),
    ],
)
def test_errors_have_the_form_of_their_dialect(
    ask: Any, method: str, path: str, headers: dict[str, str] | None, status: int
) -> None:
    response = ask(method, path, headers)
    assert response.status_code == status, response.text
    assert response.json()["fault"][0] == status


@pytest.mark.parametrize("path", ["/v1/models/none", "/nowhere", "/v1/chat/completions", "/otherwise"])
def test_others_have_the_first_ones(ask: Any, path: str) -> None:
    assert set(ask("GET", path).json()["error"]) == {"message", "type", "param", "code"}


def test_the_description_refers_to_each_ones_errors_and_bodies() -> None:
    described = describe((*DIALECTS, OTHER), COMMON_ROUTES)
    post = described["paths"]["/other/fail"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/OtherBody"}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/OtherError"}}}
    assert post["responses"]["default"]["content"] == error
    assert described["components"]["schemas"]["OtherError"] == OTHER.error_schema
    assert [
        described["components"]["securitySchemes"][name]["type"] for kind in described["security"] for name in kind
    ] == [
        "http",
        "apiKey",
    ]
    assert described["paths"]["/other/by/{name}"]["get"]["parameters"][0]["name"] == "name"
