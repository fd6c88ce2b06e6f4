"""Classes of characters in regular expressions, against Python's own under re.ASCII."""

from __future__ import annotations

import json
import re

import pytest

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar
from structured.grammar_walks import TOKENS, masks_of, small_factory

FACTORY = small_factory()
BYTES = {token: index for index, token in enumerate(TOKENS) if len(token) == 1 and index > 1}
# Digits, letters and spaces of ASCII and of other scripts, and signs that mean something in a set.
CHARACTERS = '09aZ_ks \t\n\r\x0b\x0c-][^.~!\\"\x01\x7f\x1c\x85é٣߀३ſK\u00a0\u2003\u2028Ω'
# Each matches one character.
PATTERNS = (
    r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d]", r"[\D]", r"[^\d]", r"[^\D]", r"[\w-]", r"[\d\s]", r"[\W_]",
    r"[]\d]", r"[^]\d]", r"[-\d]", r"[^-\d]", r"[a\-\d]", r"[a-f\d-]", r"[\\d]", r"[\x5b-\x5d\d]", r"[!-\]\d]",
    r"(?i)\w", r"[^\w\s]", r"[\w.]",
)  # fmt: skip


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    matcher.advance([BYTES[bytes((byte,))] for byte in text.encode()])
    if matcher.error is not None:
        return False
    (mask,) = masks_of(FACTORY, [(matcher, ())])
    return bool(mask[0][0] & 1)  # the end


@pytest.mark.parametrize("pattern", PATTERNS)
def test_classes_are_those_of_ascii(pattern: str) -> None:
    grammar = FACTORY.compile(StructuredOutput("regex", pattern))
    for character in CHARACTERS:
        wanted = re.fullmatch(pattern, character, re.ASCII) is not None
        assert accepts(grammar, character) == wanted, repr(character)


@pytest.mark.parametrize("pattern", [each for each in PATTERNS if "^" not in each and "(" not in each])
def test_classes_in_patterns_of_schemas(pattern: str) -> None:
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    grammar = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))
    for character in CHARACTERS:
        wanted = re.fullmatch(pattern, character, re.ASCII) is not None and character not in "\x01\x7f"
        assert accepts(grammar, json.dumps(character, ensure_ascii=False)) == wanted, repr(character)


@pytest.mark.parametrize("text", [r"\d", r"a\d", r"[\d", r"\\d"])
def test_escaped_backslashes_begin_no_class(text: str) -> None:
    grammar = FACTORY.compile(StructuredOutput("regex", re.escape(text)))
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("d", "9"))


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [(r"\(?ext\.? \d+", ("(ext. 12", "ex 3")), (r"(\(?max\)?)", ("(max)", "max(")), ("[(?x]", ("?", "(?x"))],
)
def test_a_bracket_that_stands_for_itself_begins_no_flags(pattern: str, texts: tuple[str, str]) -> None:
    """`(?x` within a set, or of an escaped bracket that may be left out."""
    grammar = FACTORY.compile(StructuredOutput("regex", pattern))
    assert accepts(grammar, texts[0])
    assert not accepts(grammar, texts[1])


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [(r"[\w--\d]", "[a-zA-Z_]"), (r"[]-\d]", r"[-\]0-9]"), ("[!-[]", r"[!-\[]"), (r"[+-[:\d]", r"[+-\[:\d]")],
)
def test_sets_that_python_reads_otherwise(pattern: str, wanted: str) -> None:
    """A difference of sets, a `]` that begins no range, and a range that ends with a bracket, which opens no set."""
    grammar = FACTORY.compile(StructuredOutput("regex", pattern))
    for character in CHARACTERS:
        assert accepts(grammar, character) == (re.fullmatch(wanted, character, re.ASCII) is not None), repr(character)


@pytest.mark.parametrize("pattern", ["(?x) a # b", r"\\(?x)a", r"[]\]](?sx:a)", "[[(?]a](?ix)a"])
def test_comments_are_refused_wherever_they_begin(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="flag x"):
        FACTORY.compile(StructuredOutput("regex", pattern))


def test_space_between_json_tokens() -> None:
    """One space, or a line break with an indentation."""
    schema = {"type": "object", "properties": {"ok": {"type": "array", "items": {"type": "integer"}}}}
    grammar = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))
    for text in (
        '{"ok":[1,2]}',
        '{"ok": [1, 2]}',
        '{ "ok" : [ 1 , 2 ] }',
        '{\n  "ok": [\n    1,\n    2\n  ]\n}',
        '{\n\t"ok": [\n\t\t1\n\t]\n}',
        '{\n"ok":\n[]}',
        "{\n" + " " * 32 + "}",
    ):
        assert accepts(grammar, text), text
    for text in (
        '{"ok":  [1]}',
        '{"ok":\t[1]}',
        '{\n\n"ok": []}',
        '{ \n"ok": []}',
        '{\n \t"ok": []}',
        "{\n" + " " * 33 + "}",
        "{\n" + "\t" * 9 + "}",
    ):
        assert not accepts(grammar, text), text
