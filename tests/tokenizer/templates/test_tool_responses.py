"""Results of tools where a template wants them in the message that called: Gemma 4's own template, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.templates.chat_messages import with_tool_responses
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer
from tokenizer.parsers.parsed_answers import Answer, parse

TOOLS = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}]


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [call("get", "1", place="Ulm"), call("now", "2")]},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": '{"sky": "clear", "degrees": 5}'},
]


def test_results_move_into_the_call() -> None:
    (_, moved) = with_tool_responses(CONVERSATION)
    assert moved["tool_responses"] == [
        {"name": "now", "response": "noon"},
        {"name": "get", "response": {"sky": "clear", "degrees": 5}},
    ]
    ended = [*CONVERSATION, {"role": "assistant", "content": "Clear."}, {"role": "user", "content": "Thanks"}]
    assert [message.get("content") for message in with_tool_responses(ended)] == ["weather?", "Clear.", "Thanks"]
    alone = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "1", "content": "y"}]
    assert with_tool_responses(alone) == alone


def test_gemma_template(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """The prompt goes on in the model's turn, behind results that look as it writes them."""
    model = tokenizer_of("gemma-4")
    template = ChatTemplate(model)
    text = template.render(CONVERSATION, TOOLS, enable_thinking=True)
    assert text.endswith(
        '<|tool_call>call:get{place:<|"|>Ulm<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>'
        '<|tool_response>response:now{value:<|"|>noon<|"|>}<tool_response|>'
        '<|tool_response>response:get{degrees:5,sky:<|"|>clear<|"|>}<tool_response|>'
    )
    assert "<|turn>tool" not in text
    form = find_format(template.source(TOOLS))
    assert form.style is GEMMA
    assert form.reasoning is not None
    prompt_end = model.decode(template.encode(CONVERSATION[:1], TOOLS, enable_thinking=True)[-16:], skip_special=False)
    parser = choose_parser(form, TOOLS, prompt_end=prompt_end)
    answer = '<|channel>thought\nhm<channel|>So:<|tool_call>call:get{place:<|"|>Bonn<|"|>}<tool_call|>'
    assert parse(parser, list(answer)) == Answer("So:", "hm", ["get"], ['{"place": "Bonn"}'])


def test_template_with_results_as_messages() -> None:
    """A template that shows both keeps the messages as they are."""
    from tokenizer.templates.test_chat_template import tokenizer

    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}[result {{ m.content }}]"
        "{% else %}{{ m.content }}{% for r in m.tool_responses or [] %}[result {{ r.response }}]{% endfor %}{% endif %}"
        "{% if m.tool_calls %}C{% endif %}{% endfor %}"
    )
    rendered = ChatTemplate(tokenizer(source)).render(CONVERSATION)
    assert "C[result noon]" in rendered
    only = source.replace("[result {{ m.content }}]", "{{ m.content }}")
    assert "[result noon]" in ChatTemplate(tokenizer(only)).render(CONVERSATION)
