"""Preparation of JSON schemas inside a Lark grammar (`%json {...}`), such as those of tools."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.structured.json_schema import prepare_schema
from realizar.structured.lenient import enforceable
from realizar.structured.schema_refusal import REFUSED

# Strings, comments and regular expressions come first, as `%json` has no meaning inside them.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_DECODER = json.JSONDecoder()
_SHOWN = 64  # characters of a rule's name in a message, whose reason comes after it
_RULE = re.compile(r"^[ \t]*([A-Za-z_]\w*)(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_OF_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)", re.DOTALL)


def prepare_lark_schemas(text: str, whitespace: str, compiles: Callable[[str], bool]) -> str:
    """Prepare the schemas inside a grammar.

    Args:
        whitespace: regular expression of the white space between JSON tokens, for schemas without their own.
        compiles: True if a Lark grammar compiles.

    Raises:
        InvalidRequestError: a schema that is not lenient is too large or too deep, no finite value satisfies it, or it
            can't be prepared; the message names its rule.
    """
    written: list[str] = []
    done = 0
    while (found := _TOKEN.search(text, done)) is not None:
        written.append(text[done : found.end()])
        done = found.end()
        if found[0].startswith("%json"):
            schema, end = _decoded(text, done)
            if isinstance(schema, dict):
                try:
                    written.append(json.dumps(_prepared(schema, whitespace, compiles)))
                except InvalidRequestError as error:
                    raise _of_rule(text[:done], str(error).removeprefix(REFUSED)) from None
                done = end
    return "".join((*written, text[done:]))


def schema_error(grammar: str, reason: str) -> InvalidRequestError | None:
    """The error of a schema within a prepared grammar, by llguidance's reason; None if that is about something else."""
    found = _OF_SCHEMA.fullmatch(reason)
    if found is None:
        return None
    lines = grammar.split("\n")
    return _of_rule("\n".join(lines[: int(found[1])]), found[2])


def _of_rule(text: str, reason: str) -> InvalidRequestError:
    """The error of the schema in the last rule of a text."""
    rules = _RULE.findall(text)
    of_rule = f" of the rule {rules[-1][:_SHOWN]}" if rules else ""
    return InvalidRequestError(f"the JSON schema{of_rule} can't be honoured: {reason}", "structured")


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins here and its end; None if there is none, which llguidance will refuse."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _prepared(schema: dict[str, Any], whitespace: str, compiles: Callable[[str], bool]) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    if options.get("lenient"):  # what can't be enforced is left out
        prepared = enforceable(plain, functools.partial(_if_compiled, compiles))
    else:
        prepared = plain
        prepare_schema(prepared)
    if not {"whitespace_flexible", "whitespace_pattern"} & options.keys():
        options = {**options, "whitespace_pattern": whitespace}
    return {**prepared, "x-guidance": options}


def _if_compiled(compiles: Callable[[str], bool], schema: dict[str, Any]) -> dict[str, Any] | None:
    """A prepared copy of a schema; None if it can't be enforced."""
    prepared = copy.deepcopy(schema)
    try:
        prepare_schema(prepared)
    except (InvalidRequestError, RecursionError):
        return None
    lenient = {**prepared, "x-guidance": {"lenient": True}}
    return prepared if compiles(f"start: %json {json.dumps(lenient)}") else None
