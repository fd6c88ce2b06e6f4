"""`enforceable` leaves out of a JSON schema what can't be enforced. Standard library only.

Schemas of tools that are not strict come from many programs, with look-arounds, types of other systems, or nulls. The
rest of such a schema still holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from realizar.structured.json_schema import MAX_DEPTH, ONE_SCHEMA, SCHEMA_LISTS, SCHEMA_MAPS

Schema: TypeAlias = dict[str, Any]

_MOST_TRIES = 64  # of a whole schema, which each compile it
_HOLDERS = frozenset({*ONE_SCHEMA, *SCHEMA_LISTS, *SCHEMA_MAPS})


def enforceable(schema: Schema, prepare: Callable[[Schema], Schema | None]) -> Schema:
    """A schema without those keywords that can't be enforced, prepared.

    A keyword goes if its value fails by itself. Of keywords that fail together, as few go as some tries find. Where
    nothing helps, any object is allowed.

    Args:
        prepare: prepares a copy of a schema; None if it can't be enforced.
    """
    made = prepare(schema)
    if made is not None:
        return made
    try:
        kept = _well_formed(schema, prepare, {}, 0)
    except RecursionError:
        kept = {}
    made = prepare(kept)
    if made is None:
        made = _with_few_left_out(kept, prepare)
    return {"type": "object"} if made is None else made


def _well_formed(
    schema: Schema, prepare: Callable[[Schema], Schema | None], known: dict[str, bool], depth: int
) -> Schema:
    """A copy of those keywords whose values are no fault by themselves.

    Args:
        known: keywords that were tried, by their text.
    """

    def part(value: Any) -> Any:
        return _well_formed(value, prepare, known, depth + 1) if isinstance(value, dict) else value

    kept: Schema = {}
    for keyword, value in schema.items() if depth < MAX_DEPTH else ():
        if keyword in ONE_SCHEMA and isinstance(value, dict | bool):
            kept[keyword] = part(value)
        elif (keyword in SCHEMA_LISTS or keyword == "items") and _is_list(value):
            kept[keyword] = [part(each) for each in value]
        elif keyword == "patternProperties" and isinstance(value, dict):
            kept[keyword] = {
                key: part(each) for key, each in value.items() if _stands({"pattern": key}, prepare, known)
            }
        elif keyword in SCHEMA_MAPS and isinstance(value, dict):
            kept[keyword] = {key: part(each) if isinstance(each, dict | bool) else {} for key, each in value.items()}
        elif keyword not in _HOLDERS and (keyword == "$ref" or _stands({keyword: value}, prepare, known)):
            kept[keyword] = value
    return kept


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict | bool) for each in value)


def _stands(schema: Schema, prepare: Callable[[Schema], Schema | None], known: dict[str, bool]) -> bool:
    """True if a schema of one keyword can be enforced."""
    text = json.dumps(schema)
    if text not in known:
        known[text] = prepare(schema) is not None
    return known[text]


def _with_few_left_out(schema: Schema, prepare: Callable[[Schema], Schema | None]) -> Schema | None:
    """The schema without some keywords, of those that hold no schemas; None if it fails without all of them."""
    left_out = {(id(node), keyword) for node in _nodes(schema) for keyword in node if keyword not in _HOLDERS}
    waiting: list[Sequence[tuple[int, str]]] = [
        [(id(node), keyword) for node in _nodes(schema) for keyword in node if keyword not in _HOLDERS]
    ]
    made = prepare(_without(schema, left_out))
    for _ in range(_MOST_TRIES):
        if made is None or not waiting:
            break
        given_back = waiting.pop()
        found = prepare(_without(schema, left_out.difference(given_back)))
        if found is not None:
            made = found
            left_out.difference_update(given_back)
        elif len(given_back) > 1:
            half = len(given_back) // 2
            waiting += [given_back[half:], given_back[:half]]
    return made


def _nodes(schema: Any) -> Iterator[Schema]:
    """A schema and all schemas within it."""
    if isinstance(schema, dict):
        yield schema
        for holder in _HOLDERS & schema.keys():
            value = schema[holder]
            values = value.values() if holder in SCHEMA_MAPS else value if isinstance(value, list) else [value]
            for each in values:
                yield from _nodes(each)


def _without(schema: Any, left_out: set[tuple[int, str]]) -> Any:
    """A copy of a schema without some keywords."""
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAPS:
            kept[keyword] = {key: _without(each, left_out) for key, each in value.items()}
        elif keyword in _HOLDERS and isinstance(value, list):
            kept[keyword] = [_without(each, left_out) for each in value]
        elif keyword in _HOLDERS:
            kept[keyword] = _without(value, left_out)
        elif (id(schema), keyword) not in left_out:
            kept[keyword] = value
    return kept
