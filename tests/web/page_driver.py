"""Talking to the chat page, as its tests do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
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
