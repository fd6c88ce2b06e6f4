"""Chromium, and the chat page over a scripted server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from realizar.server.web import web_routes
from scripted_api import ScriptedApi, words
from waits import HANG_S

CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first is Chromium without what draws windows: pages take half the processor time of a whole one."""


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium without a window. It ends with this package: its driver keeps an event loop on this thread meanwhile."""
    executable = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if executable is None:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives Chromium, is missing")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    """A scripted server with the page."""
    with ScriptedApi(routes=web_routes()) as api:
        yield api


@pytest.fixture
def echo(api: ScriptedApi) -> ScriptedApi:
    """A server whose answers name the last question and their own number."""
    api.script = lambda body: words(f"re {body['messages'][-1]['content']} #{len(api.requests)}")
    return api


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page whose errors fail the test."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    context.set_default_timeout(1000 * HANG_S)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if _is_fault(message) else None)
    yield page
    context.close()
    assert faults == []


def _is_fault(message: Any) -> bool:
    """An error of the console, but for the browser's own line about an HTTP status."""
    return message.type == "error" and "Failed to load resource" not in message.text
