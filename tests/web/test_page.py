"""The chat page in Chromium over a scripted server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import realizar.server.web
from realizar.server.web import web_routes
from scripted_api import Piece, Script, ScriptedApi, words

FOLDER = Path(realizar.server.web.__file__).parent


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Any, count: int = 1) -> Any:
    """The last of so many answers, once it is whole."""
    page.wait_for_function(
        "count => { const all = [...document.querySelectorAll('.assistant')];"
        " return all.length === count && all.every(node => node.getAttribute('aria-busy') === 'false'); }",
        arg=count,
    )
    return page.locator(".assistant").last


def test_files_are_served_safely(api: ScriptedApi) -> None:
    types = {"/": "text/html", "/static/app.js": "text/javascript", "/static/style.css": "text/css"}
    types |= {"/static/icon.svg": "image/svg+xml", "/static/theme.js": "text/javascript"}
    with httpx.Client(base_url=api.url) as client:
        for path, kind in types.items():
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in str(policy)
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for path in ("../__init__.py", "__init__.py", "%2e%2e/app.py", "..%2fapp.py", "nothing.js", "", "/etc/passwd"):
            assert client.get(f"/static/{path}").status_code == 404
        assert client.post("/").status_code == 405


def test_every_route_is_one_path() -> None:
    """The server leaves these paths open to everyone, so none may hold a pattern."""
    paths = [route.path for route in web_routes()]
    assert "/" in paths
    assert [path for path in paths if not re.fullmatch(r"/|/static/[a-z]+\.[a-z]+", path)] == []


def test_nothing_is_remote_and_no_markup_is_made_of_text() -> None:
    for path in FOLDER.iterdir():
        if path.suffix in (".js", ".css", ".html", ".svg"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text.replace(r"https?:\/\/", ""), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=", text), path


def test_a_chat_streams(api: ScriptedApi, page: Any) -> None:
    api.script = lambda body: words("The tide **rises** twice.", wait_s=0.08)
    elsewhere: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(api.url) else elsewhere.append(request.url))
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    ask(page, "Why?")
    page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.startsWith('The ti')")
    assert page.locator(".assistant .body").inner_text() != "The tide rises twice.", "it is seen while it comes"
    assert page.is_visible("#stop")
    assert not page.is_visible("#send")
    answer = finished(page)
    assert answer.locator(".body").inner_text() == "The tide rises twice."
    assert answer.locator("strong").inner_text() == "rises"
    stats = answer.locator(".stats").inner_text()
    found = re.fullmatch(r"([0-9.]+) tok/s · 7 tokens · first after [0-9.]+ s", stats)
    assert found, stats
    assert 5 < float(found.group(1)) < 12.6, "a piece every 80 ms, or later on a busy machine"
    (body,) = api.requests
    assert body["model"] == "scripted-1b"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert body["stream"] is True
    ask(page, "And then?")
    finished(page, 2)
    assert [m["role"] for m in api.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert api.requests[1]["messages"][1]["content"] == "The tide **rises** twice."
    assert elsewhere == []


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(api: ScriptedApi, page: Any, how: str) -> None:
    api.script = lambda body: words("on and " * 500, wait_s=0.02)
    page.goto(api.url)
    ask(page, "Go")
    page.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 12")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    answer = finished(page)
    until(lambda: api.left == 1)
    text = answer.locator(".body").inner_text()
    assert text.startswith("on and on")
    assert "stopped" in answer.locator(".stats").inner_text()
    assert page.is_visible("#send")
    page.wait_for_timeout(100)
    assert answer.locator(".body").inner_text() == text, "nothing comes after the stop"


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
    assert page.locator(".message").count() == 0
    assert page.input_value("#prompt") == "first"
    page.press("#prompt", "Shift+Enter")
    page.type("#prompt", "line")
    page.press("#prompt", "Enter")
    finished(page)
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


def test_a_reload_keeps_the_conversation(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    ask(page, "Hi")
    finished(page)
    page.reload()
    assert page.locator(".message").count() == 2
    assert page.locator(".assistant .body").inner_text() == "Hello"
    assert not page.is_visible("#welcome")
    page.click("#new-chat")
    assert page.is_visible("#welcome")
    page.reload()
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
    (Script([Piece({"content": "half"})], error="the engine died"), "the engine died", "half"),
    (Script([Piece({"content": "half"})], whole=False), "The connection broke", "half"),
    (Script([Piece({"content": "long"})], finish_reason="length"), "reached its limit", "long"),
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
    thought = [Piece({"role": "assistant", "content": ""}), Piece({"reasoning_content": "Let me *see*."})]
    api.script = lambda body: Script([*thought, *words("Done.").pieces])
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


def test_themes(api: ScriptedApi, browser: Any) -> None:
    for scheme, first, second in (("light", 251, 21), ("dark", 21, 251)):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(api.url)
        red = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
        assert page.evaluate(red) == first
        page.click("#theme")
        assert page.evaluate(red) == second
        page.reload()
        assert page.evaluate(red) == second, "the choice is kept"
        context.close()


def test_fits_a_phone(api: ScriptedApi, browser: Any) -> None:
    wide = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300 + "\n\n| a | b |\n|---|---|\n| " + "z" * 90 + " | c d |"
    api.script = lambda body: words(wide)
    context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(api.url)
    page.fill("#prompt", "w" * 200)
    page.tap("#send")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth <= 360 && scroller.scrollWidth <= 360")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.tool, .send')].filter(n => n.offsetWidth).map(n => n.offsetWidth)"
    )
    assert min(sizes) >= 38, "large enough for a finger"
    page.tap("#open-settings")
    assert page.evaluate("settings.getBoundingClientRect().right <= 360 && settings.scrollWidth <= 360")
    context.close()


def test_by_keyboard_alone(api: ScriptedApi, page: Any) -> None:
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    finished(page)
    reached = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
        outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        assert page.evaluate(f"['prompt', ''].includes(document.activeElement.id) || {outlined}")
    assert {"new-chat", "theme", "open-settings", "prompt", "send", "Copy", "Regenerate"} <= reached
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert page.is_visible("#settings")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings", "focus comes back"


def test_copy(api: ScriptedApi, browser: Any) -> None:
    api.script = lambda body: words("Look:\n```py\na = 1\n\nb\n```")
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(api.url)
    ask(page, "Hi")
    answer = finished(page)
    answer.locator(".copy-code").click()
    page.wait_for_selector(".copy-code:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == "a = 1\n\nb"
    answer.locator("[aria-label=Copy]").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()") == "Look:\n```py\na = 1\n\nb\n```")
    context.close()


def test_scrolling_up_is_respected(api: ScriptedApi, page: Any) -> None:
    api.script = lambda body: words("a line\n\n" * 80, wait_s=0.01)
    page.goto(api.url)
    ask(page, "Hi")
    page.wait_for_function("() => scroller.scrollTop > 300")
    page.evaluate("scroller.scrollTop = 0")
    page.wait_for_timeout(300)
    assert page.evaluate("scroller.scrollTop") == 0
    page.click("#to-end")
    finished(page)
    assert page.evaluate("scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight") < 2
