"""Requests as Open WebUI makes them, written by hand from what its public sources send, are answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realizar.server.settings import ServerSettings
from server.ollama.test_ollama_answers import ask
from server.scripted_engine import ScriptedEngine

REQUESTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "clients" / "open_webui.json").read_text(encoding="utf-8")
)
HEADERS = {"X-OpenWebUI-User-Name": "A%20B", "X-OpenWebUI-User-Id": "1", "Authorization": "Bearer k"}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda found: found["why"])
def test_each_is_answered(request_: dict[str, Any]) -> None:
    engine = ScriptedEngine(deltas=("Hm.</think>", "Ye", "s."))
    settings = ServerSettings(api_keys=("k",), embeddings="last")
    body = {"json": request_["body"]} if "body" in request_ else {}
    response = ask(request_["method"], request_["path"], settings, engine, headers=HEADERS, **body)
    assert response.status_code == 200, response.text
    given = request_.get("body", {})
    if request_["path"] not in ("/api/chat", "/api/generate"):
        return
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[-1]["done"] is True
    assert all(line["model"] == "scripted:latest" for line in lines)
    assert (len(lines) > 1) == (given.get("stream") is True)
    if engine.asked:
        assert lines[-1]["eval_count"] == 3
        options, sampling = given["options"], engine.asked[-1][1]
        assert sampling.max_tokens == options.get("num_predict")
        assert sampling.temperature == options.get("temperature", 1.0)
        assert sampling.stop == tuple(options.get("stop", ()))


def test_its_list_has_the_names_that_it_asks_for() -> None:
    """It adds a tag to a name that has none, and looks the result up in the list."""
    models = ask("GET", "/api/tags", ServerSettings()).json()["models"]
    assert [(model["model"], model["name"]) for model in models] == [("scripted:latest",) * 2]
    asked = {found["body"]["model"] for found in REQUESTS if "body" in found}
    assert asked == {models[0]["model"]}


def test_results_of_tools_reach_their_calls() -> None:
    engine = ScriptedEngine()
    (body,) = [found["body"] for found in REQUESTS if found["why"].startswith("the results of two calls")]
    assert ask("POST", "/api/chat", ServerSettings(), engine, json=body).status_code == 200
    shown = bytes(engine.asked[-1][0]).decode().split("|")
    assert shown[2:4] == ["tool:dry(weather_of_city)<call_a1>", "tool:wet(weather_of_city)<call_b2>"]
