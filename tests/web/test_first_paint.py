"""What the page fetches before a reader sees it."""

from __future__ import annotations

from typing import Any

from scripted_api import ScriptedApi

MAX_BYTES = 200_000
MAX_FILES = 40


def test_the_first_paint_is_small(api: ScriptedApi, page: Any) -> None:
    """All files that come before anything is said, headers left out: those before the first paint are among them."""
    sizes: dict[str, int] = {}
    page.on("response", lambda response: sizes.update({response.url: len(response.body())}))
    page.goto(api.url)
    page.wait_for_selector("#welcome:not([hidden])")
    page.wait_for_selector("#model:has-text('scripted-1b')")
    page.wait_for_load_state("networkidle")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint').length")
    assert painted == 1
    assert f"{api.url}/static/app.js" in sizes
    assert not [url for url in sizes if "/vendor/" in url]
    assert len(sizes) <= MAX_FILES
    assert sum(sizes.values()) < MAX_BYTES, sizes
