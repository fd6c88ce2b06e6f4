"""Preparation of JSON schemas inside a Lark grammar (`%json {...}`), such as those of tools."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.structured.json_schema import check_end, prepare_schema

# Strings, comments and regular expressions come first, as `%json` has no meaning inside them.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_DECODER = json.JSONDecoder()


def prepare_lark_schemas(text: str, whitespace: str) -> str:
    """Prepare the schemas inside a grammar.

    Args:
        whitespace: regular expression of the white space between JSON tokens, for schemas without their own.

    Raises:
        InvalidRequestError: no finite value satisfies a schema, or one that is not lenient is too large or too deep, or
            can't be prepared.
    """
    written: list[str] = []
    done = 0
    while (found := _TOKEN.search(text, done)) is not None:
        written.append(text[done : found.end()])
        done = found.end()
        if found[0].startswith("%json"):
            schema, end = _decoded(text, done)
            if isinstance(schema, dict):
                written.append(json.dumps(_prepared(schema, whitespace)))
                done = end
    return "".join((*written, text[done:]))


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins here and its end; None if there is none, which llguidance will refuse."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _prepared(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    if options.get("lenient"):  # keywords that can't be enforced are ignored
        try:
            prepared = copy.deepcopy(plain)
            prepare_schema(prepared)
        except (InvalidRequestError, RecursionError):
            check_end(plain)
            prepared = plain
    else:
        prepared = plain
        prepare_schema(prepared)
    if not {"whitespace_flexible", "whitespace_pattern"} & options.keys():
        options = {**options, "whitespace_pattern": whitespace}
    return {**prepared, "x-guidance": options}
