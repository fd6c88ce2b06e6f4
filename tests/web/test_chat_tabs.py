"""Two tabs of the page keep one set of chats and settings, and lose nothing of each other's."""

from __future__ import annotations

import contextlib
from typing import Any

from scripted_api import ScriptedApi, held, words
from web.page_driver import ask, finished, new_chat, said, stored, wait_for


def second_tab(page: Any, url: str) -> Any:
    other = page.context.new_page()
    other.goto(url)
    return other


def two_tabs_of_a_chat(echo: ScriptedApi, page: Any) -> Any:
    """The other tab of a chat that `page` began with `start`."""
    page.goto(echo.url)
    ask(page, "start")
    finished(page)
    other = second_tab(page, page.url)
    wait_for(other, ["start", "re start #1"])
    return other


def erase(tab: Any, title: str) -> None:
    """Erase a chat that the tab lists as deleted; no other is."""
    tab.click("#deleted summary")
    tab.click(f"[aria-label='Erase “{title}” for good']")
    tab.wait_for_selector("#deleted", state="hidden")


def test_two_tabs_that_speak_at_once(echo: ScriptedApi, page: Any) -> None:
    other = two_tabs_of_a_chat(echo, page)
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
    other = two_tabs_of_a_chat(echo, page)
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
    other = second_tab(page, echo.url)
    other.click("#open-chats")
    other.click(".delete-chat")
    page.wait_for_selector("#notices:has-text('deleted in another tab')")
    assert said(page) == ["one", "re one #1"], "it stays in sight"
    page.click("#notices .quiet")
    other.wait_for_selector(".delete-chat")
    other.click(".delete-chat")
    erase(other, "one")
    ask(page, "two")
    finished(page, 2)
    page.reload()
    wait_for(page, ["one", "re one #1", "two", "re two #2"])


def test_an_erased_chat_does_not_come_back_by_itself(echo: ScriptedApi, page: Any) -> None:
    """It stays erased even if another tab was still receiving its answer and then closes."""
    echo.script = lambda body: held("on and on")
    page.goto(echo.url)
    ask(page, "one")
    page.wait_for_selector(".assistant .body:has-text('on and on')")
    other = second_tab(page, echo.url)
    other.click("#open-chats")
    other.click(".delete-chat")
    page.wait_for_selector("#notices:has-text('deleted in another tab')")
    erase(other, "one")
    page.click("#stop")
    finished(page)
    page.reload()
    page.wait_for_selector("#notices:has-text('does not have that chat')")
    (left,), messages = stored(page)
    assert (set(left), messages) == ({"id", "erased"}, [])


def test_two_tabs_keep_each_others_settings(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    other = second_tab(page, echo.url)
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    other.wait_for_function("() => document.getElementById('system').value === 'Be brief.'")
    other.evaluate("document.getElementById('system').value = 'stale'")  # as if it had not heard of it
    other.click("#open-settings")
    other.fill("[data-setting=top_k]", "7")
    page.reload()
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("[data-setting=top_k]") == "7"


def test_a_tab_that_dies_in_the_middle_of_an_answer(echo: ScriptedApi, page: Any) -> None:
    """The other tab has what came until then, says that it is unfinished, and goes on with it."""
    other = two_tabs_of_a_chat(echo, page)
    echo.script = lambda body: held("on and on")
    ask(other, "more")
    page.wait_for_selector(".message:last-child .body:has-text('on')")
    with contextlib.suppress(Exception):  # the driver says that the page crashed
        other.goto("chrome://crash", timeout=1000)
    page.reload()
    page.wait_for_selector(".message:last-child .stats:has-text('unfinished')")
    begun = said(page)[-1]
    assert begun in "on and on"
    echo.script = lambda body: words(" and the end")
    page.click(".message:last-child [aria-label=Continue]")
    wait_for(page, ["start", "re start #1", "more", f"{begun} and the end"])
    assert echo.requests[-1]["messages"][-1]["content"].strip() == begun
