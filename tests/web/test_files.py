"""Text files that go with a message, and the keys that work anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripted_api import ScriptedApi
from web.page_driver import ask, finished, said

DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: 'text/plain' }));
  for (const kind of ['dragover', 'drop']) {
    log.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""


def test_files_are_sent_with_a_message(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a ``` b\n<script>window.hit=1</script>\n")
    page.goto(echo.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    page.set_input_files("#attach-file", tmp_path / "notes.md")
    page.wait_for_selector("#files li:has-text('notes.md (2 lines)')")
    page.evaluate(DROP, ["tiny.txt", "one"])
    page.wait_for_selector("#files li:has-text('tiny.txt (1 line)')")
    page.click("[aria-label='Take “tiny.txt” out']")
    assert page.locator("#files li").count() == 1
    page.click("#notices .quiet")
    assert page.locator("#files li").count() == 2, "it is undone"
    page.reload()
    assert page.locator("#files li").count() == 2, "a reload keeps them"
    ask(page, "Sum up")
    finished(page)
    assert not page.is_visible("#files")
    content = "notes.md:\n````\na ``` b\n<script>window.hit=1</script>\n````\n\ntiny.txt:\n```\none\n```\n\nSum up"
    assert echo.requests[0]["messages"] == [{"role": "user", "content": content}]
    page.reload()
    page.wait_for_selector(".file")
    assert not page.is_visible(".file pre")
    page.click(".file summary")
    assert page.inner_text(".file pre").startswith("a ``` b")
    assert page.evaluate("window.hit") is None
    page.locator(".user").hover()
    page.click("[aria-label='Edit and ask again']")
    page.fill(".editor textarea", "Again")
    page.press(".editor textarea", "Enter")
    page.wait_for_selector(".user .place:has-text('2 / 2')")
    finished(page)
    assert echo.requests[1]["messages"][0]["content"] == content.replace("Sum up", "Again"), "an edit keeps the files"


def test_files_that_are_not_taken(echo: ScriptedApi, page: Any, tmp_path: Path) -> None:
    page.goto(echo.url)
    for name, data, reason in (
        ("a.bin", b"\xff\xfe", "is neither text in UTF-8 nor an image"),
        ("b.bin", b"a\0b", "is neither text in UTF-8 nor an image"),
        ("c.txt", b"x" * ((1 << 20) + 1), "is larger than 1 MiB"),
    ):
        (tmp_path / name).write_bytes(data)
        page.set_input_files("#attach-file", tmp_path / name)
        page.wait_for_selector(f"#notices:has-text('“{name}” {reason}')")
    many = [tmp_path / f"{number}.txt" for number in range(21)]
    for path in many:
        path.write_text("x")
    page.set_input_files("#attach-file", many)
    page.wait_for_selector("#notices:has-text('at most 20 files')")
    assert page.locator("#files li").count() == 20
    page.press("#prompt", "Enter")
    finished(page)
    page.click("#open-chats")
    page.wait_for_selector(".chat-title:has-text('0.txt')")


def test_keys(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    ask(page, "one")
    finished(page)
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".editor textarea:focus")
    assert page.input_value(".editor textarea") == "one"
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("a/b")
    assert page.input_value("#prompt") == "a/b"
    page.keyboard.press("ArrowUp")
    assert page.locator(".editor").count() == 0, "what is typed stays"
    page.keyboard.press("Control+K")
    page.wait_for_selector("#search:focus")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_selector("#chats", state="hidden")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector("#welcome:not([hidden])")
    assert said(page) == []
    page.click("#open-settings")
    page.click(".keys summary")
    assert "search chats" in page.inner_text(".keys")
