"""Requests as Claude Code sends them (tests/data/clients/claude_code_turns.json, in words of our own)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from server.anthropic.test_message_answers import TEMPLATE, events_of, post
from server.scripted_engine import ScriptedEngine

FOLDER = Path(__file__).parents[2] / "data" / "clients"
TURNS = json.loads((FOLDER / "claude_code_turns.json").read_text(encoding="utf-8"))
PATH = "/v1/messages?beta=true"


def test_a_conversation_with_a_call_extends_its_prompt_though_its_header_changes() -> None:
    first, later = TURNS
    call = json.dumps(later["call"])
    engine = ScriptedEngine(deltas=("I should read it.</think>", "Reading.\n", f"<tool_call>\n{call}\n</tool_call>"))
    response = post(engine, first, PATH)
    assert response.status_code == 200, response.text
    events = events_of(response.text)
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    assert json.loads(arguments) == later["call"]["arguments"]

    second = copy.deepcopy(first)
    second["system"][0]["text"] = later["header"]
    del second["messages"][0]["content"][1]["cache_control"]  # the mark moves to the last message
    used = {"type": "tool_use", "id": blocks[2]["id"], "name": "Read", "input": later["call"]["arguments"]}
    signature = next(delta["signature"] for delta in deltas if delta["type"] == "signature_delta")
    thought = {"type": "thinking", "thinking": "I should read it.", "signature": signature}
    second["messages"] += [
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Reading."}, used]},
        {"role": "user", "content": [{**later["result"], "tool_use_id": used["id"]}]},
    ]
    response = post(engine, second, PATH)
    assert response.status_code == 200, response.text
    before, after = (bytes(asked[0]).decode() for asked in engine.asked)
    assert TEMPLATE.endswith("<think>{% endif %}")
    assert after.startswith(before.removesuffix("<think>"))
    assert "cc_version" not in before + after
    assert after.endswith(f"|tool:{later['result']['content']}|<think>")
