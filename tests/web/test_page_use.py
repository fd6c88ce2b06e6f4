"""The chat page in Chromium: themes, a phone, the keyboard, copying, scrolling."""

from __future__ import annotations

import threading
from typing import Any

from scripted_api import ScriptedApi, held, words
from web.page_driver import ask, finished, until

AT_END = "() => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"


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
    api.more = [("a-model-whose-name-is-far-too-long-for-a-phone-and-has-" + "x" * 60, "waiting")]
    context = browser.new_context(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(api.url)
    page.fill("#prompt", "w" * 200)
    page.tap("#send")
    finished(page)
    page.select_option("#models", api.more[0][0])
    widths = "[document.documentElement, document.body, scroller, ...document.querySelectorAll('header, footer')]"
    assert page.evaluate(f"{widths}.map(node => node.scrollWidth)") == [360] * 5
    sizes = page.evaluate(
        "[...document.querySelectorAll('.tool, .send')].filter(n => n.offsetWidth).map(n => n.offsetWidth)"
    )
    assert min(sizes) >= 38, "large enough for a finger"
    page.tap("#open-settings")
    assert page.evaluate("settings.getBoundingClientRect().right <= 360 && settings.scrollWidth <= 360")
    page.tap("#close-settings")
    page.tap("#open-chats")
    page.wait_for_selector(".delete-chat")
    assert page.evaluate("document.querySelector('.delete-chat').getBoundingClientRect().right <= 360")
    assert page.evaluate("chats.scrollWidth <= 360")
    context.close()


def test_the_bar_of_a_phone_keeps_its_height_while_an_answer_runs(api: ScriptedApi, browser: Any) -> None:
    """The speed needs room beside the page's name, which was broken into a column of letters for it."""
    rest = threading.Event()
    api.script = lambda body: held("words " * 10, "rest", rest)
    api.more = [("a-model-whose-name-is-far-too-long-for-a-phone", "waiting")]
    context = browser.new_context(viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(api.url)
    page.wait_for_selector("#models:not([hidden])")
    height = "document.querySelector('.bar').offsetHeight"
    before = page.evaluate(height)
    ask(page, "Hi")
    page.wait_for_selector("#speed:not([hidden], :empty)")
    assert page.evaluate(height) == before
    assert page.evaluate("document.querySelector('.names').offsetWidth") > 60, "the name can be read"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    rest.set()
    context.close()


def test_short_cells_of_a_table_stay_on_one_line(api: ScriptedApi, browser: Any) -> None:
    """A table that is too wide for a phone scrolls; only long texts are wrapped in it."""
    long = "a remark " * 20
    head = "| planet | gravity | after 1 s | after 2 s | note |\n|---|--:|--:|--:|---|"
    table = f"{head}\n| Mars | 3.71 | 1.9 m | 7.4 m | {long}|"
    api.script = lambda body: words(table)
    context = browser.new_context(viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True)
    page = context.new_page()
    page.goto(api.url)
    ask(page, "Hi")
    finished(page)
    heights = page.evaluate(
        "[...document.querySelectorAll('th, td')].map(node => { const range = document.createRange();"
        " range.selectNodeContents(node); return new Set([...range.getClientRects()].map(r => r.top)).size; })"
    )
    assert heights[:-1] == [1] * 9
    assert 1 < heights[-1] < 20
    assert page.evaluate("document.querySelector('td:last-child').offsetWidth") < 390
    context.close()


def test_the_welcome_is_read_from_its_top(api: ScriptedApi, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 320, "height": 480})
    page = context.new_page()
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert page.evaluate("scroller.scrollHeight > scroller.clientHeight"), "it is longer than this screen"
    assert page.evaluate("scroller.scrollTop") == 0
    api.script = lambda body: words("a line\n\n" * 30)
    ask(page, "Hi")
    finished(page)
    assert page.evaluate("scroller.scrollTop") > 0
    page.click("#new-chat")
    assert page.evaluate("scroller.scrollTop") == 0
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


def test_texts_have_their_own_direction(api: ScriptedApi, page: Any) -> None:
    """Each block by its first letter, whatever the ones around it have; and nothing moves the page from its place."""
    api.script = lambda body: words("שלום עולם.\n\nHello.\n\n" + "a\n\n" * 40)
    page.goto(api.url)
    ask(page, "مرحبا!\nhi")
    finished(page)
    left = """node => { const range = document.createRange(); range.selectNodeContents(node);
      return range.getBoundingClientRect().left - node.getBoundingClientRect().left; }"""
    first, second = page.locator(".assistant p").nth(0), page.locator(".assistant p").nth(1)
    assert first.evaluate(left) > 300
    assert second.evaluate(left) == 0
    page.evaluate("document.querySelector('.assistant p').scrollIntoView({ block: 'center' })")
    body = "document.body"
    assert page.evaluate(f"[{body}.scrollTop, {body}.scrollLeft, {body}.scrollHeight - innerHeight]") == [0, 0, 0]


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


def show_long_answer(api: ScriptedApi, page: Any) -> None:
    """Have an answer that is longer than the window, whose end is in sight."""
    api.script = lambda body: words("line\n\n" * 60)
    page.goto(api.url)
    ask(page, "Go")
    finished(page)
    page.wait_for_function(AT_END)


def test_the_end_stays_in_sight_as_the_field_grows(api: ScriptedApi, page: Any) -> None:
    show_long_answer(api, page)
    page.fill("#prompt", "many\nlines\n" * 5)
    page.wait_for_function(AT_END)
    page.set_viewport_size({"width": 1100, "height": 400})
    page.wait_for_function(AT_END)
    page.evaluate("document.querySelector('#scroller').scrollTop = 0")
    page.wait_for_selector("#to-end:not([hidden])")
    page.set_viewport_size({"width": 1100, "height": 700})
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == 0


def test_a_window_that_shrinks_before_the_event_of_a_scroll_keeps_the_end(api: ScriptedApi, page: Any) -> None:
    show_long_answer(api, page)
    page.evaluate(
        "() => { scroller.scrollTop -= 10; scroller.scrollTop = scroller.scrollHeight;"
        " scroller.style.maxHeight = '150px'; }"
    )
    page.wait_for_function(AT_END)
    assert page.evaluate("scroller.clientHeight") == 150


def test_scrolling_up_is_respected(api: ScriptedApi, page: Any) -> None:
    rest = threading.Event()
    api.script = lambda body: held("a line\n\n" * 60, "a line\n\n" * 20, rest)
    page.goto(api.url)
    ask(page, "Hi")
    page.wait_for_function("() => scroller.scrollTop > 300")
    page.evaluate("scroller.scrollTop = 0")
    page.wait_for_selector("#to-end", state="visible")
    rest.set()
    finished(page)
    assert page.evaluate("scroller.scrollTop") == 0
    page.click("#to-end")
    assert page.evaluate("scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight") < 2
