"""Screen readers: axe finds nothing wrong with the page, in both themes, with a conversation and with its drawers."""

from __future__ import annotations

from typing import Any

import pytest

from scripted_api import Delta, Script, ScriptedApi, words
from web.page_driver import ask, edit, finished
from wider import wider

RICH = """# Title

Some *text* with `code`, [a link](https://x.y), \\(x^2\\) and $$\\sum_{i=1}^n \\frac{1}{i}$$

```python
@cache
class A(B):
    def f(self, x: int = 1) -> str:
        return f"{x}"  # why
```

```diff
- gone
+ new
```

| a | b |
|---|--:|
| 1 | 2 |

> quoted

1. one
   - [x] done
"""


def violations(page: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html'][:200]} {node['failureSummary']}" for each in found for node in each["nodes"]]


def answer_richly(body: dict[str, Any]) -> Script:
    return Script([Delta({"reasoning_content": "Let me *see*."}), *words(RICH).deltas])


@pytest.mark.parametrize("scheme", wider(["light", "dark"], "dark"))
def test_axe_finds_nothing(api: ScriptedApi, browser: Any, scheme: str) -> None:
    api.script = answer_richly
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert violations(page) == [], "the welcome"
    for number in (1, 2):
        ask(page, f"Question {number}")
        finished(page, number)
    edit(page, 1, "Otherwise")
    finished(page, 2)
    page.wait_for_selector(".message:last-child .hljs-keyword")
    page.locator(".thought summary").first.click()
    assert violations(page) == [], "a conversation"
    page.locator(".user").first.hover()
    page.locator("[aria-label='Edit and ask again']").first.click()
    assert violations(page) == [], "an editor"
    page.keyboard.press("Escape")
    page.click("#open-settings")
    assert violations(page) == [], "the settings"
    page.keyboard.press("Escape")
    page.click("#open-chats")
    page.wait_for_selector(".delete-chat")
    assert violations(page) == [], "the chats"
    page.click(".delete-chat")
    page.wait_for_selector("#undo-delete:focus")
    page.click("#deleted summary")
    assert violations(page) == [], "a chat that was deleted"
    context.close()


def test_axe_finds_nothing_in_an_error_and_a_key(api: ScriptedApi, browser: Any) -> None:
    api.script = lambda body: Script(status=400, error="too long")
    context = browser.new_context(color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    page.goto(api.url)
    ask(page, "Hi")
    finished(page)
    assert violations(page) == []
    api.key = "k"
    ask(page, "Hi")
    page.wait_for_selector("#key-dialog[open]")
    assert violations(page) == []
    context.close()


@pytest.mark.parametrize("scheme", wider(["light", "dark"], "light"))
def test_axe_finds_nothing_in_calls_and_files(api: ScriptedApi, browser: Any, scheme: str) -> None:
    api.more = [("small", "waiting")]
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}
    api.script = lambda body: Script(
        [Delta({"tool_calls": [call]})] * (len(api.requests) == 1) + [*words("Done.").deltas]
    )
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 360, "height": 740})
    page = context.new_page()
    page.goto(api.url)
    page.wait_for_selector("#models:not([hidden])")
    text = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}
    page.set_input_files("#attach-file", text)
    page.wait_for_selector("#files li")
    assert violations(page) == [], "a file"
    ask(page, "Hi")
    finished(page)
    page.set_input_files("#attach-file", {**text, "buffer": b"\0"})
    page.wait_for_selector("#notices:has-text('neither text')")
    page.click(".call summary")
    page.click(".file summary")
    assert violations(page) == [], "a call, and a form for its result"
    page.click(".results .primary")
    finished(page, 2)
    page.click(".result summary")
    assert violations(page) == [], "a result"
    page.click("#open-settings")
    page.click(".keys summary")
    page.fill("#tools", "[")
    assert violations(page) == [], "settings with a fault"
    context.close()
