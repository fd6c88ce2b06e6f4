"""The browser's storage may be full, closed, broken or from an earlier version: no chat is lost by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripted_api import ScriptedApi
from web.page_driver import ask, finished, new_chat, said, titles, wait_for

EARLIER = [
    {"role": "user", "content": "<b>before</b>"},
    {"role": "assistant", "content": "yes", "stats": "2 tokens", "reasoning": "hm"},
]


def with_earlier(page: Any, url: str, text: str) -> None:
    """A browser in which an earlier version of the page kept a text as its conversation."""
    page.goto(f"{url}/static/icon.svg")
    page.evaluate("text => localStorage.setItem('realizar.conversation', text)", text)
    page.goto(url)


def test_an_earlier_conversation_is_taken_over(echo: ScriptedApi, page: Any) -> None:
    with_earlier(page, echo.url, json.dumps(EARLIER))
    wait_for(page, ["<b>before</b>", "yes"])
    assert page.evaluate("localStorage.getItem('realizar.conversation')") is None
    ask(page, "after")
    finished(page, 2)
    page.reload()
    wait_for(page, ["<b>before</b>", "yes", "after", "re after #1"])
    assert [turn["content"] for turn in echo.requests[0]["messages"]] == ["<b>before</b>", "yes", "after"]
    page.click("#open-chats")
    page.wait_for_selector(".chat-open")
    assert titles(page) == ["<b>before</b>"]


UNREADABLE = [
    ('[{"role": "user", "cont', ['[{"role": "user", "cont']),
    ('{"not": "a list"}', ['{"not": "a list"}']),
    (json.dumps([EARLIER[0], 7, {"role": "assistant"}]), ["<b>before</b>", "7", '{"role":"assistant"}']),
    ("[]", []),
    ("", []),
]


def test_what_cannot_be_read_is_kept_as_it_is(echo: ScriptedApi, page: Any) -> None:
    with_earlier(page, echo.url, UNREADABLE[0][0])
    wait_for(page, UNREADABLE[0][1])
    found = page.evaluate(
        """async texts => { const { convert } = await import('/static/earlier.js');
        return texts.map(text => convert(text)?.messages.map(each => each.content) ?? []); }""",
        [text for text, _ in UNREADABLE],
    )
    assert found == [shown for _, shown in UNREADABLE]


FULL = """IDBObjectStore.prototype.put = function () {
  this.transaction.abort();
  throw new DOMException('no room', 'QuotaExceededError');
}"""
CLOSED = "indexedDB.open = () => { throw new DOMException('not here', 'SecurityError'); }"
BROKEN = """const store = IDBObjectStore.prototype.put;
IDBObjectStore.prototype.put = function (value) {
  return window.full ? this.transaction.objectStore('none') : store.call(this, value);
}"""


@pytest.mark.parametrize(("fault", "notice"), [(FULL, "is full"), (CLOSED, "not here")])
def test_without_storage_the_page_says_so(echo: ScriptedApi, page: Any, fault: str, notice: str) -> None:
    page.add_init_script(fault)
    with_earlier(page, echo.url, json.dumps(EARLIER))
    wait_for(page, ["<b>before</b>", "yes"])
    page.wait_for_selector(f"#notices:has-text('{notice}')")
    ask(page, "after")
    finished(page, 2)
    assert said(page)[2:] == ["after", "re after #1"]
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    new_chat(page)
    ask(page, "else")
    finished(page)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.click("#open-chats")
    page.wait_for_selector("#chats[open]")
    assert "deleted" not in page.inner_text("#notices")
    assert json.loads(page.evaluate("localStorage.getItem('realizar.conversation')")) == EARLIER, "it is not lost"


def test_what_failed_is_written_later(echo: ScriptedApi, page: Any) -> None:
    page.add_init_script(BROKEN)
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    page.evaluate("window.full = true")
    ask(page, "two")
    finished(page, 2)
    page.wait_for_selector("#notices:has-text('keeps nothing')")
    page.evaluate("window.full = false")
    ask(page, "three")
    finished(page, 3)
    page.wait_for_selector("#notices:empty", state="attached")
    whole = said(page)
    page.reload()
    wait_for(page, whole)
    assert whole == ["one", "re one #1", "two", "re two #2", "three", "re three #3"]


def test_stored_nonsense_does_not_break_the_page(echo: ScriptedApi, page: Any) -> None:
    """Records that go in circles, miss their parents, or are no messages."""
    page.goto(echo.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    page.evaluate(
        """() => new Promise(done => { const request = indexedDB.open('realizar'); request.onsuccess = () => {
          const t = request.result.transaction(['conversations', 'messages'], 'readwrite');
          const [chats, messages] = [t.objectStore('conversations'), t.objectStore('messages')];
          chats.put({ id: 'c', title: '<img src=x onerror=window.hit=1>', updated: 1, leaf: 'gone' });
          chats.put({ id: 7 });
          chats.put({ id: 'd' });
          const put = (id, fields) => messages.put({ id, conversation: 'c', role: 'user', content: id, ...fields });
          put('a', { parent: 'b', created: 1 });
          put('b', { parent: 'a', created: 1 });
          put('own', { parent: 'own', created: 2 });
          put('lost', { parent: 'nowhere', created: 3 });
          put('bad', { parent: null, created: 4, role: 'system' });
          put('worse', { parent: null, created: 5, content: { toString: 1 } });
          t.oncomplete = () => { request.result.close(); done(); };
        }; })"""
    )
    page.goto(f"{echo.url}/#c")
    wait_for(page, ["lost"])
    page.wait_for_selector("#notices:has-text('messages of this chat (2)')")
    assert page.locator(".place").inner_text() == "4 / 4"
    page.click("#open-chats")
    page.wait_for_selector(".chat-open")
    assert titles(page) == ["<img src=x onerror=window.hit=1>"]
    assert page.evaluate("window.hit") is None
    page.keyboard.press("Escape")
    ask(page, "on")
    finished(page)
    page.goto(f"{echo.url}/#nobody")
    page.wait_for_selector("#notices:has-text('does not have that chat')")


def test_a_browser_that_never_answers_does_not_stop_the_chat(echo: ScriptedApi, page: Any) -> None:
    page.add_init_script(
        "indexedDB.open = () => ({}); const wait = setTimeout;"
        "window.setTimeout = (run, ms) => wait(run, ms === 10000 ? 0 : ms);"
    )
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    assert said(page) == ["one", "re one #1"]
    page.wait_for_selector("#notices:has-text('does not answer')")
