"""Clients show images, in messages and as results of tools: the model answers, and usage counts the images' tokens."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import anthropic
import ollama
import pytest

from server_thread import NAME, RunningServer
from waits import HANG_S

QUESTION = "What is this?"
MOST = 8  # tokens of an answer
TOKENS = 16 * 10  # of the image, at least
Ask = Callable[[RunningServer, str, bytes | None], tuple[str, int]]
"""Asks a question about an image, or without one: the answer's text, and the tokens of the prompt."""


def text_of(image: bytes) -> str:
    return base64.b64encode(image).decode()


def url_of(image: bytes) -> str:
    return f"data:image/png;base64,{text_of(image)}"


def ask_chat(server: RunningServer, question: str, image: bytes | None) -> tuple[str, int]:
    parts: list[Any] = [{"type": "text", "text": question}]
    if image is not None:
        parts.append({"type": "image_url", "image_url": {"url": url_of(image)}})
    with server.client() as client:
        given = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": parts}], max_tokens=MOST, temperature=0
        )
    return str(given.choices[0].message.content), given.usage.prompt_tokens


def ask_responses(server: RunningServer, question: str, image: bytes | None) -> tuple[str, int]:
    parts: list[Any] = [{"type": "input_text", "text": question}]
    if image is not None:
        parts.append({"type": "input_image", "image_url": url_of(image), "detail": "auto"})
    with server.client() as client:
        given = client.responses.create(
            model=NAME, input=[{"role": "user", "content": parts}], max_output_tokens=MOST, temperature=0
        )
    return given.output_text, given.usage.input_tokens


def ask_anthropic(server: RunningServer, question: str, image: bytes | None) -> tuple[str, int]:
    blocks: list[Any] = [{"type": "text", "text": question}]
    if image is not None:
        source = {"type": "base64", "media_type": "image/png", "data": text_of(image)}
        blocks.append({"type": "image", "source": source})
    messages: list[Any] = [{"role": "user", "content": blocks}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=HANG_S) as client:
        greedy = {"temperature": 0}
        given = client.messages.create(model=NAME, messages=messages, max_tokens=MOST, extra_body=greedy)
        counted = client.messages.count_tokens(model=NAME, messages=messages).input_tokens
    read = given.usage.input_tokens + (given.usage.cache_read_input_tokens or 0)
    assert read + (given.usage.cache_creation_input_tokens or 0) == counted
    return given.content[0].text, counted


def ask_ollama(server: RunningServer, question: str, image: bytes | None) -> tuple[str, int]:
    images = [] if image is None else [image]
    options = {"num_predict": MOST, "temperature": 0}
    with ollama.Client(host=server.url, timeout=HANG_S) as client:
        given = client.chat(NAME, [{"role": "user", "content": question, "images": images}], options=options)
        made = client.generate(NAME, question, images=images, options=options)
    assert (made.response, made.prompt_eval_count) == (given.message.content, given.prompt_eval_count)
    return given.message.content, given.prompt_eval_count


def ask_langchain(server: RunningServer, question: str, image: bytes | None, **options: Any) -> tuple[str, int]:
    """By LangChain's own form of images, and by OpenAI's."""
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage

    model = langchain.ChatOpenAI(
        model=NAME,
        base_url=f"{server.url}/v1",
        api_key="none",
        timeout=HANG_S,
        max_tokens=MOST,
        temperature=0,
        **options,
    )
    forms: list[list[Any]] = [[]]
    if image is not None:
        plain = {"type": "image", "base64": text_of(image), "mime_type": "image/png"}
        forms = [[plain], [{"type": "image_url", "image_url": {"url": url_of(image)}}]]
    given = [model.invoke([HumanMessage([{"type": "text", "text": question}, *parts])]) for parts in forms]
    (answer,) = {(str(each.text), each.usage_metadata["input_tokens"]) for each in given}
    return answer


def ask_langchain_responses(server: RunningServer, question: str, image: bytes | None) -> tuple[str, int]:
    return ask_langchain(server, question, image, use_responses_api=True)


@pytest.mark.parametrize(
    "ask", [ask_chat, ask_responses, ask_anthropic, ask_ollama, ask_langchain, ask_langchain_responses]
)
def test_an_image_is_shown(seeing: RunningServer, ask: Ask, png: bytes) -> None:
    text, count = ask(seeing, QUESTION, png)
    blind, fewer = ask(seeing, QUESTION, None)
    assert text
    assert text != blind
    assert count - fewer > TOKENS


def test_a_tool_of_langchain_gives_an_image(seeing: RunningServer, png: bytes) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    model = langchain.ChatOpenAI(
        model=NAME, base_url=f"{seeing.url}/v1", api_key="none", timeout=HANG_S, max_tokens=MOST
    )
    call = {"name": "look", "args": {}, "id": "call00001", "type": "tool_call"}

    def counted(content: Any) -> int:
        messages = [HumanMessage("Look."), AIMessage("", tool_calls=[call])]
        given = model.invoke([*messages, ToolMessage(content, tool_call_id="call00001")])
        return int(given.usage_metadata["input_tokens"])

    assert counted([{"type": "image_url", "image_url": {"url": url_of(png)}}]) - counted("") > TOKENS
