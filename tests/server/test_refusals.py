"""Wrong requests are refused with their status and the name of the field; none reaches the engine."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from realizar.server.settings import ServerSettings
from server.http.http_door import Door, at_the_door
from server_thread import RunningServer, exchange

MODEL = "org/smollm2"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
COMPLETION = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
EMBEDDING = {"model": MODEL, "input": "Hi"}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/embeddings": EMBEDDING}
HERE = re.escape(str(Path(__file__).parents[2]))
TELLTALE = re.compile(rf"{HERE}|/(root|home|usr|tmp)|0x[0-9a-f]{{6}}|Traceback|\.py")


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in the form that clients read."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not TELLTALE.search(response.text)
    assert response.headers["x-request-id"]
    return error


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


RAW: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "text": b'"x"',
    "NaN": b'{"model": "other", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "other", "prompt": "x", "temperature": Infinity}',
    "overflow": b'{"model": "other", "prompt": "x", "temperature": 1e999}',
    "digits": b'{"model": "other", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "duplicate keys": b'{"model": "other", "prompt": "x", "prompt": "y"}',
    "deep duplicate keys": b'{"model": "other", "prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
    "lone surrogate": b'{"model": "other", "prompt": "\\ud800"}',
    "no UTF-8": b'{"model": "other", "prompt": "\xff"}',
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep in a field": b'{"model": "other", "prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "many values": b'{"model": "other", "prompt": [' + b"{}," * 250_000 + b"{}]}",
    "trailing": b'{"model": "other", "prompt": "x"} {}',
    "byte order mark": b'\xef\xbb\xbf{"model": "other", "prompt": "x"}',
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_bodies_that_are_no_request(http: httpx.Client, raw: bytes) -> None:
    error = error_of(http.post("/v1/completions", content=raw, headers={"content-type": "application/json"}))
    assert error["type"] == "invalid_request_error"


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    # of all endpoints that generate
    *(
        (path, {name: value}, name)
        for path in ("/v1/chat/completions", "/v1/completions")
        for name, value in [
            ("n", 0),
            ("n", 129),
            ("n", -1),
            ("n", 1.5),
            ("n", True),
            ("max_tokens", -1),
            ("max_tokens", "8"),
            ("max_tokens", 10**20),
            ("temperature", -0.1),
            ("temperature", 101),
            ("temperature", "hot"),
            ("top_p", 0),
            ("top_p", 1.1),
            ("top_k", -2),
            ("min_p", 2),
            ("typical_p", 0),
            ("top_n_sigma", -1),
            ("xtc_probability", 1.5),
            ("dry_base", 0.5),
            ("dry_allowed_length", 0),
            ("dry_sequence_breakers", [""]),
            ("dry_sequence_breakers", ["x"] * 65),
            ("mirostat", 1),
            ("mirostat_tau", -1),
            ("repetition_penalty", 0),
            ("presence_penalty", 2.1),
            ("frequency_penalty", -2.1),
            ("seed", 2**64),
            ("seed", -(2**63) - 1),
            ("min_tokens", -1),
            ("min_tokens", 5),
            ("stop", [""]),
            ("stop", ["x"] * 17),
            ("stop", "x" * 257),
            ("stop", 5),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [49152]),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"49152": 1}),
            ("logit_bias", {"5": 101}),
            ("logit_bias", [5]),
            ("prompt_logprobs", 21),
            ("prompt_logprobs", -1),
            ("truncate_prompt_tokens", 0),
            ("stream_options", {"include_usage": True}),
            ("user", 5),
            ("priority", "high"),
            ("best_of", 2),
            ("use_beam_search", True),
            ("bad_words", ["x"]),
            ("allowed_token_ids", [5]),
            ("include_stop_str_in_output", True),
            ("skip_special_tokens", False),
            ("logits_processors", ["x"]),
            ("guided_choice", []),
            ("model", 5),
        ]
    ),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": None}, "messages"),
    ("/v1/chat/completions", {"messages": "Hi"}, "messages"),
    ("/v1/chat/completions", {"messages": ["Hi"]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": user(5)}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": user([])}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": user(["x"])}, "messages[0].content[0]"),
    ("/v1/chat/completions", {"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
    ("/v1/chat/completions", {"messages": user([{"type": []}])}, "messages[0].content[0].type"),
    ("/v1/chat/completions", {"messages": user([{"type": "poem", "text": "x"}])}, "messages[0].content[0].type"),
    (
        "/v1/chat/completions",
        {"messages": user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])},
        "messages[0].content[0].image_url",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ("/v1/chat/completions", {"documents": [{"text": "x"}]}, "documents"),
    ("/v1/chat/completions", {"add_special_tokens": True}, "add_special_tokens"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"x": "y" * 70_000}}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"tools": [tool(description="word " * 9000)]}, "tools"),
    ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
    ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"pad": 1}}, "stream_options.pad"),
    ("/v1/chat/completions", {"response_format": {"type": "poem"}}, "response_format.type"),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
    ),
    ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function"),
    ("/v1/chat/completions", {"tools": [tool("no spaces")]}, "tools[0].function.name"),
    ("/v1/chat/completions", {"tools": [tool(), tool()]}, "tools[1].function.name"),
    ("/v1/chat/completions", {"tools": [tool(str(i)) for i in range(10_000)]}, "tools"),
    ("/v1/chat/completions", {"tools": [tool(color="red")]}, "tools[0].function.color"),
    ("/v1/chat/completions", {"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [tool()], "tool_choice": tool("g")}, "tool_choice.function.name"),
    ("/v1/chat/completions", {"tools": [tool()], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", {"function_call": {"name": "f"}}, "function_call"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ("/v1/chat/completions", {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ("/v1/chat/completions", {"store": True}, "store"),
    ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("/v1/chat/completions", {"reasoning_effort": "extreme"}, "reasoning_effort"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt[1]"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
    ("/v1/completions", {"prompt": [[1], 1]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": [1, 49152]}, "prompt"),
    ("/v1/completions", {"prompt": [[1], [10**30]]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[1], ["x"]]}, "prompt[1][0]"),
    ("/v1/completions", {"prompt": [[1.5]]}, "prompt[0][0]"),
    ("/v1/completions", {"prompt": ["x"] * 2049}, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 2048, "n": 128}, "n"),
    ("/v1/completions", {"prompt": "x" * 3_000_000}, "prompt"),
    ("/v1/completions", {"logprobs": 21}, "logprobs"),
    ("/v1/completions", {"logprobs": True}, "logprobs"),
    ("/v1/completions", {"suffix": "x"}, "suffix"),
    ("/v1/completions", {"echo": "yes"}, "echo"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input"),
    ("/v1/embeddings", {"input": [99999999]}, "input"),
    ("/v1/embeddings", {"input": "word " * 2000}, "input"),
    ("/v1/embeddings", {"encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"dimensions": 64}, "dimensions"),
    ("/v1/embeddings", {"dimensions": "many"}, "dimensions"),
]


@pytest.mark.parametrize(("path", "changes", "param"), FIELDS, ids=[f"{p}-{str(c)[:40]}" for p, c, _ in FIELDS])
def test_fields_out_of_range_are_named(http: httpx.Client, path: str, changes: dict[str, Any], param: str) -> None:
    body = {**BODIES[path], **changes}
    if "min_tokens" in changes:
        body["ignore_eos"] = True
    error = error_of(http.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error


@pytest.mark.parametrize("path", BODIES)
def test_missing_and_unknown_fields(http: httpx.Client, path: str) -> None:
    without = {key: value for key, value in BODIES[path].items() if key != "model"}
    assert http.post(path, json=without).status_code == 200
    for name in ("messages", "prompt", "input"):
        if name in BODIES[path]:
            body = {key: value for key, value in BODIES[path].items() if key != name}
            error = error_of(http.post(path, json=body))
            assert (error["param"], error["code"]) == (name, "missing_required_parameter")
    error = error_of(http.post(path, json={**BODIES[path], "modle": "x"}))
    assert (error["param"], error["code"]) == ("modle", "unknown_parameter")
    assert "did you mean model?" in error["message"]
    error = error_of(http.post(path, json={**BODIES[path], "x\ud800".encode("utf-8", "replace").decode(): 1}))
    assert error["code"] == "unknown_parameter"
    assert error_of(http.post(path, json={**BODIES[path], "model": "nobody"}), 404)["code"] == "model_not_found"


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/completions/", "/v1/files", "//v1/models", "/v1/models/nobody", "/../etc/passwd"):
        response = http.get(path)
        if path != "/" or response.status_code != 200:
            error = error_of(response, 404)
            assert error["code"] in ("unknown_url", "model_not_found")
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PUT", "/tokenize"),
    ):
        response = http.request(method, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"]


def test_bodies_over_the_limit(http: httpx.Client, server: RunningServer) -> None:
    large = b'{"model": "other", "prompt": "' + b"x" * (5 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    assert error_of(http.post("/v1/completions", content=large, headers=headers), 413)["code"] == "request_too_large"

    def chunks() -> Any:
        for _ in range(6):
            yield b"x" * (1 << 20)

    response = http.post("/v1/completions", content=chunks(), headers=headers)  # without a length
    assert error_of(response, 413)["code"] == "request_too_large"


def test_bodies_in_other_forms(http: httpx.Client) -> None:
    bomb = gzip.compress(b"x" * (64 << 20))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert error_of(http.post("/v1/completions", content=bomb, headers=headers), 415)["code"] == "unsupported_encoding"
    plain = {"content-type": "text/plain"}  # what a page of another origin can send unasked
    response = http.post("/v1/completions", content=json.dumps(COMPLETION), headers=plain)
    assert error_of(response, 415)["code"] == "unsupported_media_type"
    response = http.post("/v1/completions", content=json.dumps(COMPLETION))  # without a type
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_a_slow_body() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"

    async def main(door: Door) -> None:
        answer = await door.exchange(head + b'content-length: 100\r\n\r\n{"model"')
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer

    at_the_door(main, ServerSettings(log_requests=False, body_timeout_s=0.3))


def test_slow_headers() -> None:
    async def main(door: Door) -> None:
        assert (await door.exchange(b"GET /health HTTP/1.1\r\nhost:")).startswith(b"HTTP/1.1 408")

    at_the_door(main, ServerSettings(log_requests=False, header_timeout_s=0.3))


def test_headers_too_large_or_broken(server: RunningServer) -> None:
    last_header = b"connection: close\r\n\r\n"
    large = b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 70_000 + b"\r\n" + last_header
    assert exchange(server, large).startswith(b"HTTP/1.1 431")
    unending = b"GET /health HTTP/1.1\r\nhost: x\r\nx-large: " + b"a" * 66_000
    assert exchange(server, unending).startswith(b"HTTP/1.1 431")
    answer = exchange(server, b"NONSENSE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer
    assert exchange(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + last_header).startswith(b"HTTP/1.1 200")


def test_templates_that_refuse(http: httpx.Client) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "\ud83d"}]}
    raw = json.dumps(body)
    error_of(http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"}))


def test_nothing_of_it_reached_the_engine(server: RunningServer) -> None:
    assert server.wait(server.engine.audit()) is None
    stats = server.wait(server.engine.stats())
    assert (stats.num_running, stats.num_waiting) == (0, 0)
