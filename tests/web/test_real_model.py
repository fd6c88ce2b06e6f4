"""The chat page over a real server with SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import CONTEXT, ServerThread
from waits import HANG_S

# Stops the second answer once it is longer than so many characters.
STOP_AFTER = """length => {
    const isLonger = document.querySelectorAll(".assistant .body")[1]?.textContent.length > length;
    if (isLonger) document.querySelector("#stop").click();
    return isLonger;
}"""


def test_chat_with_a_model(smollm2_path: Path, page: Any) -> None:
    settings = ServerSettings(api_keys=("s3cret",))
    thread = ServerThread(smollm2_path, settings, EngineConfig(context_length=CONTEXT, max_running=4))
    server = thread.start()
    page.set_default_timeout(1000 * HANG_S)
    try:
        page.goto(server.url)
        page.fill("#key", "s3cret")
        page.press("#key", "Enter")
        page.wait_for_selector(f"#model:has-text('{server.model.names[0]}')")
        page.click("#open-settings")
        page.fill("[data-setting=temperature]", "0")
        page.fill("[data-setting=max_tokens]", "900")
        page.click("#settings .primary")
        page.fill("#prompt", "What is the capital of France? One sentence.")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".assistant[aria-busy=false] .stats:has-text('tok/s')")
        assert "Paris" in page.locator(".assistant .body").inner_text()
        page.fill("#prompt", "Write a long story about a river and the people who live beside it.")
        with server.held_steps():  # neither answer ends by itself before it is stopped, however slow the page is
            page.press("#prompt", "Enter")
            page.wait_for_function(STOP_AFTER, arg=20)
            page.wait_for_selector(".assistant:last-child[aria-busy=false] .stats:has-text('stopped')")
            begun = page.locator(".assistant .body").last.inner_text()
            page.click(".message:last-child [aria-label=Continue]")
            page.wait_for_function(STOP_AFTER, arg=len(begun) + 10)
        assert page.locator(".assistant .body").last.inner_text().startswith(begun.rstrip())
        assert "of " in page.inner_text("#context-text")
    finally:
        thread.stop()
