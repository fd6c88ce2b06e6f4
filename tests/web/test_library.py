"""All chats at once: searched, exported, imported; and what a hostile file comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripted_api import ScriptedApi, words
from web.page_driver import ask, edit, finished, new_chat, said, stored, titles, until, wait_for


def open_chats(page: Any) -> None:
    page.click("#open-chats")
    page.wait_for_selector(".chat-open")


def say(page: Any) -> str:
    return str(page.inner_text("#chats-said"))


def two_chats(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "about Tides and <b>moons</b>")
    finished(page)
    edit(page, 0, "about winds")
    finished(page)
    new_chat(page)
    ask(page, "cooking")
    finished(page)


def test_search(echo: ScriptedApi, page: Any) -> None:
    """A hit in a branch that is not shown opens that branch, at the message."""
    two_chats(echo, page)
    open_chats(page)
    page.fill("#search", "TIDES AND <B")
    page.wait_for_selector("#chats-said:has-text('1 chat has it.')")
    assert titles(page) == ["about Tides and <b>moons</b>"]
    assert page.inner_text(".chat-when") == "re about Tides and <b>moons</b> #1"
    page.click(".chat-open")
    wait_for(page, ["about Tides and <b>moons</b>", "re about Tides and <b>moons</b> #1"])
    open_chats(page)
    assert len(titles(page)) == 2
    page.fill("#search", "nothing like it")
    page.wait_for_selector("#chats-said:has-text('No chats have it.')")
    page.fill("#search", "")
    page.wait_for_function("() => document.querySelectorAll('.chat-open').length === 2")


def export(page: Any, selector: str, folder: Path) -> Path:
    with page.expect_download() as found:
        page.click(selector)
    path = folder / found.value.suggested_filename
    found.value.save_as(path)
    return path


def bring(page: Any, path: Path, expected: str) -> None:
    page.evaluate("document.getElementById('chats-said').textContent = ''")  # what was said before
    page.set_input_files("#import-file", path)
    page.wait_for_function("text => document.getElementById('chats-said').textContent.includes(text)", arg=expected)


def test_the_words_that_a_search_found_are_seen(echo: ScriptedApi, page: Any) -> None:
    """A narrow drawer cuts a line off at its end: the words are near its beginning."""
    echo.script = lambda body: words("sentence after sentence " * 10 + "a zebra " + "and more " * 20)
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(echo.url)
    ask(page, "Hi")
    finished(page)
    page.click("#open-chats")
    page.fill("#search", "zebra")
    page.wait_for_selector(".chat-when:has-text('zebra')")
    end = page.evaluate(
        "(() => { const node = document.querySelector('.chat-when').firstChild; const range = document.createRange();"
        " range.setStart(node, 0); range.setEnd(node, node.data.indexOf('zebra') + 5);"
        " return range.getBoundingClientRect().right - node.parentNode.getBoundingClientRect().right; })()"
    )
    assert end < 0


def test_export_and_import(echo: ScriptedApi, page: Any, browser: Any, tmp_path: Path) -> None:
    two_chats(echo, page)
    open_chats(page)
    one = export(page, "[aria-label='Export “cooking”']", tmp_path)
    assert one.name == "cooking.json"
    every = export(page, "#export-chats", tmp_path)
    assert every.name.startswith("chats-20")
    bring(page, every, "0 chats were imported. 2 chats were here already.")
    context = browser.new_context()
    other = context.new_page()
    other.goto(echo.url)
    other.click("#open-chats")
    bring(other, one, "1 chat was imported.")
    bring(other, every, "1 chat was imported. 1 chat was here already.")
    other.wait_for_function("() => document.querySelectorAll('#chat-list .chat-open').length === 2")
    assert sorted(titles(other)) == ["about Tides and <b>moons</b>", "cooking"]
    assert sorted(each["content"] for each in stored(other)[1]) == sorted(each["content"] for each in stored(page)[1])
    other.click(".chat-open:has-text('Tides')")
    wait_for(other, ["about winds", "re about winds #2"])
    other.click(".user [aria-label='Previous version']")
    assert said(other)[0] == "about Tides and <b>moons</b>"
    context.close()


def test_what_is_deleted_is_imported_again(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    """Beside what was deleted, and beside what went on since: an import overwrites nothing."""
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    open_chats(page)
    path = export(page, "#export-chats", tmp_path)
    page.click(".delete-chat")
    page.wait_for_selector("#undo-delete:focus")
    bring(page, path, "1 chat was imported.")
    page.click("#deleted summary")
    page.click("[aria-label='Restore “one”']")
    page.wait_for_function("() => document.querySelectorAll('#chat-list .chat-open').length === 2")
    changed = path.read_text().replace("re one #1", "forged")
    (tmp_path / "forged.json").write_text(changed)
    bring(page, tmp_path / "forged.json", "1 chat was imported.")
    contents = sorted(each["content"] for each in stored(page)[1])
    assert contents == ["forged", "one", "one", "one", "re one #1", "re one #1"]


MESSAGE = {"id": "m", "parent": None, "role": "user", "content": "hello", "created": 1}
CHAT = {"id": "c", "title": "t", "updated": 1, "leaf": "m", "messages": [MESSAGE]}
FILE = {"format": "realizar chats", "version": 1, "chats": [CHAT]}
REFUSED = (
    ("not json", "is not JSON."),
    ("null", "is not an export of this page."),
    ("[]", "is not an export of this page."),
    (json.dumps({**FILE, "chats": {}}), "is not an export of this page."),
    (json.dumps({**FILE, "version": 2}), "newer version"),
    (json.dumps({**FILE, "chats": [None]}), "Chat 1 of “bad.json” is not one"),
    (json.dumps({**FILE, "chats": [CHAT, {**CHAT, "title": {"a": 1}}]}), "Chat 2 of “bad.json” is not one"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": {"length": 1}}]}), "Chat 1 of “bad.json” is not one"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": [MESSAGE, MESSAGE]}]}), "Message 2 of chat “t” is not one"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": [{**MESSAGE, "role": "system"}]}]}), "Message 1 of chat “t”"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": [{**MESSAGE, "created": "1"}]}]}), "Message 1 of chat “t”"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": [MESSAGE] * 100_000}]}), "more than 50,000 messages"),
    (json.dumps({**FILE, "chats": [{**CHAT, "messages": {"length": "x"}}]}), "more than 50,000 messages"),
    (json.dumps({**FILE, "chats": [CHAT] * 10_001}), "more than 50,000 messages in 10,000 chats"),
    ("[" * 100_000, "is not JSON."),
    (" " * ((64 << 20) + 1), "is larger than 64 MiB"),
)


def test_hostile_files_are_refused_with_a_sentence(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    page.goto(echo.url)
    page.click("#open-chats")
    path = tmp_path / "bad.json"
    for text, reason in REFUSED:
        path.write_text(text)
        page.evaluate("document.getElementById('chats-said').textContent = ''")
        bring(page, path, reason)
    assert stored(page) == ([], []), "none is taken in part"


def test_a_file_holds_no_markup_and_changes_no_object(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    """Keys that mean something to JavaScript mean nothing here, and unknown ones are not kept."""
    text = json.dumps(
        {
            **FILE,
            "chats": [
                {
                    **CHAT,
                    "id": "__proto__",
                    "title": "<img src=x onerror=window.hit=1>",
                    "messages": [
                        {**MESSAGE, "id": "constructor", "content": "<script>window.hit=1</script>", "evil": 1},
                        {**MESSAGE, "id": "b", "parent": "b", "role": "assistant", "content": "![x](javascript:hit=1)"},
                        {**MESSAGE, "id": "d", "parent": {"a": 1}, "error": {"toString": 1}, "open": True},
                    ],
                }
            ],
        }
    ).replace('"evil": 1', '"__proto__": {"polluted": 1}, "constructor": {"prototype": {"polluted": 1}}')
    (tmp_path / "odd.json").write_text(text)
    page.goto(echo.url)
    page.click("#open-chats")
    bring(page, tmp_path / "odd.json", "1 chat was imported.")
    page.click(".chat-open")
    page.wait_for_selector(".message")
    assert page.evaluate("[window.hit, {}.polluted, [].polluted]") == [None, None, None]
    assert page.locator("#log script, #log img, #chat-list img").count() == 0
    fields = {key for message in stored(page)[1] for key in message}
    assert fields == {"id", "conversation", "parent", "role", "content", "created"}


def test_a_large_file_is_taken_in(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    chats = [
        {**CHAT, "id": f"c{i}", "messages": [{**MESSAGE, "id": f"m{i}-{j}", "created": j} for j in range(20)]}
        for i in range(250)
    ]
    (tmp_path / "large.json").write_text(json.dumps({**FILE, "chats": chats}))
    page.goto(echo.url)
    page.click("#open-chats")
    bring(page, tmp_path / "large.json", "250 chats were imported.")
    assert [len(each) for each in stored(page)] == [250, 5000]


@pytest.mark.parametrize("what", ["erase", "settings"])
def test_what_is_taken_away_comes_back(echo: ScriptedApi, page: Any, what: str) -> None:
    page.goto(echo.url)
    if what == "settings":
        page.click("#open-settings")
        page.fill("#system", "Be brief.")
        page.click("#reset-settings")
        assert page.input_value("#system") == ""
        page.click("#reset-settings:has-text('Undo reset')")
        assert page.input_value("#system") == "Be brief."
        page.click("#settings .primary")
        ask(page, "Hi")
        finished(page)
        assert echo.requests[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        return
    ask(page, "one")
    finished(page)
    open_chats(page)
    page.click(".delete-chat")
    page.click("#deleted summary")
    page.click("[aria-label='Erase “one” for good']")
    page.wait_for_selector("#chats-said:has-text('“one” was erased.')")
    page.keyboard.press("Enter")
    page.click("[aria-label='Restore “one”']")
    until(lambda: titles(page) == ["one"])
    page.click(".chat-open")
    wait_for(page, ["one", "re one #1"])


def test_a_long_chat_is_shown_from_its_end(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    """Only its last messages have elements; earlier ones come on demand, and where one of them was searched for."""
    roles = ("user", "assistant")
    messages = [
        {"id": f"m{i}", "parent": f"m{i - 1}", "role": roles[i % 2], "content": f"text {i}.", "created": i}
        for i in range(2000)
    ]
    (tmp_path / "long.json").write_text(
        json.dumps({**FILE, "chats": [{**CHAT, "messages": messages, "leaf": "m1999"}]})
    )
    page.goto(echo.url)
    page.click("#open-chats")
    bring(page, tmp_path / "long.json", "1 chat was imported.")
    page.click(".chat-open")
    page.wait_for_selector(".message")
    assert said(page) == [f"text {i}." for i in range(1900, 2000)]
    page.click("#earlier:has-text('Show earlier messages (1,900)')")
    assert len(said(page)) == 200
    assert page.evaluate("scroller.scrollTop") > 0, "the reader stays where they were"
    open_chats(page)
    page.fill("#search", "text 1234.")
    page.wait_for_selector("#chats-said:has-text('1 chat has it.')")
    page.click(".chat-open")
    page.wait_for_selector(".message:has-text('text 1234.')")
    assert page.locator(".message:has-text('text 1234.')").evaluate(
        "node => { const box = node.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    )
    ask(page, "more")
    page.wait_for_selector(".message:last-child .body:has-text('re more #1')")
    assert len(echo.requests[0]["messages"]) == 2001
