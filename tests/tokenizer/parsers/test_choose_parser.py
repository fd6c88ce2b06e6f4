"""A chat template determines the style of calls; templates without tools get prompts that show tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realizar.errors import InvalidRequestError
from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.parsers.styles import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GRANITE,
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    ToolStyle,
)
from realizar.tokenizer.parsers.tagged_styles import GLM, GLM_DENSE, MINIMAX, QWEN3_CODER, SEED_OSS
from realizar.tokenizer.templates.chat_template import (
    CompiledTemplate,
    spell_tool_messages,
    tools_as_system_text,
    with_first_user_text,
    with_system_text,
)
from tokenizer.parsers.parsed_answers import Answer, parse

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "Ünit", "parameters": {"type": "object", "properties": {}}},
    }
]


def with_tools(text: str) -> str:
    """A template that shows tools and then a text that explains to the model how to call them."""
    shown = "{{ " + json.dumps(text, ensure_ascii=False) + " }}"
    return "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}" + shown + "{% endif %}" + TURNS


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ('<tool_call>{"name": ..., "arguments": ...}</tool_call>', HERMES),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
        ("<|python_tag|>", LLAMA),
        ("<|tool_call|>[", GRANITE),
        ("[TOOL_CALLS] [{", MISTRAL_LIST),
        ("[TOOL_CALLS]name[ARGS]{", MISTRAL),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", DEEPSEEK_FENCED),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>", DEEPSEEK),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>", GLM),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>", GLM_DENSE),
        ("<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>", QWEN3_CODER),
        ("<seed:tool_call>\n<function=name>\n<parameter=key>value</parameter>\n</function>", SEED_OSS),
        ('<minimax:tool_call>\n<invoke name="tool">\n<parameter name="key">value</parameter>', MINIMAX),
        ('<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>', GEMMA),
        ("answer in JSON", JSON),
    ],
)
def test_style_of_a_template(text: str, style: ToolStyle) -> None:
    assert find_format(with_tools(text)).style is style
    without = find_format(TURNS + "{# " + text + " #}").style
    assert without.name == "json", "it shows no tools"
    assert without.form == JSON.form
    assert without.marks == style.marks, "its own way is understood too"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TURNS, False),
        (TURNS + "{# tools #}", False),
        (TURNS + "tools {{ 'tools' }}", False),
        ("{% set tools = 1 %}" + TURNS, False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TURNS, False),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools }}{% endif %}", True),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TURNS, True),
        ("{%- if messages[0].role == 'user' and tools %}{{ tools | tojson }}{% endif %}", True),
    ],
)
def test_whether_a_template_takes_tools(template: str, takes: bool) -> None:
    assert CompiledTemplate(template).takes_tools is takes


def test_reasoning_of_a_template() -> None:
    thinking = TURNS + "<think>\n"
    assert parse(
        choose_parser(find_format(thinking), None, prompt_end="assistant: <think>\n"), ["a</think>b"]
    ) == Answer("b", "a")
    assert parse(choose_parser(find_format(thinking), None, prompt_end="<think>\n\n</think>\n\n"), ["a"]) == Answer("a")
    assert parse(choose_parser(find_format(TURNS + "[THINK]"), None), ["[THINK]a[/THINK]b"]) == Answer("b", "a")
    assert parse(choose_parser(find_format(TURNS), None), ["<think>a</think>b"]) == Answer("<think>a</think>b")
    assert parse(choose_parser(find_format(None), None), ["a"]) == Answer("a")


def test_content_between_marks() -> None:
    """Marks around an assistant's content in the prompt are looked for in answers; others are not."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<response>\n{{ m.content }}\n</response>\n{% endif %}"
    )
    answer = "<response>\na\n</response>"
    assert parse(choose_parser(find_format(source + "{% endfor %}"), None), [answer]) == Answer("a")
    results = TURNS + "{% for m in messages %}{% if m.role == 'tool' %}<response>x</response>{% endif %}{% endfor %}"
    assert parse(choose_parser(find_format(results), None), [answer]) == Answer(answer)


def test_tools_decide_whether_calls_are_looked_for() -> None:
    call = '{"name": "f", "arguments": {}}'
    assert parse(choose_parser(find_format(TURNS), TOOLS), [call]) == Answer(names=["f"], arguments=["{}"])
    assert parse(choose_parser(find_format(TURNS), None), [call]) == Answer(call)
    assert parse(choose_parser(find_format(TURNS), []), [call]) == Answer(call)


def test_tools_as_text() -> None:
    text = tools_as_system_text(TOOLS)
    assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in text.splitlines()
    assert '{"name": ' in text
    messages = [{"role": "user", "content": "hi"}]
    assert with_system_text(messages, "T") == [{"role": "system", "content": "T"}, *messages]
    assert with_system_text([{"role": "system", "content": "S"}, *messages], "T")[0]["content"] == "S\n\nT"
    parts = [{"role": "system", "content": [{"type": "text", "text": "S"}]}]
    assert with_system_text(parts, "T")[0]["content"][-1] == {"type": "text", "text": "T"}
    assert with_first_user_text([{"role": "system", "content": "S"}, *messages], "T") == [
        {"role": "user", "content": "S\n\nT\n\nhi"}
    ]
    assert messages == [{"role": "user", "content": "hi"}], "the caller's messages are left alone"


def test_calls_and_results_as_text() -> None:
    calls: list[dict[str, Any]] = [
        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "function": {"name": "g", "arguments": {"b": "é"}}},
    ]
    conversation = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": "and?"},
    ]
    spelled = spell_tool_messages(conversation)
    assert [m["role"] for m in spelled] == ["user", "assistant", "user"], "roles alternate"
    assert json.loads(spelled[1]["content"]) == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {"b": "é"}},
    ]
    first, second, _, question = spelled[2]["content"].splitlines()
    assert json.loads(first) == {"result_of": "f", "content": "one"}
    assert json.loads(second) == {"result_of": "g", "content": "two"}
    assert question == "and?"


def test_what_the_prompt_asks_for_is_what_the_parser_reads() -> None:
    """An assistant's calls spelled into a prompt parse as those calls."""
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 2}'}}]}
    (spelled,) = spell_tool_messages([message])
    assert parse(choose_parser(find_format(TURNS), TOOLS), list(spelled["content"])) == Answer(
        names=["f"], arguments=['{"x": 2}']
    )


def test_unknown_name_in_tool_choice() -> None:
    from realizar.tokenizer.parsers.grammar import call_grammar

    with pytest.raises(InvalidRequestError, match="'nobody'") as caught:
        call_grammar(find_format(TURNS), TOOLS, name="nobody")
    assert caught.value.param == "tool_choice"


def test_strict_tools_take_calls_that_a_grammar_enforces() -> None:
    """A grammar of free text begins calls at one mark; a call behind another one would be unchecked."""
    template = with_tools("<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    bare = "<function=f>\n</function>"
    form = find_format(template)
    assert parse(choose_parser(form, [tool]), [bare]).names == ["f"]
    assert parse(choose_parser(form, [strict]), [bare]) == Answer(bare)
    assert parse(choose_parser(form, [strict]), [f"<tool_call>\n{bare}\n</tool_call>"]).names == ["f"]
