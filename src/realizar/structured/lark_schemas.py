"""JSON schemas within a Lark grammar (`%json {...}`), as those of tools are, prepared as schemas by themselves are."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.structured.json_schema import prepare_schema

# What `%json` may stand in without meaning anything comes before it.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_DECODER = json.JSONDecoder()


def prepare_lark_schemas(text: str, whitespace: str) -> str:
    """The same grammar with its schemas made safe.

    Args:
        whitespace: between JSON tokens, as a regular expression, for schemas that don't say what theirs is.

    Raises:
        InvalidRequestError: a schema is too large or too deep, or can't be made safe, and is not lenient.
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
    """The JSON value that begins here and its end; None for what is none, which is llguidance's to refuse."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _prepared(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key != "x-guidance"}
    if options.get("lenient"):  # what can't be enforced is passed over
        try:
            prepared = copy.deepcopy(plain)
            prepare_schema(prepared)
        except (InvalidRequestError, RecursionError):
            prepared = plain
    else:
        prepared = plain
        prepare_schema(prepared)
    if not {"whitespace_flexible", "whitespace_pattern"} & options.keys():
        options = {**options, "whitespace_pattern": whitespace}
    return {**prepared, "x-guidance": options}
