"""Requests as Codex sends them (tests/data/clients/codex_turns.json, in words of our own): a call, then its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.responses.test_response_answers import TEMPLATE, events_of, post
from server.scripted_engine import ScriptedEngine

TURNS = json.loads((Path(__file__).parents[2] / "data" / "clients" / "codex_turns.json").read_text(encoding="utf-8"))


def as_sent_back(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as Codex sends it with the next request: reasoning without its status."""
    if item["type"] != "reasoning":
        return item
    return {"type": "reasoning", "id": item["id"], "summary": item["summary"], "content": None} | {
        "encrypted_content": item["encrypted_content"]
    }


def test_a_conversation_with_a_call_extends_its_prompt() -> None:
    first, later = TURNS
    call = json.dumps(later["call"])
    engine = ScriptedEngine(
        deltas=("I should", " read it.</think>", "Reading.\n", f"<tool_call>\n{call}\n</tool_call>")
    )
    response = post(engine, first)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    assert events[-1]["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert done[0]["summary"] == [{"type": "summary_text", "text": "I should read it."}]
    assert json.loads(done[2]["arguments"]) == later["call"]["arguments"]
    output = {**later["output"], "call_id": done[2]["call_id"]}
    post(engine, {**first, "input": [*first["input"], *map(as_sent_back, done), output]})
    before, after = (bytes(asked[0]).decode() for asked in engine.asked)
    assert "multi_agent_v1__close_agent" in before
    assert "web_search" not in before
    common = before.removesuffix("<think>")
    assert TEMPLATE.endswith("<think>{% endif %}")
    assert after.startswith(common)
    calls = [{"id": output["call_id"], "type": "function", "function": later["call"]}]
    assert after[len(common) :] == (
        f"assistant:Reading.[I should read it.]{json.dumps(calls)}|tool:{output['output']}|<think>"
    )
