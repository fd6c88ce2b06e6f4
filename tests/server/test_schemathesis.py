"""Schemathesis sends what the API's own description allows and what it does not: never a 5xx, never a hang."""

from __future__ import annotations

import re
import warnings
from typing import Any

import httpx
import pytest

from server_thread import RunningServer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is absent")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402

from realizar.server.app import (  # noqa: E402
    COMMON_ROUTES,
    DIALECTS,
    describe,
)
from waits import HANG_S  # noqa: E402
from wider import diagonal  # noqa: E402

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models/{name}"),
    *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
    "/v1/responses/input_tokens",
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull", "/api/create"),
)
PARAMETER = re.compile(r"{\w+}")
MAX_TOKENS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
OPTIONS = {"options": {"num_predict": 2}}
NAMED = {"model": "org/smollm2"}


def drive(server: RunningServer, path: str, mode: GenerationMode, examples: int) -> int:
    """Send generated requests; how many were answered with 200."""
    schema = schemathesis.openapi.from_dict(describe(DIALECTS, COMMON_ROUTES))
    operation = schema[path]["get" if "{" in path else "post"]
    answered = 0

    @settings(
        max_examples=examples,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), named=st.booleans())
    def run(case: Any, named: bool) -> None:
        nonlocal answered
        body = case.body if isinstance(case.body, dict) else None
        if body is not None:
            if named:
                body = {**body, **NAMED}
            if path in ("/api/chat", "/api/generate") and mode is GenerationMode.POSITIVE:
                body = {**body, **OPTIONS}
            if path in MAX_TOKENS and mode is GenerationMode.POSITIVE:
                body = {**body, MAX_TOKENS[path]: 2}
        with httpx.Client(base_url=server.url, timeout=HANG_S) as client:  # some may generate all that fits
            if "{" in path:
                name = next(iter((case.path_parameters or {"": "x"}).values()))
                response = client.get(str(name).join(PARAMETER.split(path)))
            else:
                response = client.post(path, json=body if body is not None else _plain(case.body))
        assert response.status_code < 500, (response.text, case.body)
        answered += response.status_code == 200
        if response.status_code >= 400 and path.startswith("/api/"):
            assert isinstance(response.json().pop("error"), str)
        elif response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run()
    return answered


def _plain(body: Any) -> Any:
    return body if isinstance(body, str | int | float | bool | list | type(None)) else str(body)


@pytest.mark.parametrize(("path", "mode"), diagonal(PATHS, [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]))
def test_no_request_breaks_the_server(server: RunningServer, path: str, mode: GenerationMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drive(server, path, mode, 15)
    assert server.wait(server.engine.audit()) is None


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_of_many_breaks_the_server(server: RunningServer, path: str, mode: GenerationMode) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drive(server, path, mode, 100)
    assert server.wait(server.engine.audit()) is None
