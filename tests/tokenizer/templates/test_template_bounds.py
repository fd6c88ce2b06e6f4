"""Templates that mean harm are refused, within a second and 64 MB."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping

import pytest

from realizar.errors import ChatTemplateError
from realizar.tokenizer.templates.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer

GROW = (
    "{{% set n = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set n.s = {step} %}}{{% endfor %}}{{{{ n.s }}}}"
)
BOMBS = {
    "power": "{{ 9**(9**9) }}",
    "power by squaring": GROW.format(start="9", step="n.s * n.s"),
    "times": "{{ 'a' * 10**10 }}",
    "list times": "{{ [1] * 10**9 }}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "empty loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "text in a loop": "{% for i in range(100000) %}" + "y" * 40000 + "{% endfor %}",
    "recursive loop": "{% for i in range(1000) recursive %}"
    "{% if loop.depth < 9 %}{{ loop(range(1000)) }}{% endif %}{% endfor %}",
    "endless loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "concatenation": GROW.format(start="'ab'", step="n.s ~ n.s"),
    "addition": GROW.format(start="'ab'", step="n.s + n.s"),
    "list addition": GROW.format(start="['ab']", step="n.s + n.s"),
    "block": "{% set a %}abcdefgh{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "nested lists": GROW.format(start="['x']", step="[n.s, n.s]"),
    "nested dicts": GROW.format(start="'x'", step="dict(x=n.s, y=n.s)").replace("n.s }}", "n.s | tojson }}"),
    "nested namespaces": GROW.format(start="'x'", step="namespace(a=n.s, b=n.s)"),
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ ('a\n' * 1000) | indent(10**9) }}",
    "indent lines": "{{ ('a\n' * 9000) | indent(9999) }}",
    "join": "{{ range(100000) | join('a' * 100000) }}",
    "str.join": "{{ ('a' * 100000).join(range(100000) | map('string')) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "str.format": "{{ '{:>1000000000}'.format(1) }}",
    "str.format nested": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "str.replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "bytes": "{{ 'a'.encode().ljust(10**10) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "tojson indent": "{{ messages | tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "sum of lists": "{{ range(100000) | map('string') | map('list') | sum(start=[]) }}",
    "slices kept": "{% set s = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(40)),
    "many lists": "{{ range(100000) | list | length }}" * 1000,
    "filters": "{{ range(100000)" + " | select" * 3000 + " | list | length }}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class": "{{ ''.__class__ }}",
    "attr": "{{ '' | attr('__class__') }}",
    "map attribute": "{{ [''] | map(attribute='__class__') | list }}",
    "join attribute": "{{ [''] | join(attribute='__class__') }}",
    "sum attribute": "{{ [''] | sum(attribute='__class__') }}",
    "format attribute": "{{ '{0.__class__}'.format(1) }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "time": "{{ strftime_now('%9999999999d') }}",
    "a megabyte": "a" * (1 << 20),
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "a long sum": "{{ " + "+".join(["1"] * 8000) + " }}",
    "many outputs": "{{a}}" * 9500,
}


class _NoTokenizer(Tokenizer):
    """Enough of a tokenizer to render with."""

    def __init__(self) -> None:
        self.special_texts = {}
        self.chat_templates = {}

    @property
    def adds_space_prefix(self) -> bool:
        return False

    def token_bytes(self, index: int) -> bytes:
        raise NotImplementedError

    def token_text(self, index: int) -> str:
        raise NotImplementedError

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        raise NotImplementedError


def render(source: str) -> str:
    return ChatTemplate(_NoTokenizer(), source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", BOMBS)
def test_refused_in_time(name: str) -> None:
    start = time.process_time()
    with pytest.raises(ChatTemplateError):
        render(BOMBS[name])
    assert time.process_time() - start < 60  # alone under half a second


@pytest.mark.parametrize(
    "name",
    ["times", "text in a loop", "concatenation", "list addition", "nested lists", "slices kept", "join", "block"],
)
def test_refused_in_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            render(BOMBS[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_the_longest_template_runs() -> None:
    source = "{{ messages[0].content }}" + "x" * (MAX_TEMPLATE_CHARACTERS - 25)
    assert render(source) == "hi" + "x" * (MAX_TEMPLATE_CHARACTERS - 25)


def test_long_conversations_are_no_bombs() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% if not loop.last %}{{ '\n' }}{% endif %}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": f" {turn} " * 50} for turn in range(3000)]
    text = ChatTemplate(_NoTokenizer(), source).render(messages)
    assert text == "\n".join("<user>" + message["content"].strip() for message in messages)
