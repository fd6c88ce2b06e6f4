"""Which model answers, how much of its context is in use, and an answer that goes on."""

from __future__ import annotations

from typing import Any

from scripted_api import Delta, Script, ScriptedApi, held, words
from web.page_driver import ask, finished, said, wait_for


def test_one_model_is_named_and_several_are_chosen_from(echo: ScriptedApi, page: Any) -> None:
    page.goto(echo.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert not page.is_visible("#models")
    echo.more = [("other-2b", "known"), ("third", "ready")]
    page.reload()
    page.wait_for_selector("#models:not([hidden])")
    assert not page.is_visible("#model")
    options = ["scripted-1b", "other-2b (not loaded)", "third"]
    assert page.locator("#models option").all_inner_texts() == options
    ask(page, "one")
    finished(page)
    page.select_option("#models", "other-2b")
    assert page.title() == "other-2b · realizar"
    page.click("[aria-label=Regenerate]")
    page.wait_for_selector(".assistant .place:has-text('2 / 2')")
    finished(page)
    assert [body["model"] for body in echo.requests] == ["scripted-1b", "other-2b"]
    assert page.inner_text(".stats").startswith("other-2b · ")
    page.click("[aria-label='Previous version'] >> visible=true")
    page.wait_for_selector(".stats:has-text('scripted-1b')")
    page.reload()
    page.wait_for_selector("#models:not([hidden])")
    assert page.input_value("#models") == "other-2b", "the choice is kept"
    echo.more = []
    page.focus("#models")
    page.wait_for_selector("#model:has-text('scripted-1b')", state="visible")
    ask(page, "two")
    finished(page, 2)
    assert echo.requests[-1]["model"] == "scripted-1b", "the one that was chosen is gone"


def test_the_states_follow_the_answers(echo: ScriptedApi, page: Any) -> None:
    """A model is loaded by its first answer, and the list says so without being opened; its name is there in full."""
    echo.more = [("other-2b", "known")]
    page.goto(echo.url)
    page.wait_for_selector("#models:not([hidden])")
    page.select_option("#models", "other-2b")

    def loading(body: dict[str, Any]) -> Script:
        echo.more = [("other-2b", "ready")]
        return held("once upon")

    echo.script = loading
    ask(page, "one")
    page.wait_for_selector(".assistant .body:has-text('once upon')")
    page.wait_for_function("() => document.querySelector('#models').selectedOptions[0].text === 'other-2b'")
    echo.more = [("other-2b", "failed")]
    page.click("#stop")
    page.wait_for_function("() => document.querySelector('#models').selectedOptions[0].text === 'other-2b (failed)'")
    width = page.evaluate("document.querySelector('#models').offsetWidth")
    page.evaluate("document.querySelector('#models').style.maxWidth = 'none'")
    assert page.evaluate("document.querySelector('#models').offsetWidth") == width, "no bound cuts its text"


def test_the_context_in_use(api: ScriptedApi, page: Any) -> None:
    """The server's own count, of the branch that is shown."""
    api.script = lambda body: Script([Delta({"content": "a"})] * (3 if len(api.requests) == 1 else 90))
    page.goto(api.url)
    page.wait_for_selector("#model:has-text('scripted-1b')")
    assert not page.is_visible("#context")
    ask(page, "one")
    finished(page)
    page.wait_for_selector("#context-text:has-text('10 of 4,096 tokens')")
    api.more = [("small", "running")]
    page.reload()
    page.wait_for_selector("#context-text:has-text('10 of 4,096 tokens')")
    page.select_option("#models", "small")
    page.wait_for_selector("#context-text:has-text('10 of 100 tokens')")
    ask(page, "two")
    finished(page, 2)
    page.wait_for_selector("#context.full:has-text('97 of 100 tokens: the context is nearly full')")
    meter = page.locator("[role=meter]")
    assert [meter.get_attribute(f"aria-value{name}") for name in ("min", "max", "now")] == ["0", "100", "97"]
    page.click("#new-chat")
    assert not page.is_visible("#context")


def test_continue(api: ScriptedApi, page: Any) -> None:
    """What was said so far stays beside what became of it, and is sent for the model to go on with."""
    api.script = lambda body: held("once upon ") if len(api.requests) == 1 else words("a time")
    page.goto(api.url)
    ask(page, "Go")
    page.wait_for_selector(".assistant .body:has-text('once upon')")
    page.click("#stop")
    finished(page)
    page.click("[aria-label=Continue]")
    wait_for(page, ["Go", "once upon a time"])
    finished(page)
    assert not page.is_visible("[aria-label=Continue]"), "it is whole now"
    body = api.requests[1]
    assert body["messages"] == [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "once upon "}]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in api.requests[0]
    page.reload()
    wait_for(page, ["Go", "once upon a time"])
    page.click(".assistant [aria-label='Previous version']")
    assert said(page) == ["Go", "once upon"]
    page.wait_for_selector(".stats:has-text('stopped')")


def test_an_answer_that_reached_its_limit_goes_on(api: ScriptedApi, page: Any) -> None:
    reason = ("length", "stop")
    api.script = lambda body: Script([Delta({"content": "half "})], finish_reason=reason[len(api.requests) - 1])
    page.goto(api.url)
    ask(page, "Go")
    finished(page)
    page.click("[aria-label=Continue]")
    wait_for(page, ["Go", "half half"])
    assert not page.is_visible("[aria-label=Continue]")
