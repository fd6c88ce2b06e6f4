"""Chats on the page: nothing that was said is lost by an edit, a new chat or a deletion."""

from __future__ import annotations

import threading
from typing import Any

from scripted_api import ScriptedApi, held
from web.page_driver import ask, edit, finished, new_chat, said, stored, titles, wait_for


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
