"""The chat page in Chromium: themes, a phone, the keyboard, copying, scrolling."""

from __future__ import annotations

import threading
from typing import Any

from scripted_api import ScriptedApi, held, words
from web.page_driver import ask, finished, until


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
