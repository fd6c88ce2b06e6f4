"""Answers within a grammar that go on from a text: the whole of both is what the grammar describes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
ASK = {"role": "user", "content": "Describe a person as JSON."}
BEGUN = ['{"na', '{"name": "Ann', '{"name": "Zoë 🙂', '{"name":"Ann","age": 4', '{"name": "A", "age"', "{"]


def continued(http: httpx.Client, begun: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [ASK, {"role": "assistant", "content": begun}], "max_tokens": 60, "temperature": 1.0, "seed": 3}
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    return http.post("/v1/chat/completions", json={**body, **continues, "response_format": FORMAT, **fields})


def check(text: str) -> None:
    found = json.loads(text)
    assert sorted(found) == ["age", "name"]
    assert isinstance(found["age"], int)


@pytest.mark.parametrize("begun", BEGUN)
def test_json_goes_on_from_where_it_was(http: httpx.Client, begun: str) -> None:
    answer = continued(http, begun, n=2)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        check(begun + choice["message"]["content"])
    part = [{"type": "text", "text": begun}]
    assert continued(http, part, n=2).json()["choices"] == answer.json()["choices"]


def test_rows_that_begin_anew_share_nothing_wrong_with_them(http: httpx.Client) -> None:
    fields = {"messages": [ASK], "continue_final_message": False, "add_generation_prompt": True}
    for begun in BEGUN[:3]:
        check(continued(http, "", **fields).json()["choices"][0]["message"]["content"])
        check(begun + continued(http, begun).json()["choices"][0]["message"]["content"])


def test_what_is_whole_already_gets_nothing_more(http: httpx.Client) -> None:
    choice = continued(http, '{"name": "Ann", "age": 41}').json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("begun", ["Sure: ", '{"title": ', '{"name": 7', '{"name": "Ann", "age": 41}}'])
def test_a_text_that_breaks_the_schema_is_refused(http: httpx.Client, begun: str) -> None:
    for stream in (False, True):
        answer = continued(http, begun, stream=stream)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "response_format"
        assert "does not fit its grammar" in error["message"]


def test_several_texts_are_refused(http: httpx.Client) -> None:
    answer = continued(http, [{"type": "text", "text": "{"}, {"type": "text", "text": '"name"'}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_expressions_and_choices_go_on_too(http: httpx.Client) -> None:
    for outputs in ({"regex": "ab[0-9]{3}cd"}, {"choice": ["ab123cd", "xyz"]}):
        answer = continued(http, "ab1", response_format=None, structured_outputs=outputs)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert (len(text), text[2:]) == (4, "cd")


def test_other_dialects_go_on_too(http: httpx.Client) -> None:
    messages = [ASK, {"role": "assistant", "content": BEGUN[1]}]
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "stream": False}
    answer = http.post("/api/chat", json={**body, "format": SCHEMA, "options": {"num_predict": 60}})
    check(BEGUN[1] + answer.json()["message"]["content"])
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = http.post("/v1/messages", json={**body, "max_tokens": 60, "output_config": config})
    check(BEGUN[1] + answer.json()["content"][0]["text"])
    messages[-1] = {"role": "assistant", "content": "Sure: "}
    for path, fields in (
        ("/api/chat", {"format": SCHEMA}),
        ("/v1/messages", {"output_config": config, "max_tokens": 9}),
    ):
        answer = http.post(path, json={**body, **fields})
        assert answer.status_code == 400
        assert "does not fit its grammar" in answer.text
