"""What a family's template writes of an answer is parsed to that answer: small templates of the same constructs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.templates.chat_template import ChatTemplate
from tokenizer.parsers.parsed_answers import parse
from tokenizer.templates.test_chat_template import tokenizer

THOUGHT = "<think>{{ '\\n' + m.reasoning_content + '\\n' }}</think>\n\n"
TEMPLATES = {
    "glm": """\
{%- macro text(content) -%}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content %}{% if item is mapping and item.type == 'text' %}{{ item.text }}{% endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{% if tools %}{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}{% endif %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ text(m.content) }}
{%- else -%}<|assistant|>
{{- '\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- if text(m.content).strip() %}{{ '\n' + text(m.content).strip() }}{% endif -%}
{% for tc in m.tool_calls or [] %}{% if tc.function %}{% set tc = tc.function %}{% endif %}
{{ '\n<tool_call>' + tc.name }}
{% for k, v in (tc.arguments or {}).items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- endif -%}
{%- endfor -%}""",
    "qwen": """\
{%- macro extra(d, handled) %}{% for k, v in d.items() if k not in handled %}{{ k }}{% endfor %}{% endmacro -%}
{%- if tools is iterable and tools | length > 0 -%}
{%- for tool in tools %}<function>{{ tool.function.name }}{{ extra(tool.function, ['name']) }}</function>{% endfor -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "assistant" and m.tool_calls is defined and m.tool_calls is iterable -%}
<|im_start|>assistant
{{ m.content | trim + '\n' }}
{%- for call in m.tool_calls -%}
    {%- if call.function is defined %}{% set call = call.function %}{% endif -%}
    {{- '\n<tool_call>\n<function=' + call.name + '>\n' -}}
    {%- for name, value in call.arguments | items -%}
        {{- '<parameter=' + name + '>\n' -}}
        {%- set is_list = value is sequence and value is not string -%}
        {%- set value = value | tojson | safe if value is mapping or is_list else value -%}
        {{- value | string if value is string else value | tojson -}}
        {{- '\n</parameter>\n' -}}
    {%- endfor -%}
    {{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{%- else %}<|im_start|>{{ m.role + '\n' + m.content }}{% endif -%}
{%- endfor -%}""",
    "minimax": """\
{%- set begin, end = '<minimax:tool_call>', '</minimax:tool_call>' -%}
{%- macro listed(tool_list) -%}
{%- for tool in tool_list %}<tool>{{ tool.function | tojson | string }}</tool>
{% endfor -%}
{%- endmacro -%}
{%- if tools %}{{ listed(tools) }}{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- ']~b]ai' ~ '\n' -}}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
    {{- '<think>' ~ '\n' ~ m.reasoning_content ~ '\n' ~ '</think>' ~ '\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- if m.tool_calls -%}{{- '\n' ~ begin ~ '\n' -}}
{%- for call in m.tool_calls -%}
{{- '<invoke name="' + call.function.name + '">' }}
{% for k, v in call.function.arguments | items %}
{{- '<parameter name="' + k + '">' }}{{ v | tojson | string if v is not string else v }}{{ '</parameter>' }}
{% endfor -%}
{{- '</invoke>' ~ '\n' -}}
{%- endfor -%}{{- end ~ '[e~[' -}}{%- endif -%}
{%- else -%}{{- ']~b]' ~ m.role ~ '\n' ~ m.content ~ '[e~[' ~ '\n' -}}{%- endif -%}
{%- endfor -%}""",
    "qwen3.5": """\
{%- macro shown(content) -%}
{%- if content is string %}{{ content }}
{%- elif content is none or content is undefined %}{{ '' }}
{%- else %}{% for part in content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- if tools and tools is iterable and tools is not mapping -%}
{%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
{%- endif -%}
{%- set ns = namespace(last=messages | length - 1) -%}
{%- for m in messages[::-1] -%}
{%- if m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set content = shown(m.content) | trim -%}
{%- if m.role == 'assistant' -%}
{%- if loop.index0 > ns.last -%}
    {{- '<|im_start|>assistant\n<think>\n' + m.reasoning_content | trim + '\n</think>\n\n' + content -}}
{%- else %}{{ '<|im_start|>assistant\n' + content }}{% endif -%}
{%- for call in m.tool_calls -%}
    {%- if call.function is defined %}{% set call = call.function %}{% endif -%}
    {{- ('\n\n' if loop.first and content else '\n') + '<tool_call>\n<function=' + call.name + '>\n' -}}
    {%- for name, value in call.arguments | items -%}
        {{- '<parameter=' + name + '>\n' -}}
        {%- set is_list = value is sequence and value is not string -%}
        {{- value | tojson | safe if value is mapping or is_list else value | string -}}
        {{- '\n</parameter>\n' -}}
    {%- endfor -%}
    {{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + content }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}""",
    "lfm2.5": """{%- macro of_value(value) -%}
{%- if value is string %}{{ "'" + value + "'" }}{% elif value is mapping %}{{ value | tojson }}
{%- else %}{{ value | string }}{% endif -%}
{%- endmacro -%}
{%- if tools %}{{ 'List of tools: [' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' %}{% generation -%}
{%- if message.thinking is defined %}{{ '<think>' + message.thinking + '</think>' }}{% endif -%}
{{- message.content -}}
{%- set ns = namespace(calls=[]) -%}
{%- for call in message.tool_calls or [] -%}
    {%- set given = namespace(parts=[]) -%}
    {%- for key, value in call.function.arguments.items() -%}
        {%- set given.parts = given.parts + [key + '=' + of_value(value)] -%}
    {%- endfor -%}
    {%- set ns.calls = ns.calls + [call.function.name + '(' + given.parts | join(', ') + ')'] -%}
{%- endfor -%}
{{- '<|tool_call_start|>[' + ns.calls | join(', ') + ']<|tool_call_end|>' -}}
{%- endgeneration %}{% else %}{{ message.content }}{% endif -%}
{%- endfor -%}""",
    "ernie": """\
{%- if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|im_start|>assistant
"""
    + THOUGHT
    + """\
{%- if m.content %}{{ '<response>\n' + m.content + '\n</response>\n' }}{% endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n' -}}
{{ '</tool_call>\n' }}
{%- endfor -%}
{%- else %}{{ m.content }}{% endif -%}
{%- endfor -%}""",
}
GET: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}},
        },
    },
}
ARGUMENTS = [{"place": "12", "days": 3, "more": {"a": [1, "é"]}}, {"place": 'two\nlines "q"', "days": 0}]
STARTS = ("<|assistant|>", "<|im_start|>assistant\n", "]~b]ai\n")


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "text"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_written_and_parsed(name: str, as_text: bool) -> None:
    template = ChatTemplate(tokenizer(TEMPLATES[name]))
    calls = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": "get", "arguments": json.dumps(given) if as_text else given},
        }
        for place, given in enumerate(ARGUMENTS)
    ]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
    text = template.render([{"role": "user", "content": "weather?"}, answer], [GET], add_generation_prompt=False)
    start = next(start for start in STARTS if start in text)
    written = text[text.index(start) + len(start) :].removesuffix("[e~[")
    found = parse(choose_parser(find_format(template.source([GET])), [GET]), list(written))
    assert [json.loads(each) for each in found.arguments] == ARGUMENTS
    assert found.names == ["get", "get"]
    assert found.content.strip() == "I look."
    assert found.reasoning == ("" if name == "qwen" else "Hm.")
