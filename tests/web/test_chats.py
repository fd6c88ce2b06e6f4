"""Chats on the page: nothing that was said is lost by an edit, a new chat, a deletion, another tab or full storage."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from scripted_api import ScriptedApi, held, words
from web.page_driver import ask, finished


@pytest.fixture
def echo(api: ScriptedApi) -> ScriptedApi:
    """A server whose answers name the last question and their own number."""
    api.script = lambda body: words(f"re {body['messages'][-1]['content']} #{len(api.requests)}")
    return api


def said(page: Any) -> list[str]:
    return list(page.locator(".message .body").all_inner_texts())


def wait_for(page: Any, texts: list[str]) -> None:
    """Until the page shows exactly these messages."""
    page.wait_for_function(
        "texts => JSON.stringify([...document.querySelectorAll('.message .body')].map(node => node.innerText))"
        " === JSON.stringify(texts)",
        arg=texts,
    )


def edit(page: Any, index: int, text: str) -> None:
    message = page.locator(".user").nth(index)
    message.hover()
    message.locator("[aria-label='Edit and ask again']").click()
    page.fill(".editor textarea", text)
    page.press(".editor textarea", "Enter")


def new_chat(page: Any) -> None:
    page.click("#new-chat")
    page.wait_for_selector("#welcome:not([hidden])")


def titles(page: Any) -> list[str]:
    return list(page.locator("#chat-list .chat-title").all_inner_texts())


def test_an_edit_keeps_what_was_said(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    for number, question in enumerate(("one", "two"), 1):
        ask(page, question)
        finished(page, number)
    first = ["one", "re one #1", "two", "re two #2"]
    edit(page, 0, "uno")
    second = ["uno", "re uno #3"]
    wait_for(page, second)
    assert [turn["content"] for turn in echo.requests[2]["messages"]] == ["uno"]
    page.reload()
    wait_for(page, second)
    page.click(".user [aria-label='Previous version']")
    wait_for(page, first)
    assert page.locator(".user .place").first.inner_text() == "1 / 2"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Previous version"
    page.keyboard.press("Enter")
    assert said(page) == first, "there is none before the first"
    page.locator(".assistant").nth(1).locator("[aria-label=Regenerate]").click()
    wait_for(page, ["one", "re one #1", "two", "re two #4"])
    page.locator(".assistant").nth(1).locator("[aria-label='Previous version']").click()
    wait_for(page, first)
    page.locator(".user").first.locator("[aria-label='Next version']").click()
    wait_for(page, second)


def test_an_edit_given_up_changes_nothing(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    page.fill("#prompt", "a draft")
    page.locator(".user").hover()
    page.click("[aria-label='Edit and ask again']")
    page.fill(".editor textarea", "other")
    page.press(".editor textarea", "Escape")
    assert page.locator(".editor").count() == 0
    assert page.evaluate("document.activeElement.title") == "Edit and ask again"
    assert said(page) == ["one", "re one #1"]
    page.reload()
    assert page.input_value("#prompt") == "a draft"
    assert len(echo.requests) == 1


def test_a_new_chat_keeps_the_old_one(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "old")
    finished(page)
    new_chat(page)
    ask(page, "new")
    wait_for(page, ["new", "re new #2"])
    assert [turn["content"] for turn in echo.requests[1]["messages"]] == ["new"]
    page.go_back()
    page.wait_for_selector("#welcome:not([hidden])")
    page.go_back()
    wait_for(page, ["old", "re old #1"])
    page.click("#open-chats")
    page.wait_for_selector("#chats[open]")
    assert titles(page) == ["new", "old"]
    assert page.locator("[aria-current]").inner_text().startswith("old")
    page.locator(".chat-open").first.click()
    wait_for(page, ["new", "re new #2"])
    assert not page.is_visible("#chats")


def test_an_answer_goes_on_behind_another_chat(echo: ScriptedApi, page: Any) -> None:
    rest = threading.Event()
    echo.script = lambda body: held("on and ", "so on", rest)
    page.goto(echo.url)
    ask(page, "long")
    page.wait_for_selector(".assistant .body:has-text('on and')")
    new_chat(page)
    assert page.is_visible("#send")
    rest.set()
    page.go_back()
    assert finished(page).locator(".body").inner_text() == "on and so on"
    assert "stopped" not in page.locator(".stats").inner_text()


def test_a_deletion_is_undone(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    page.click("#open-chats")
    page.click(".delete-chat")
    page.wait_for_selector("#undo-delete:focus")
    assert titles(page) == []
    assert "“one” was deleted" in page.inner_text("#chats-said")
    page.keyboard.press("Enter")
    wait_for(page, ["one", "re one #1"])
    page.wait_for_selector(".chat-open:focus")
    page.click(".delete-chat")
    page.wait_for_selector("#undo-delete:focus")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-chats"
    assert said(page) == []
    page.reload()
    page.click("#open-chats")
    page.click("#deleted summary")
    page.click("[aria-label='Restore “one”']")
    page.wait_for_selector(".chat-open")
    page.click(".chat-open")
    wait_for(page, ["one", "re one #1"])
    page.click("#open-chats")
    page.click(".delete-chat")
    page.click("[aria-label='Erase “one” for good']")
    page.wait_for_selector("#deleted", state="hidden")
    (left,), messages = stored(page)
    assert (set(left), messages) == ({"id", "erased"}, [])


def stored(page: Any) -> tuple[list[Any], list[Any]]:
    """Records of conversations and messages that the browser holds."""
    conversations, messages = page.evaluate(
        """() => new Promise((resolve, reject) => {
          const request = indexedDB.open('realizar');
          request.onerror = () => reject(request.error);
          request.onsuccess = () => {
            const get = name => new Promise(done => {
              const all = request.result.transaction(name).objectStore(name).getAll();
              all.onsuccess = () => done(all.result);
            });
            Promise.all([get('conversations'), get('messages')]).then(all => { request.result.close(); resolve(all); });
          };
        })"""
    )
    return conversations, messages


def test_rename(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    page.click("#open-chats")
    page.click(".rename-chat")
    page.fill(".rename input", "given up")
    page.press(".rename input", "Escape")
    page.wait_for_selector(".rename-chat:focus")
    assert titles(page) == ["one"]
    page.click(".rename-chat")
    page.fill(".rename input", "<b>tides</b>")
    page.press(".rename input", "Enter")
    page.wait_for_selector(".rename-chat:focus")
    page.keyboard.press("Escape")
    ask(page, "two")
    finished(page, 2)
    page.reload()
    page.click("#open-chats")
    page.wait_for_selector(".chat-open")
    assert titles(page) == ["<b>tides</b>"]


def test_two_tabs_that_speak_at_once(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "start")
    finished(page)
    other = page.context.new_page()
    other.goto(page.url)
    wait_for(other, ["start", "re start #1"])
    for tab in (page, other):  # neither hears of the other before it speaks itself
        tab.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    for tab, text in ((page, "left"), (other, "right")):
        ask(tab, text)
    for tab, text in ((page, "left"), (other, "right")):
        finished(tab, 2)
        assert said(tab)[:3] == ["start", "re start #1", text]
    for tab, mine, others in ((page, "left", "right"), (other, "right", "left")):
        tab.reload()
        tab.wait_for_selector(f".user:has-text('{mine}') .versions:has-text('/ 2')")
        tab.click(f".user:has-text('{mine}') .versions [aria-disabled=false]")
        assert said(tab)[2] == others
    assert sorted(message["content"] for message in stored(page)[1] if message["role"] == "user") == [
        "left",
        "right",
        "start",
    ]


def test_tabs_hear_of_each_other(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "start")
    finished(page)
    other = page.context.new_page()
    other.goto(page.url)
    wait_for(other, ["start", "re start #1"])
    ask(page, "more")
    wait_for(other, ["start", "re start #1", "more", "re more #2"])
    new_chat(page)
    ask(page, "elsewhere")
    finished(page)
    ask(other, "last")
    finished(other, 3)
    assert said(page) == ["elsewhere", "re elsewhere #3"]
    assert [turn["content"] for turn in echo.requests[3]["messages"]] == [
        "start",
        "re start #1",
        "more",
        "re more #2",
        "last",
    ]


def test_a_chat_deleted_in_another_tab(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    other = page.context.new_page()
    other.goto(echo.url)
    other.click("#open-chats")
    other.click(".delete-chat")
    page.wait_for_selector("#notices:has-text('deleted in another tab')")
    assert said(page) == ["one", "re one #1"], "it stays in sight"
    page.click("#notices .quiet")
    other.wait_for_selector(".delete-chat")
    other.click(".delete-chat")
    other.click("#deleted summary")
    other.click("[aria-label='Erase “one” for good']")
    other.wait_for_selector("#deleted", state="hidden")
    ask(page, "two")
    finished(page, 2)
    page.reload()
    wait_for(page, ["one", "re one #1", "two", "re two #2"])


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


def test_an_erased_chat_does_not_come_back_by_itself(echo: ScriptedApi, page: Any) -> None:
    """It stays erased even if another tab was still receiving its answer and then closes."""
    echo.script = lambda body: held("on and on")
    page.goto(echo.url)
    ask(page, "one")
    page.wait_for_selector(".assistant .body:has-text('on and on')")
    other = page.context.new_page()
    other.goto(echo.url)
    other.click("#open-chats")
    other.click(".delete-chat")
    page.wait_for_selector("#notices:has-text('deleted in another tab')")
    other.click("#deleted summary")
    other.click("[aria-label='Erase “one” for good']")
    other.wait_for_selector("#deleted", state="hidden")
    page.click("#stop")
    finished(page)
    page.reload()
    page.wait_for_selector("#notices:has-text('does not have that chat')")
    (left,), messages = stored(page)
    assert (set(left), messages) == ({"id", "erased"}, [])


def test_two_tabs_keep_each_others_settings(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    other = page.context.new_page()
    other.goto(echo.url)
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    other.wait_for_function("() => document.getElementById('system').value === 'Be brief.'")
    other.evaluate("document.getElementById('system').value = 'stale'")  # as if it had not heard of it
    other.click("#open-settings")
    other.fill("[data-setting=top_k]", "7")
    page.reload()
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("[data-setting=top_k]") == "7"


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
