"""`grammar_text` converts a `StructuredOutput` to the text that llguidance compiles, and bounds its size and depth."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from realizar.errors import InvalidRequestError
from realizar.sampling_params import NESTED_GRAMMAR, StructuredOutput
from realizar.structured.ascii_classes import ascii_classes
from realizar.structured.json_schema import read_schema
from realizar.structured.lark_schemas import prepare_lark_schemas

MAX_REGEX_CHARACTERS = 64 << 10
MAX_LARK_CHARACTERS = 512 << 10  # the schemas of many tools
MAX_LARK_ALTERNATIVES = 8192  # compiling takes time quadratic in these: 0.2 s
MAX_CHOICES_CHARACTERS = 512 << 10

# White space between JSON tokens: a line break with an indentation, or one space, as small models would repeat spaces.
_WHITESPACE = r"\n {0,32}|\n\t{1,8}| "


def grammar_text(structured: StructuredOutput) -> str:
    """The grammar's text for `LLMatcher`.

    Raises:
        InvalidRequestError: the grammar is too large or too deep, or its JSON is malformed.
        ValueError: the regular expression is malformed; one line.
    """
    if structured.kind == "json_object":
        return _schema_text({"type": "object"})
    if structured.kind == "json_schema":
        return _schema_text(read_schema(structured.value))
    if structured.kind == "choice":
        return str(LLMatcher.grammar_from_lark(_choices(structured.value)))
    if structured.kind == "regex":
        _check_size("the regular expression", len(structured.value), MAX_REGEX_CHARACTERS, "characters")
        return str(LLMatcher.grammar_from_regex(ascii_classes(structured.value)))
    if structured.kind == "nested":
        lark, nested = parts_of(structured)
        return json.dumps({"grammars": [{"lark_grammar": _lark_text(lark)}, _as_nested(grammar_text(nested))]})
    return _lark_text(structured.value)


def parts_of(structured: StructuredOutput) -> tuple[str, StructuredOutput]:
    """The Lark grammar of the kind `nested`, and the grammar within it.

    Raises:
        InvalidRequestError: the value has another form.
    """
    try:
        lark, kind, value = json.loads(structured.value)
        nested = StructuredOutput(kind, value)
    except (ValueError, TypeError, RecursionError):
        reason = "nested must be a JSON list of a Lark grammar, and the kind and value of another one"
        raise InvalidRequestError(reason, "structured") from None
    if kind == "nested" or not isinstance(lark, str):
        raise InvalidRequestError("nested must have a Lark grammar, and a grammar of another kind", "structured")
    return lark, nested


def _as_nested(text: str) -> dict[str, Any]:
    """A grammar's text as a part of another one's."""
    part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return {**part, "name": NESTED_GRAMMAR}


def _compiles(lark: str) -> bool:
    return not LLMatcher.validate_grammar(lark)


def _lark_text(lark: str) -> str:
    _check_size("the Lark grammar", len(lark), MAX_LARK_CHARACTERS, "characters")
    _check_size("the Lark grammar", lark.count("|"), MAX_LARK_ALTERNATIVES, "alternatives")
    return str(LLMatcher.grammar_from_lark(prepare_lark_schemas(lark, _WHITESPACE, _compiles)))


def _schema_text(schema: dict[str, Any]) -> str:
    text = json.dumps(schema)
    return str(
        LLMatcher.grammar_from_json_schema(text, overrides={"lenient": False, "whitespace_pattern": _WHITESPACE})
    )


def _choices(text: str) -> str:
    """A Lark grammar with one terminal, so that all choices form one automaton."""
    _check_size("choice", len(text), MAX_CHOICES_CHARACTERS, "characters")
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequestError("choice must be a JSON list of strings, none of them empty", "structured")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def _check_size(what: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise InvalidRequestError(f"{what} has {size} {unit}; at most {most} are allowed", "structured")
