"""Preparation of JSON schemas inside a Lark grammar (`%json {...}`), such as those of tools."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from realizar.errors import InvalidRequestError
from realizar.structured.json_schema import (
    MAX_DEPTH,
    ONE_SCHEMA,
    REFUSED,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    FreeString,
    free_strings,
    prepare_schema,
    schemas_in,
)

# Strings, comments and regular expressions come first, as `%json` has no meaning inside them.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|%json\s*')
_PLAIN_RULES = re.compile(r"(?:[A-Za-z_0-9:|()*+?\s]|<\[\d+\]>)*")  # all but strings and schemas; marks by their ids
_SPACES_IN_PATTERNS = r" \n\t{0123456789,}|"
_DECODER = json.JSONDecoder()
_SHOWN = 64  # characters of a rule's name in a message, whose reason comes after it
_RULE = re.compile(r"^[ \t]*([A-Za-z_]\w*)(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_OF_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*)", re.DOTALL)


def prepare_lark_schemas(text: str, whitespace: str, compiles: Callable[[str], bool]) -> str:
    """Prepare the schemas inside a grammar.

    `whitespace` is the regular expression of the white space between JSON tokens, for schemas without their own. Raises
    InvalidRequestError, naming the rule, where a schema that is not lenient is too large or too deep, no finite value
    satisfies it, or it can't be prepared.
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


def free_strings_of_lark(text: str) -> dict[bytes, FreeString]:
    """As `free_strings`, of all schemas inside a prepared grammar; none where text beside them may be anything but what
    the grammar spells out, as an answer that must be a call.
    """
    rules, literals, schemas, done = list[str](), list[str](), list[dict[str, Any]](), 0
    while (found := _TOKEN.search(text, done)) is not None:
        rules.append(text[done : found.start()])
        done = found.end()
        if found[0].startswith("%json"):
            schema, done = _decoded(text, done)
            if not isinstance(schema, dict) or not _separates_as_usual(schema.get("x-guidance", {})):
                return {}
            if schema.get("type") not in ("object", "array"):
                return {}  # it may be a name, or a value, of what the grammar spells out around it
            schemas.append({key: value for key, value in schema.items() if key != "x-guidance"})
        elif found[0].startswith('"'):
            if text[done : done + 1].isalpha():
                return {}  # a flag, by which other letters are meant too
            literals.append(found[0])
        elif found[0].startswith("/") and not found[0].startswith("//"):
            return {}
    rules.append(text[done:])
    try:
        spelled = [json.loads(literal) for literal in literals]
    except ValueError:
        return {}
    is_spelled = all("\\" not in each and each.count('"') % 2 == 0 for each in spelled)
    if not schemas or not is_spelled or not all(map(_PLAIN_RULES.fullmatch, rules)):
        return {}
    quoted = {part for each in spelled for part in each.split('"')[1::2]}
    return {name: each for name, each in free_strings({"anyOf": schemas}).items() if name.decode() not in quoted}


def _separates_as_usual(options: Any) -> bool:
    """True if a schema's options leave names, values and what is between them as JSON is always written."""
    return (
        isinstance(options, dict)
        and options.keys()
        <= {"lenient", "whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}
        and str(options.get("item_separator", ",")).strip() == ","
        and str(options.get("key_separator", ":")).strip() == ":"
        and not set(str(options.get("whitespace_pattern", ""))) - set(_SPACES_IN_PATTERNS)
    )


def schema_error(grammar: str, reason: str) -> InvalidRequestError | None:
    """The error of a schema within a prepared grammar, by llguidance's reason; None if that is about something else."""
    found = _OF_SCHEMA.fullmatch(reason)
    if found is None:
        return None
    lines = grammar.split("\n")
    return _of_rule("\n".join(lines[: int(found[1])]), found[2])


def _of_rule(text: str, reason: str) -> InvalidRequestError:
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
    prepared = copy.deepcopy(schema)
    try:
        prepare_schema(prepared)
    except (InvalidRequestError, RecursionError):
        return None
    lenient = {**prepared, "x-guidance": {"lenient": True}}
    return prepared if compiles(f"start: %json {json.dumps(lenient)}") else None


# `enforceable` leaves out of a JSON schema what can't be enforced.
#
# Schemas of tools that are not strict come from many programs, with look-arounds, types of other systems, or nulls. The
# rest of such a schema still holds.

Schema: TypeAlias = dict[str, Any]

_MOST_TRIES = 64  # of a whole schema, which each compile it
_HOLDERS = frozenset({*ONE_SCHEMA, *SCHEMA_LISTS, *SCHEMA_MAPS})


def enforceable(schema: Schema, prepare: Callable[[Schema], Schema | None]) -> Schema:
    """A schema without those keywords that can't be enforced, for which `prepare` gives None; prepared.

    A keyword goes if its value fails by itself. Of keywords that fail together, as few go as some tries find. Where
    nothing helps, any object is allowed.
    """
    made = prepare(schema)
    if made is not None:
        return made

    @functools.cache
    def stands(text: str) -> bool:
        return prepare(json.loads(text)) is not None

    try:
        kept = _well_formed(schema, stands, 0)
    except RecursionError:
        kept = {}
    made = prepare(kept)
    if made is None:
        made = _with_few_left_out(kept, prepare)
    return {"type": "object"} if made is None else made


def _well_formed(schema: Schema, stands: Callable[[str], bool], depth: int) -> Schema:
    """A copy of those keywords whose values are no fault by themselves; `stands` tries the text of a schema."""

    def part(value: Any) -> Any:
        return _well_formed(value, stands, depth + 1) if isinstance(value, dict) else value

    kept: Schema = {}
    for keyword, value in schema.items() if depth < MAX_DEPTH else ():
        if keyword in ONE_SCHEMA and isinstance(value, dict | bool):
            kept[keyword] = part(value)
        elif (keyword in SCHEMA_LISTS or keyword == "items") and _is_list(value):
            kept[keyword] = [part(each) for each in value]
        elif keyword == "patternProperties" and isinstance(value, dict):
            kept[keyword] = {key: part(each) for key, each in value.items() if stands(json.dumps({"pattern": key}))}
        elif keyword in SCHEMA_MAPS and isinstance(value, dict):
            kept[keyword] = {key: part(each) if isinstance(each, dict | bool) else {} for key, each in value.items()}
        elif keyword not in _HOLDERS and (keyword == "$ref" or stands(json.dumps({keyword: value}))):
            kept[keyword] = value
    return kept


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict | bool) for each in value)


def _with_few_left_out(schema: Schema, prepare: Callable[[Schema], Schema | None]) -> Schema | None:
    """The schema without some keywords, of those that hold no schemas; None if it fails without all of them."""
    tried = [(id(node), keyword) for node in schemas_in(schema) for keyword in node if keyword not in _HOLDERS]
    left_out, waiting = set(tried), [tried]
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


def _without(schema: Any, left_out: set[tuple[int, str]]) -> Any:
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
