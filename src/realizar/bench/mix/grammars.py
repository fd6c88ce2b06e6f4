"""Schemas, tools and expressions of requests that constrain their answers.

Schemas are long enough for the answer that a request asks for, whatever a model puts into them, so that also a model of
random weights goes on to the end. Some are sent again and again, as an application sends its own, others once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from realizar.bench.serve_workload import any_words

_TOKENS_A_FIELD = 5  # at the least: the key, a colon, a value and a comma
_SIZES = (4, 16, 64)
_KNOWN = 6
_NEW_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Expression:
    """One language as a regular expression, and as llama.cpp's GBNF."""

    regex: str
    gbnf: str


REGEX = Expression(r"([a-z]{1,12} )+\.", 'root ::= ([a-z]{1,12} " ")+ "."')


def any_schema(rng: random.Random, tokens: int) -> dict[str, Any]:
    """A JSON schema of an object whose fields are all required, for an answer of `tokens` tokens, 320 at the most."""
    return _any_object(rng, next((size for size in _SIZES if size * _TOKENS_A_FIELD >= tokens), _SIZES[-1]))


def any_tools(rng: random.Random) -> dict[str, Any]:
    """Two tools of four arguments, one of which has to be called. The answer ends with the call, as calls are short."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": _any_object(rng, _SIZES[0])}}
        for name, text in (("look_up", "Looks a record up."), ("store", "Stores a record."))
    ]
    return {"tools": tools, "tool_choice": "required"}


def _any_object(rng: random.Random, size: int) -> dict[str, Any]:
    """One of a few objects of `size` fields, or now and then a new one."""
    is_new = rng.random() < _NEW_SHARE
    return _object(random.Random(rng.getrandbits(32) if is_new else rng.randrange(_KNOWN)), size)


def _object(rng: random.Random, size: int) -> dict[str, Any]:
    """An object of `size` fields; the same state of `rng` gives the same one."""
    names = [f"{word}_{place}" for place, word in enumerate(any_words(rng, size))]
    return {
        "type": "object",
        "properties": {name: _value(rng) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _value(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "integer", "minimum": 0, "maximum": 9999}
    if kind == 1:
        return {"type": "boolean"}
    if kind == 2:
        return {"enum": any_words(rng, 4)}
    return {"type": "string", "maxLength": 40}
