"""Talking to the chat page, as its tests do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from waits import HANG_S


def until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
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


def said(page: Any) -> list[str]:
    return list(page.locator(".message .body").all_inner_texts())


def wait_for(page: Any, texts: list[str]) -> None:
    """Wait until the page shows exactly these messages."""
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


LOAD = """async () => {
  const { Growing } = await import('/static/growing.js');
  const { idle } = await import('/static/slices.js');
  await (await import('/static/markdown.js')).loadMarkdown();
  await (await import('/static/tex.js')).loadKatex();
  window.render = async text => {
    const node = document.createElement('div');
    new Growing(node).show(text);
    await idle();
    return node;
  };
}"""


def load_renderer(page: Any, url: str) -> None:
    """Open the page and give it `render(text)`, which makes an element of markdown."""
    page.goto(url)
    page.evaluate(LOAD)
