"""Answers while the engine starts, is full, drains, dies or fails have a status and a wait, and name no files."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from typing import Any, cast

import httpx
import pytest

from realizar.errors import (
    CapacityError,
    ChatTemplateError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RealizarError,
    RequestFailedError,
    StepMemoryError,
)
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.errors import cleaned
from realizar.server.settings import ServerSettings
from realizar.tokenizer.templates.chat_template import Render, compile_template
from server.scripted_engine import ScriptedEngine, events_of, scripted_model

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
# How many buckets vLLM's histograms have, the unbounded one included.
EDGES = {
    "time_to_first_token_seconds": 23,
    "inter_token_latency_seconds": 20,
    "e2e_request_latency_seconds": 22,
    "request_queue_time_seconds": 22,
    "request_prefill_time_seconds": 22,
    "request_decode_time_seconds": 22,
}
GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "scripted", "prompt": "Hi"},
    "/v1/embeddings": {"model": "scripted", "input": "Hi"},
}


def ask(
    engine: ScriptedEngine, path: str, body: Any = None, template: str | None = "x", **settings: Any
) -> httpx.Response:
    model = scripted_model() if template == "x" else scripted_model(template)
    app = create_app(
        cast("Any", engine), model, ServerSettings(**{"embeddings": "last", "allow_request_priority": True, **settings})
    )

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(main())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert "/srv" not in response.text
    assert "0x" not in response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("state", "code"), [("starting", "engine_unavailable"), ("draining", "engine_unavailable"), ("dead", "engine_died")]
)
def test_no_engine(path: str, state: str, code: str) -> None:
    response = ask(ScriptedEngine(state=state), path, GENERATING[path])
    error = error_of(response, 503)
    assert (error["type"], error["code"]) == ("server_error", code)
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [("starting", 200, 503), ("ready", 200, 200), ("draining", 200, 503), ("dead", 503, 503)],
)
def test_health_and_readiness(state: str, health: int, ready: int) -> None:
    engine = ScriptedEngine(state=state)
    assert ask(engine, "/health").status_code == health
    assert ask(engine, "/ready").status_code == ready


def test_the_reason_why_no_engine_starts_is_reported() -> None:
    response = ask(ScriptedEngine(state="starting", fault="tiny.gguf is gone"), "/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "starting", "reason": "tiny.gguf is gone"}
    assert ask(ScriptedEngine(), "/ready").json() == {"status": "ready"}


def test_models_and_tokens_are_served_while_loading() -> None:
    engine = ScriptedEngine(state="starting")
    listed = ask(engine, "/v1/models").json()
    assert listed["data"][0]["id"] == "scripted"
    assert listed["data"][0]["max_model_len"] == 100_000
    sampling = listed["data"][0]["default_sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["max_tokens"]) == (1.0, 0, None)
    assert SamplingParams(**sampling) == SamplingParams()
    alone = ask(engine, "/v1/models/scripted").json()
    # Each question is a server's of its own, which may have begun a second later.
    assert {**alone, "created": 0} == {**listed["data"][0], "created": 0}
    assert ask(engine, "/tokenize", {"prompt": "Hi"}).json()["tokens"] == [72, 105]
    assert ask(engine, "/metrics").status_code == 200


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue(path: str) -> None:
    response = ask(ScriptedEngine(refusal=QueueFullError("full", 2.2)), path, GENERATING[path])
    error = error_of(response, 429)
    assert (error["type"], error["code"], response.headers["retry-after"]) == (
        "rate_limit_error",
        "rate_limit_exceeded",
        "3",
    )


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (ContextLengthError("1 and 2", "prompt"), 400, "context_length_exceeded"),
        (CapacityError("too large for the cache"), 400, "request_too_large"),
        (StepMemoryError("the GPU is out of memory: tried 2 GiB"), 503, "out_of_memory"),
        (RequestFailedError("no token can be sampled: the model gave a logit of nan"), 500, "request_failed"),
        (InvalidRequestError("bad schema", "structured"), 400, None),
        (ChatTemplateError("failed: <object at 0x7f0012345678>"), 400, "chat_template_error"),
        (EngineDeadError("died in /srv/engine.py"), 503, "engine_died"),
        (RealizarError("what else in /srv/engine.py"), 500, "internal_error"),
        (KeyError("/srv/engine.py"), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_engine_refuses(refusal: Exception, status: int, code: str | None) -> None:
    for stream in (False, True):
        response = ask(ScriptedEngine(refusal=refusal), "/v1/chat/completions", {**CHAT, "stream": stream})
        assert error_of(response, status)["code"] == code
        assert response.headers["content-type"] == "application/json"


def test_death_in_the_middle_of_a_stream() -> None:
    engine = ScriptedEngine(deltas=("Hel", EngineDeadError("died in /srv/engine.py at 0x7f0012345678")))
    response = ask(engine, "/v1/chat/completions", {**CHAT, "stream": True})
    assert response.status_code == 200
    *deltas, last = events_of(response.text)
    assert json.loads(deltas[0])["choices"][0]["delta"]["content"] == "Hel"
    assert json.loads(last)["error"]["code"] == "engine_died"
    assert "/srv" not in response.text
    assert "[DONE]" not in response.text
    assert error_of(ask(engine, "/v1/chat/completions", CHAT), 503)["code"] == "engine_died"


def test_failures_are_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    ask(ScriptedEngine(refusal=KeyError("/srv/engine.py")), "/v1/chat/completions", CHAT)
    assert "/srv/engine.py" in caplog.text
    assert "Traceback" in caplog.text


def test_models_without_a_template_do_not_chat() -> None:
    error = error_of(ask(ScriptedEngine(), "/v1/chat/completions", CHAT, template=None), 400)
    assert error["code"] == "no_chat_template"
    assert "/v1/completions" in error["message"]


def test_templates_that_fail() -> None:
    bombs = {
        "refuses": "{{ raise_exception('no such role') }}",
        "power": "{{ 9**(9**9) }}",
        "loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "text": "{{ 'x' * 999999999 }}",
        "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "repr": "{{ raise_exception(cycler) }}",
    }
    for template in bombs.values():
        error = error_of(ask(ScriptedEngine(), "/v1/chat/completions", CHAT, template=template), 400)
        assert error["code"] == "chat_template_error"


def test_templates_of_requests_where_allowed() -> None:
    body = {**CHAT, "chat_template": "{{ messages[0].content }}!"}
    assert error_of(ask(ScriptedEngine(), "/v1/chat/completions", body), 400)["param"] == "chat_template"
    engine = ScriptedEngine()
    assert ask(engine, "/v1/chat/completions", body, allow_request_templates=True).status_code == 200
    assert bytes(engine.asked[0][0]) == b"Hi!"


@pytest.mark.parametrize("effort", [None, "none"])
def test_templates_are_tried_out_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, effort: str | None) -> None:
    """Trying one out takes as long as a template may take; other requests' answers must not wait for it."""
    threads: list[threading.Thread] = []

    def compiled(source: str) -> tuple[Render, bool]:
        threads.append(threading.current_thread())
        return compile_template(source)

    monkeypatch.setattr("realizar.server.generation.chat_plan.RequestCompiler", lambda: compiled)
    body = {**CHAT, "chat_template": "x", "reasoning_effort": effort}
    assert ask(ScriptedEngine(), "/v1/chat/completions", body, allow_request_templates=True).status_code == 200
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    "text", [" " * 400_000, "/a" * 200_000, "/a/" + "a." * 200_000], ids=["spaces", "path", "dots"]
)
def test_errors_that_quote_long_texts(text: str) -> None:
    """They are cleaned in time in proportion to their length: its square would be hours."""
    assert len(cleaned(f"<{text}> at 0x7f0012345678")) < 2_100
    assert (
        error_of(ask(ScriptedEngine(), "/v1/chat/completions", {**CHAT, text: 1}), 400)["code"] == "unknown_parameter"
    )


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no /srv/models/x.gguf: gone", "no a file: gone"),
        ("in /usr/lib/a.py, line 3.", "in a file, line 3."),
        ("see /x/y.json.", "see a file."),
        ("not /v1/chat/completions or a.py", "not /v1/chat/completions or a.py"),
        ("<X object at 0x7f0012345678> and 0xdeadbeef", "<X> and"),
    ],
)
def test_messages_show_nothing_of_this_machine(message: str, shown: str) -> None:
    assert cleaned(message).rstrip() == shown


def test_models_not_made_for_embeddings() -> None:
    body = GENERATING["/v1/embeddings"]
    error = error_of(ask(ScriptedEngine(), "/v1/embeddings", body, embeddings=None), 400)
    assert error["code"] == "embeddings_not_supported"
    response = ask(ScriptedEngine(pooling="mean"), "/v1/embeddings", body, embeddings=None)
    assert response.json()["data"][0]["embedding"] == pytest.approx([0.6, 0, 0.8, 0])


def test_what_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 9,
        "n": 2,
        "stop": "x",
        "stop_token_ids": [3],
        "min_tokens": 1,
        "logit_bias": {"5": -1.5},
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["\n"],
        "ignore_eos": True,
        "priority": -2,
        "cache_salt": "s",
        "max_tokens": 9,
        "max_completion_tokens": 6,
        "logprobs": True,
    }
    assert ask(engine, "/v1/chat/completions", {**CHAT, **fields}).status_code == 200
    prompt, sampling, options = engine.asked[0]
    assert bytes(prompt) == b"user: Hi\nassistant:"
    assert (options["priority"], options["cache_salt"]) == (-2, "s")
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.n) == (0.5, 7, 9, 2)
    assert (sampling.stop, sampling.stop_token_ids, sampling.min_tokens) == (("x",), (3,), 1)
    assert (dict(sampling.logit_bias), sampling.dry_sequence_breakers) == ({5: -1.5}, (10,))
    assert (sampling.max_tokens, sampling.logprobs, sampling.ignore_eos) == (6, 0, True)
    assert ask(engine, "/v1/chat/completions", CHAT).status_code == 200
    assert engine.asked[1][1].max_tokens is None  # the rest of the context
    assert ask(engine, "/v1/chat/completions", {**CHAT, "dry_multiplier": 1}).status_code == 200
    assert engine.asked[2][1].dry_sequence_breakers == tuple(sorted(b'\n:"*'))


def test_one_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "realizar.access")
    ask(ScriptedEngine(), "/v1/chat/completions", CHAT)
    ask(ScriptedEngine(), "/v1/chat/completions", {**CHAT, "stream": True})
    ask(ScriptedEngine(), "/v1/chat/completions", {**CHAT, "n": 0})
    ask(ScriptedEngine(), "/health")
    ask(ScriptedEngine(), "/static/app.js")
    ask(ScriptedEngine(), "/static/nowhere.js")
    ask(ScriptedEngine(), "/nowhere%0Aforged")
    lines = [record.getMessage() for record in caplog.records if record.name == "realizar.access"]
    assert len(lines) == 5
    assert lines[0].startswith("POST /v1/chat/completions 200 ")
    assert "prompt=19 tokens=2" in lines[0]
    assert "tokens=2" in lines[1]
    assert " 400 " in lines[2]
    assert "\n" not in "".join(lines)
    assert lines[3].startswith("GET /static/nowhere.js 404 ")
    assert "error=unknown_url" in lines[4]


def test_request_ids() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings())

    async def main() -> list[str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            given = ["mine-1", "bad id", "x" * 200, ""]
            return [
                (await client.get("/v1/models", headers={"x-request-id": each})).headers["x-request-id"]
                for each in given
            ]

    mine, *others = asyncio.run(main())
    assert mine == "mine-1"
    assert all(each.startswith("req-") for each in others)
    assert len(set(others)) == 3


def test_figures_by_vllms_names() -> None:
    engine = ScriptedEngine()
    app = create_app(cast("Any", engine), scripted_model(), ServerSettings())

    async def main() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for body in (CHAT, {**CHAT, "stream": True, "n": 2}):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    label = 'model_name="scripted"'
    for line in (
        f"realizar:num_requests_running{{{label}}} 2.0",
        f"realizar:num_requests_waiting{{{label}}} 0.0",
        f"realizar:kv_cache_usage_perc{{{label}}} 0.25",
        f"realizar:prefix_cache_hits_total{{{label}}} 3.0",
        f"realizar:prefix_cache_queries_total{{{label}}} 0.0",
        f"realizar:num_preemptions_total{{{label}}} 0.0",
        f"realizar:prompt_tokens_total{{{label}}} 9.0",
        f"realizar:generation_tokens_total{{{label}}} 0.0",
        f'realizar:request_success_total{{finished_reason="stop",{label}}} 3.0',
        f'realizar:time_to_first_token_seconds_bucket{{le="0.25",{label}}} 2.0',
        f'realizar:e2e_request_latency_seconds_bucket{{le="0.3",{label}}} 2.0',
        f"realizar:request_queue_time_seconds_count{{{label}}} 2.0",
        f"realizar:request_prefill_time_seconds_count{{{label}}} 2.0",
        f"realizar:request_decode_time_seconds_count{{{label}}} 2.0",
    ):
        assert line in text, line
    edges = {name: len(set(re.findall(rf'realizar:{name}_bucket{{le="([^"]+)"', text))) for name in EDGES}
    assert edges == EDGES
