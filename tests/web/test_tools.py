"""Tool calls on the page: shown, answered by hand, sent back as the API wants them."""

from __future__ import annotations

import json
from typing import Any

from scripted_api import Delta, Script, ScriptedApi, words
from web.page_driver import ask, finished, stored

TOOLS = [{"name": "weather", "parameters": {"type": "object"}}]
CALLS = [
    Delta({"content": "Let me look."}),
    Delta(
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}]}
    ),
    Delta({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
    Delta({"tool_calls": [{"index": 0, "function": {"arguments": '"<b>Oslo"}'}}]}),
    Delta({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "time", "arguments": "not json"}}]}),
]


def calling(api: ScriptedApi, page: Any) -> None:
    api.script = lambda body: (
        Script(CALLS, finish_reason="tool_calls") if len(api.requests) == 1 else words("It rains.")
    )
    page.goto(api.url)
    page.click("#open-settings")
    page.fill("#tools", "[{]")
    assert page.is_visible("#tools-error")
    page.fill("#tools", json.dumps(TOOLS))
    assert not page.is_visible("#tools-error")
    page.click("#settings .primary")
    ask(page, "Weather?")
    finished(page)


def test_calls_are_shown_and_answered(api: ScriptedApi, page: Any) -> None:
    calling(api, page)
    assert api.requests[0]["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert page.locator(".call summary").all_inner_texts() == ["Call of weather", "Call of time"]
    assert not page.is_visible(".call pre")
    page.click(".call summary")
    assert page.inner_text(".call pre") == '{\n  "city": "<b>Oslo"\n}'
    page.reload()
    page.wait_for_selector(".results")
    page.get_by_label("Result of weather").fill("rain")
    page.get_by_label("Result of time").fill("")
    page.click(".results .primary")
    assert finished(page, 2).locator(".body").inner_text() == "It rains."
    assert page.locator(".results").count() == 0
    made = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<b>Oslo"}'}},
        {"id": "b", "type": "function", "function": {"name": "time", "arguments": "not json"}},
    ]
    sent = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": made},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
    ]
    assert api.requests[1]["messages"] == sent
    page.reload()
    page.wait_for_selector(".from-tool summary:has-text('Result of weather')")
    ask(page, "And now?")
    finished(page, 3)
    assert api.requests[2]["messages"][:5] == [*sent, {"role": "assistant", "content": "It rains."}]
    assert [each["role"] for each in stored(page)[1]].count("tool") == 2


def test_calls_without_results_are_not_sent(api: ScriptedApi, page: Any) -> None:
    """Templates refuse calls that nothing answers."""
    calling(api, page)
    ask(page, "Never mind")
    finished(page, 2)
    assert api.requests[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me look."},
        {"role": "user", "content": "Never mind"},
    ]
