"""The chat page in Chromium over a scripted server."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from scripted_api import Delta, Script, ScriptedApi, held, words
from web.page_driver import ask, finished, until

RECORD_CLOCK = """
window.moments = [];
const now = performance.now.bind(performance);
performance.now = () => { moments.push(now()); return moments.at(-1); };
"""
SPEED_TEXT = """() => {
  const [start, first, last] = [moments[0], moments[1], moments[7]];
  const [speed, wait] = [(6000 / (last - first)).toFixed(1), ((first - start) / 1000).toFixed(2)];
  return `${speed} tok/s · 7 tokens · first after ${wait} s`;
}"""


def test_a_chat_streams(api: ScriptedApi, page: Any) -> None:
    """The speed is that of the deltas' arrivals, as the page's clock had them: they come unevenly to a busy machine."""
    page.add_init_script(RECORD_CLOCK)
    rest = threading.Event()
    api.script = lambda body: held("The tide **r", "ises** twice.", rest)
    elsewhere: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(api.url) else elsewhere.append(request.url))
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    ask(page, "Why?")
    page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.startsWith('The ti')")
    assert page.locator(".assistant .body").inner_text() != "The tide rises twice.", "it is seen while it comes"
    assert page.is_visible("#stop")
    assert not page.is_visible("#send")
    rest.set()
    answer = finished(page)
    assert answer.locator(".body").inner_text() == "The tide rises twice."
    assert answer.locator("strong").inner_text() == "rises"
    stats = answer.locator(".stats").inner_text()
    assert page.evaluate("moments.length") == 8, "the question, and seven deltas"
    assert stats == page.evaluate(SPEED_TEXT)
    (body,) = api.requests
    assert body["model"] == "scripted-1b"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert body["stream"] is True
    api.script = lambda body: replace(words("It falls."), drafts=(9, 5))
    ask(page, "And then?")
    finished(page, 2)
    assert page.locator(".stats").nth(1).inner_text().endswith(" s · 5 of 9 drafts right")
    assert [m["role"] for m in api.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert api.requests[1]["messages"][1]["content"] == "The tide **rises** twice."
    assert elsewhere == []


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(api: ScriptedApi, page: Any, how: str) -> None:
    api.script = lambda body: held("on and on")
    page.goto(api.url)
    ask(page, "Go")
    page.wait_for_selector(".assistant .body:has-text('on and on')")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    answer = finished(page)
    until(lambda: api.left == 1)
    text = answer.locator(".body").inner_text()
    assert text == "on and on"
    assert "stopped" in answer.locator(".stats").inner_text()
    assert page.is_visible("#send")


def test_regenerate_and_edit(api: ScriptedApi, page: Any) -> None:
    api.script = lambda body: words(f"answer {len(api.requests)}")
    page.goto(api.url)
    ask(page, "first")
    finished(page).hover()
    page.click("[aria-label=Regenerate]")
    page.wait_for_selector(".assistant:has-text('answer 2')")
    assert finished(page).locator(".body").inner_text() == "answer 2"
    assert api.requests[1] == api.requests[0]
    page.locator(".user").hover()
    page.click("[aria-label='Edit and ask again']")
    assert page.input_value(".editor textarea") == "first"
    page.press(".editor textarea", "End")
    page.press(".editor textarea", "Shift+Enter")
    page.type(".editor textarea", "line")
    page.press(".editor textarea", "Enter")
    page.wait_for_selector(".assistant:has-text('answer 3')")
    assert api.requests[2]["messages"] == [{"role": "user", "content": "first\nline"}]


def test_settings_are_sent_and_kept(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    for name, value in {"temperature": "0.3", "top_k": "40", "max_tokens": "12", "seed": "7", "top_p": "9"}.items():
        page.fill(f"[data-setting={name}]", value)
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    page.reload()
    ask(page, "Hi")
    finished(page)
    (body,) = api.requests
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = {
        name: value for name, value in body.items() if name not in ("messages", "model", "stream", "stream_options")
    }
    assert sent == {"temperature": 0.3, "top_k": 40, "max_tokens": 12, "seed": 7}, "a value out of range is not sent"
    page.click("#open-settings")
    page.click("#reset-settings")
    page.click("#settings .primary")
    ask(page, "Again")
    finished(page, 2)
    assert api.requests[1]["messages"][0]["role"] == "user"
    assert "temperature" not in api.requests[1]


def test_the_sampling_of_the_server_is_shown(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    page.click("#open-settings")
    shown = "name => document.querySelector(`[data-setting=${name}]`).placeholder"
    names = ("temperature", "top_k", "min_p", "top_p", "max_tokens")
    assert [page.evaluate(shown, name) for name in names] == ["0.7", "0", "0.05", "default", "no limit"]
    assert "server’s values, shown in grey" in page.inner_text("#settings")


def test_a_reload_keeps_the_conversation(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    ask(page, "Hi")
    finished(page)
    page.reload()
    page.wait_for_selector(".assistant")
    assert page.locator(".message").count() == 2
    assert page.locator(".assistant .body").inner_text() == "Hello"
    assert not page.is_visible("#welcome")
    page.click("#new-chat")
    page.wait_for_selector("#welcome:not([hidden])")
    page.reload()
    assert page.is_visible("#welcome")
    assert page.locator(".message").count() == 0


def test_the_key_is_asked_for(api: ScriptedApi, page: Any) -> None:
    api.key = "s3cret"
    page.goto(api.url)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-error:not([hidden])")
    page.fill("#key", "s3cret")
    page.click("#key-dialog .primary")
    page.wait_for_selector("#model:has-text('scripted-1b')")
    ask(page, "Hi")
    assert finished(page).locator(".body").inner_text() == "Hello"
    assert "s3cret" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert not page.is_visible("#key-dialog"), "the tab remembers it"


def test_a_key_refused_later_is_asked_for_again(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    api.key = "new"
    ask(page, "Hi")
    page.fill("#key", "new")
    page.press("#key", "Enter")
    assert finished(page).locator(".body").inner_text() == "Hello"
    api.key = "newer"
    ask(page, "Hi")
    page.click("#key-cancel")
    assert "a key is needed" in finished(page, 2).locator(".notice").inner_text()


FAILURES = (
    (Script(status=429, error="The queue is full."), "The queue is full. Try again in 3 s.", ""),
    (Script(status=400, error="too long"), "too long", ""),
    (Script([Delta({"content": "half"})], error="the engine died"), "the engine died", "half"),
    (Script([Delta({"content": "half"})], whole=False), "The connection broke", "half"),
    (Script([Delta({"content": "long"})], finish_reason="length"), "reached its limit", "long"),
)


def test_errors_are_shown(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    for script, notice, text in FAILURES:
        page.click("#new-chat")
        api.script = lambda body, script=script: script
        ask(page, "Hi")
        answer = finished(page)
        assert notice in answer.locator(".notice").inner_text()
        assert answer.locator(".body").inner_text() == text
    api.script = lambda body: words("better")
    page.click("[aria-label=Regenerate]")
    page.wait_for_selector(".assistant:has-text('better')")
    assert not finished(page).locator(".notice").is_visible()


def test_a_server_that_is_gone(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hi")
    assert "can’t be reached" in finished(page).locator(".notice").inner_text()


def test_reasoning_is_folded_away(api: ScriptedApi, page: Any) -> None:
    thought = [Delta({"role": "assistant", "content": ""}), Delta({"reasoning_content": "Let me *see*."})]
    api.script = lambda body: Script([*thought, *words("Done.").deltas])
    page.goto(api.url)
    ask(page, "Hi")
    answer = finished(page)
    assert answer.locator(".body").inner_text() == "Done."
    assert not answer.locator(".thought-text").is_visible()
    answer.locator("summary").click()
    assert answer.locator(".thought-text").inner_text() == "Let me see."
    ask(page, "More")
    finished(page, 2)
    assert api.requests[1]["messages"][1] == {"role": "assistant", "content": "Done."}


def test_a_reload_keeps_what_came_of_an_answer(api: ScriptedApi, page: Any) -> None:
    api.script = lambda body: held("on and on")
    page.goto(api.url)
    ask(page, "Go")
    page.wait_for_selector(".assistant .body:has-text('on and on')")
    page.reload()
    assert page.locator(".user .body").inner_text() == "Go"
    answer = finished(page)
    assert answer.locator(".body").inner_text() == "on and on"
    assert "stopped" in answer.locator(".stats").inner_text()
    assert page.evaluate("Object.keys(localStorage)") == [], "what was left there is taken in"


CUT_SHORT = (
    Script([Delta({"content": "half"})], finish_reason="length"),
    Script([Delta({"content": "half"})], error="the engine died"),
)
UNSAID = (Script(status=400, error="too long"), Script(whole=False))


def roles_after(api: ScriptedApi, page: Any, script: Script) -> list[tuple[str, str]]:
    """The turns that a second question brings, after a first one was answered by a script."""
    page.goto(api.url)
    page.click("#new-chat")
    api.script = lambda body: script
    ask(page, "first")
    finished(page)
    api.script = lambda body: words("better")
    ask(page, "second")
    finished(page, 2)
    return [(turn["role"], turn["content"]) for turn in api.requests[-1]["messages"]]


@pytest.mark.parametrize("script", CUT_SHORT)
def test_what_was_said_is_remembered(api: ScriptedApi, page: Any, script: Script) -> None:
    assert roles_after(api, page, script) == [("user", "first"), ("assistant", "half"), ("user", "second")]


@pytest.mark.parametrize("script", UNSAID)
def test_a_question_without_an_answer_is_taken_back(api: ScriptedApi, page: Any, script: Script) -> None:
    """Templates that want roles to alternate would refuse all that follows."""
    assert roles_after(api, page, script) == [("user", "second")]


def test_settings_close_over_a_wrong_value(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.click("#open-settings")
    page.fill("[data-setting=temperature]", "9")
    page.press("[data-setting=temperature]", "Enter")
    assert page.is_visible("#settings"), "the browser says what is wrong"
    page.click("#settings [aria-label=Close]")
    assert not page.is_visible("#settings")
